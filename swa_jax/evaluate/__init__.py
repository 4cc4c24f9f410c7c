"""Measuring a model: answer NLL, perplexity, needle accuracy, and how sure each figure is."""

from swa_jax.evaluate.accuracy import Answers, generate_answers, needle_accuracy, needle_accuracy_grid
from swa_jax.evaluate.bootstrap import Estimate, accuracy_interval, bootstrap, paired_bootstrap
from swa_jax.evaluate.examples import Example
from swa_jax.evaluate.needle import needle_examples, needle_grid
from swa_jax.evaluate.nll import AnswerScores, Perplexity, answer_nll, perplexity, score_answers

__all__ = [
    "AnswerScores",
    "Answers",
    "Estimate",
    "Example",
    "Perplexity",
    "accuracy_interval",
    "answer_nll",
    "bootstrap",
    "generate_answers",
    "needle_accuracy",
    "needle_accuracy_grid",
    "needle_examples",
    "needle_grid",
    "paired_bootstrap",
    "perplexity",
    "score_answers",
]
