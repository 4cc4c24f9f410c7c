"""Choosing the layers, and inside them the heads, that keep full attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swa_jax.base.exports import lazy

if TYPE_CHECKING:
    from swa_jax.select.bosch_search import Selection, bosch
    from swa_jax.select.evaluator import MaskEvaluator, Score
    from swa_jax.select.light_transfer import lazy_ratios
    from swa_jax.select.methods import METHODS, choose
    from swa_jax.select.nll import LayerScorer, NLLScores, nll_deltas, nll_scores
    from swa_jax.select.static import static_scores
    from swa_jax.select.task import Task

__all__ = [
    "METHODS",
    "LayerScorer",
    "MaskEvaluator",
    "NLLScores",
    "Score",
    "Selection",
    "Task",
    "bosch",
    "choose",
    "lazy_ratios",
    "nll_deltas",
    "nll_scores",
    "static_scores",
]

__getattr__ = lazy(
    __name__,
    {
        "METHODS": "methods",
        "choose": "methods",
        "Task": "task",
        "Selection": "bosch_search",
        "bosch": "bosch_search",
        "MaskEvaluator": "evaluator",
        "Score": "evaluator",
        "lazy_ratios": "light_transfer",
        "LayerScorer": "nll",
        "NLLScores": "nll",
        "nll_deltas": "nll",
        "nll_scores": "nll",
        "static_scores": "static",
    },
)
