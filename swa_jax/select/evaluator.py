"""Search mode: one loaded model, its head mask being data, and every mask scored at most once.

Source: "BOSCH: Black-Box Binary Optimization for Short-Context Attention-Head Selection in LLMs", Eq. 4 and Section
B.2. All layers run as per-head hybrids, so that one compilation serves every mask and masks that differ in nothing a
query can see score exactly alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flax import nnx

from swa_jax.evaluate.examples import Example
from swa_jax.evaluate.nll import AnswerScores, answer_batches, score_batch
from swa_jax.model.attention import layer_data
from swa_jax.model.decoder import Decoder
from swa_jax.model.layer_types import HYBRID
from swa_jax.model.pattern import AttentionPattern
from swa_jax.model.window import OWN, Window
from swa_jax.select.content import score_store
from swa_jax.select.gates import gate_gradient
from swa_jax.select.heads import single_heads
from swa_jax.select.separation import By
from swa_jax.select.work import count_pass


class Score(NamedTuple):
    """How well a mask does; larger is better. Equal values, which are common, are told apart by the likelihood."""

    value: float  # the share of answers that are right (Eq. 4), or by loss the likelihood of the answers' tokens
    log_likelihood: float  # of the answers, nats a token, the mean over examples


class MaskEvaluator:
    """`evaluator(full [L, K] bool) -> Score`: a teacher-forced pass over the examples. A repeated mask costs nothing.

    Args:
      heads_in: neighbouring KV heads that masks have together; K counts groups of so many.
      window: that of the windowed heads; what it does not give is the model's own.
      by: "loss" scores a mask by the geometric mean of the probabilities of the answers' tokens, an example's mean
        counting as one. The paper's accuracy says nothing where a model gets few answers right, or all of them.
      file: keeps the scores, written as they come, by their content (see `content_key`): the same search goes on from
        there, any other begins anew beside them.
      weights: with `file`, the sum of the weights, as in `content_key`. None computes it from the model's arrays.

    Raises:
      ConfigError: no window; no examples, or one with an empty prompt or answer; or `file` holds something else.
    """

    def __init__(
        self,
        model: Decoder,
        examples: Sequence[Example],
        window: Window = OWN,
        *,
        by: By = "answers",
        heads_in: int = 1,
        batch_size: int = 8,
        file: Path | None = None,
        weights: str | None = None,
    ):
        self.window = window.of(model.pattern.window)
        self.heads_in = heads_in
        self.shape = (model.config.num_hidden_layers, model.config.common_kv_heads // heads_in)
        self.num_examples, self.by = len(examples), by
        self._config = model.config
        self._pattern = AttentionPattern((HYBRID,) * self.shape[0], **self.window.fields)
        self._batches = list(answer_batches(examples, batch_size, self.window))
        self._graph, self._weights = nnx.split(model.with_pattern(self._pattern))
        content: dict[str, Any] = self.window.fields | {"by": by, "weights": weights}
        self._known = score_store(file, "scores of masks", model, examples, **content)
        self._asked: set[str] = set()

    @property
    def num_evaluations(self) -> int:
        """How many different masks have a score, those found in the file included."""
        return len(self._known.records)

    @property
    def num_asked(self) -> int:
        """How many different masks this evaluator was asked for, whether the file knew them or not."""
        return len(self._asked)

    def __call__(self, full: np.ndarray) -> Score:
        key = _key(single_heads(full, self.heads_in))
        if key not in self._asked:  # what the file knows is work too: of the run that wrote it
            self._asked.add(key)
            for _, batch in self._batches:
                count_pass(batch.tokens, logits=batch.labels.size)
        if key not in self._known.records:
            self._known.add(key, score=self._evaluate(full))
        return Score(*self._known.records[key]["score"])

    def answers(self, full: np.ndarray) -> AnswerScores:
        """The scores of every single example under a mask. They are not written to the file."""
        heads = tuple(tuple(np.flatnonzero(row).tolist()) for row in single_heads(full, self.heads_in))
        data = layer_data(dataclasses.replace(self._pattern, full_kv_heads=heads), self._config, (HYBRID,))
        nll, right = np.empty(self.num_examples), np.empty(self.num_examples, bool)
        for index, batch in self._batches:
            mean, found = score_batch(self._graph, self._weights, batch, data)
            nll[index] = np.asarray(mean, np.float64)[: len(index)]
            right[index] = np.asarray(found)[: len(index)]
        return AnswerScores(nll, right)

    def gate_gradient(self, full: np.ndarray) -> np.ndarray:
        """How fast the answers' loss falls as each head that is not full is opened: [L, K] f64, nats a token."""
        whole = single_heads(full, self.heads_in)
        for _, batch in self._batches:
            count_pass(batch.tokens, back=1, logits=3 * batch.labels.size)
        found = gate_gradient(self._graph, self._weights, self._batches, whole) / self.num_examples
        return found.reshape(*full.shape, self.heads_in).sum(-1)

    def _evaluate(self, full: np.ndarray) -> Score:
        nll, right = self.answers(full)
        return Score(float(right.mean() if self.by == "answers" else np.exp(-nll.mean())), -float(nll.mean()))


def _key(full: np.ndarray) -> str:
    """A mask as text: a digit a head, a word a layer."""
    return " ".join("".join("1" if head else "0" for head in row) for row in full)
