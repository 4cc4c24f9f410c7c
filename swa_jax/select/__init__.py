"""Choosing the layers, and inside them the heads, that keep full attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swa_jax.exports import lazy

if TYPE_CHECKING:
    from swa_jax.select.bosch_search import Selection, bosch, bosch_pattern
    from swa_jax.select.evaluator import MaskEvaluator, Score
    from swa_jax.select.layer_patterns import greedy_pattern, nll_pattern, select_layers
    from swa_jax.select.light_transfer import LazyRatios, lazy_ratios, light_transfer_pattern
    from swa_jax.select.nll import LayerScorer, NLLScores, nll_deltas, nll_greedy, nll_scores
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

__getattr__ = lazy(
    __name__,
    {
        "Selection": "bosch_search",
        "bosch": "bosch_search",
        "bosch_pattern": "bosch_search",
        "MaskEvaluator": "evaluator",
        "Score": "evaluator",
        "LazyRatios": "light_transfer",
        "lazy_ratios": "light_transfer",
        "light_transfer_pattern": "light_transfer",
        "LayerScorer": "nll",
        "NLLScores": "nll",
        "greedy_pattern": "layer_patterns",
        "nll_deltas": "nll",
        "nll_greedy": "nll",
        "nll_pattern": "layer_patterns",
        "nll_scores": "nll",
        "select_layers": "layer_patterns",
        "static_scores": "static",
    },
)
