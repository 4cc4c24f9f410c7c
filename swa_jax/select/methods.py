"""Every way of choosing under one name, so that they can be compared at the same budgets."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from swa_jax.errors import ConfigError
from swa_jax.evaluate.examples import Example
from swa_jax.model.decoder import Decoder
from swa_jax.model.pattern import AttentionPattern
from swa_jax.select.bosch_search import bosch, bosch_pattern
from swa_jax.select.evaluator import MaskEvaluator
from swa_jax.select.gates import gate_logits
from swa_jax.select.greedy_heads import greedy_heads
from swa_jax.select.heads import head_pattern, heuristic_mask, window_most_local, windowed_count
from swa_jax.select.layer_patterns import greedy_pattern, nll_pattern
from swa_jax.select.light_transfer import SINK_TOKENS, lazy_ratios, light_transfer_pattern
from swa_jax.select.method_table import METHODS, By, Heuristic, StaticMethod, Variant
from swa_jax.select.nll import LayerScorer, Progress
from swa_jax.select.static import LARGER_IS_LOCAL, static_scores
from swa_jax.settings import nearest

__all__ = ["METHODS", "choose"]


class Task(NamedTuple):
    """What is to be chosen, for any method."""

    model: Decoder
    examples: Sequence[Example]
    ratios: Sequence[float]
    sliding_window: int
    num_sink_tokens: int
    full_attention_decode: bool
    batch_size: int
    iterations: int
    by: By
    seed: int
    data: str
    evaluations: Path | None
    weights: str | None
    progress: Progress | None

    @property
    def windowed(self) -> dict[str, Any]:
        return {"sliding_window": self.sliding_window, "num_sink_tokens": self.num_sink_tokens}

    @property
    def layer_budgets(self) -> list[int]:
        """Full layers at each ratio."""
        layers = self.model.config.num_hidden_layers
        return [layers - windowed_count(ratio, layers) for ratio in self.ratios]


def choose(
    method: str,
    model: Decoder,
    examples: Sequence[Example],
    ratios: Sequence[float],
    *,
    sliding_window: int,
    num_sink_tokens: int = 0,
    full_attention_decode: bool = False,
    batch_size: int = 8,
    iterations: int = 100,
    by: By = "answers",
    seed: int = 0,
    data: str = "",
    evaluations: Path | None = None,
    weights: str | None = None,
    progress: Progress | None = None,
) -> list[AttentionPattern]:
    """A pattern for each ratio: the share of KV heads, or of layers, that is windowed, rounded up.

    Each pattern says in its provenance how it was chosen.

    Args:
      method: a name in `swa_jax.select.method_table.METHODS`.
      examples: what to choose by; those that look at places alone ignore them.
      full_attention_decode: whether answers are decoded with full attention, in the patterns and while those methods
        choose that run the model with windows: NLL, BOSCH, KL and gates.
      iterations: BOSCH's kappa; by: what it scores masks by, as in `MaskEvaluator`.
      data: what the examples are, for the provenance.
      evaluations: where BOSCH keeps its scores; shared by its variants and ratios.
      weights: the sum of the weights for that file, as in `content_key`.
      progress: called with (steps done, steps expected); BOSCH begins anew with each ratio.

    Raises:
      ConfigError: an unknown method, a ratio outside [0, 1], or what the method itself refuses.
    """
    if method not in METHODS:
        raise ConfigError(f"method '{method}' is not known{nearest(method, list(METHODS))}")
    task = Task(
        model, examples, ratios, sliding_window, num_sink_tokens, full_attention_decode, batch_size, iterations, by,
        seed, data, evaluations, weights, progress,
    )  # fmt: skip
    row = METHODS[method]
    patterns = _RUN[row.family](task, **row.options)
    return [dataclasses.replace(one, full_attention_decode=full_attention_decode) for one in patterns]


def _nll(task: Task, greedy: bool = False, tried: int = 0) -> list[AttentionPattern]:
    scorer = LayerScorer(
        task.model,
        task.examples,
        **task.windowed,
        full_attention_decode=task.full_attention_decode,
        batch_size=task.batch_size,
    )
    drawn: dict[str, Any] = {"data": task.data, "seed": task.seed}
    if not greedy:
        scores = scorer(progress=task.progress)
        return [nll_pattern(scores, budget=n, **drawn) for n in task.layer_budgets]
    rounds = scorer.greedy(max(1, *task.layer_budgets), tried=tried or None, progress=task.progress)
    return [
        greedy_pattern(rounds[:n], **drawn) if n else nll_pattern(rounds[0], budget=0, **drawn)
        for n in task.layer_budgets
    ]


def _nll_heads(task: Task) -> list[AttentionPattern]:
    evaluate = MaskEvaluator(
        task.model,
        task.examples,
        **task.windowed,
        full_attention_decode=task.full_attention_decode,
        by=task.by,
        batch_size=task.batch_size,
        file=task.evaluations,
        weights=task.weights,
    )
    total = math.prod(evaluate.shape)
    counts = [total - windowed_count(ratio, total) for ratio in task.ratios]
    found = greedy_heads(evaluate, max(1, *counts), progress=task.progress)
    more = {"data": task.data, "gradients": found.gradients}
    return _of_masks(task, [found.mask(count) for count in counts], "nll-heads", more)


def _light_transfer(task: Task) -> list[AttentionPattern]:
    recent = max(1, task.sliding_window - SINK_TOKENS)  # the paper's 4 + 1020 keys are its window of 1024
    lazy = lazy_ratios(
        task.model, task.examples, recent_keys=recent, batch_size=task.batch_size, progress=task.progress
    )
    return [
        light_transfer_pattern(
            lazy,
            budget=n,
            sliding_window=task.sliding_window,
            num_sink_tokens=task.num_sink_tokens,
            data=task.data,
            seed=task.seed,
        )
        for n in task.layer_budgets
    ]


def _bosch(task: Task, variant: Variant) -> list[AttentionPattern]:
    evaluate = MaskEvaluator(
        task.model,
        task.examples,
        **task.windowed,
        full_attention_decode=task.full_attention_decode,
        by=task.by,
        batch_size=task.batch_size,
        file=task.evaluations,
        weights=task.weights,
    )
    settings: dict[str, Any] = {"variant": variant, "iterations": task.iterations, "seed": task.seed}
    return [
        bosch_pattern(
            bosch(evaluate, ratio, progress=task.progress, **settings),
            evaluate,
            ratio=ratio,
            data=task.data,
            **settings,
        )
        for ratio in task.ratios
    ]


def _static(task: Task, method: StaticMethod) -> list[AttentionPattern]:
    scores = static_scores(
        task.model,
        task.examples,
        method,
        **task.windowed,
        full_attention_decode=task.full_attention_decode,
        batch_size=task.batch_size,
        seed=task.seed,
        progress=task.progress,
    )
    local = LARGER_IS_LOCAL[method]
    masks = [window_most_local(scores, ratio, larger_is_local=local) for ratio in task.ratios]
    more = {"data": task.data, "scores": scores.tolist(), "larger_is_local": local}
    return _of_masks(task, masks, method, more)


def _gates(task: Task) -> list[AttentionPattern]:
    patterns = []
    for ratio in task.ratios:
        scores = gate_logits(
            task.model,
            task.examples,
            full_share=1 - ratio,
            **task.windowed,
            full_attention_decode=task.full_attention_decode,
            batch_size=task.batch_size,
            seed=task.seed,
            progress=task.progress,
        )
        mask = window_most_local(scores, ratio, larger_is_local=False)
        more = {"data": task.data, "scores": scores.tolist(), "larger_is_local": False}
        patterns += _of_masks(task._replace(ratios=[ratio]), [mask], "gates", more)
    return patterns


def _heuristic(task: Task, kind: Heuristic) -> list[AttentionPattern]:
    shape = (task.model.config.num_hidden_layers, task.model.config.common_kv_heads)
    masks = [heuristic_mask(kind, *shape, ratio, task.seed) for ratio in task.ratios]
    return _of_masks(task, masks, kind, {})


def _of_masks(task: Task, masks: Sequence[np.ndarray], method: str, more: dict[str, Any]) -> list[AttentionPattern]:
    return [
        head_pattern(
            full,
            task.sliding_window,
            task.num_sink_tokens,
            {"method": method, "ratio": ratio, "windowed_heads": int((~full).sum()), "seed": task.seed, **more},
        )
        for full, ratio in zip(masks, task.ratios, strict=True)
    ]


_RUN: dict[str, Any] = {
    "nll": _nll,
    "nll-heads": _nll_heads,
    "light-transfer": _light_transfer,
    "bosch": _bosch,
    "static": _static,
    "gates": _gates,
    "heuristic": _heuristic,
}
