"""Choosing the layers that keep full attention."""

from swa_jax.select.nll import NLLScores, nll_deltas, nll_pattern, nll_scores, select_layers

__all__ = ["NLLScores", "nll_deltas", "nll_pattern", "nll_scores", "select_layers"]
