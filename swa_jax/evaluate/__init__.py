"""Measuring a model: answer NLL, perplexity, needle accuracy, and how sure each figure is."""

from swa_jax.base.estimates import Estimate, accuracy_interval, bootstrap, paired_bootstrap
from swa_jax.evaluate.examples import Example, prompt_examples
from swa_jax.evaluate.generated_answers import Answers, generate_answers, needle_accuracy
from swa_jax.evaluate.needle import needle_examples
from swa_jax.evaluate.nll import AnswerScores, Perplexity, perplexity, score_answers
from swa_jax.evaluate.ruler import RULER_TASKS, ruler_examples, ruler_grid
from swa_jax.evaluate.ruler_data import RulerData
from swa_jax.evaluate.ruler_scores import RulerScore, ruler_scores
from swa_jax.evaluate.sweep import SweepScore, perplexity_sweep

__all__ = [
    "RULER_TASKS",
    "AnswerScores",
    "Answers",
    "Estimate",
    "Example",
    "Perplexity",
    "RulerData",
    "RulerScore",
    "SweepScore",
    "accuracy_interval",
    "bootstrap",
    "generate_answers",
    "needle_accuracy",
    "needle_examples",
    "paired_bootstrap",
    "perplexity",
    "perplexity_sweep",
    "prompt_examples",
    "ruler_examples",
    "ruler_grid",
    "ruler_scores",
    "score_answers",
]
