"""Choosing the layers, and inside them the heads, that keep full attention."""

from swa_jax.select.bosch import Selection, bosch, bosch_pattern
from swa_jax.select.evaluator import MaskEvaluator, Score
from swa_jax.select.light_transfer import LazyRatios, lazy_ratios, light_transfer_pattern
from swa_jax.select.nll import (
    LayerScorer,
    NLLScores,
    greedy_pattern,
    nll_deltas,
    nll_greedy,
    nll_pattern,
    nll_scores,
    select_layers,
)
from swa_jax.select.static import static_scores

__all__ = [
    "LayerScorer",
    "LazyRatios",
    "MaskEvaluator",
    "NLLScores",
    "Score",
    "Selection",
    "bosch",
    "bosch_pattern",
    "greedy_pattern",
    "lazy_ratios",
    "light_transfer_pattern",
    "nll_deltas",
    "nll_greedy",
    "nll_pattern",
    "nll_scores",
    "select_layers",
    "static_scores",
]
