"""Patterns of layers by their scores: the best of one scoring, or one after the other by a greedy search."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from swa_jax.errors import ConfigError
from swa_jax.model.pattern import AttentionPattern
from swa_jax.select.nll import NLLScores


def select_layers(scores: ArrayLike, budget: int) -> tuple[int, ...]:
    """The `budget` layers of largest score, in order of depth; between equals the lower layer wins.

    Raises `ConfigError` if the budget is not between 0 and the number of layers, or a score is not finite.
    """
    scores = np.asarray(scores, np.float64)
    if scores.ndim != 1 or not np.isfinite(scores).all():
        raise ConfigError(f"scores must be one finite number a layer, got shape {scores.shape}: {scores.tolist()}")
    if not 0 <= budget <= scores.size:
        raise ConfigError(f"budget is {budget} full layers, the model has {scores.size}")
    return tuple(sorted(np.argsort(-scores, kind="stable")[:budget].tolist()))


def full_layer_budget(num_layers: int, budget: int | None, one_in_n: int | None) -> int:
    """How many layers stay full: `budget`, or one in n and at least 1.

    Raises `ConfigError` unless just one of them is given, and the model has as many layers.
    """
    if (budget is None) == (one_in_n is None):
        raise ConfigError("give exactly one of budget and one_in_n")
    if budget is not None:
        if not 0 <= budget <= num_layers:
            raise ConfigError(f"budget is {budget} full layers, the model has {num_layers}")
        return budget
    assert one_in_n is not None
    if one_in_n < 1:
        raise ConfigError(f"one_in_n must be at least 1, got {one_in_n}")
    return max(1, num_layers // one_in_n)


def nll_pattern(
    scores: NLLScores,
    *,
    budget: int | None = None,
    one_in_n: int | None = None,
    full_attention_decode: bool | None = None,
    data: str = "",
    seed: int | None = None,
) -> AttentionPattern:
    """The pattern with the best layers full and the others windowed as they were when scored.

    Args:
      budget: how many layers stay full. Give this or `one_in_n`.
      one_in_n: one layer in n stays full, at least one.
      full_attention_decode: whether the pattern has it; None is as it was scored.
      data: what the examples were, for the pattern's provenance.
      seed: how they were drawn, for the pattern's provenance.

    Raises:
      ConfigError: not exactly one of `budget` and `one_in_n`, or a budget the model cannot meet.
    """
    chosen = select_layers(scores.mean, full_layer_budget(scores.deltas.shape[1], budget, one_in_n))
    provenance = {"method": "nll", "scores": scores.mean.tolist()}
    return _as_scored(scores, chosen, full_attention_decode, data, seed, provenance)


def greedy_pattern(
    rounds: Sequence[NLLScores], *, full_attention_decode: bool | None = None, data: str = "", seed: int | None = None
) -> AttentionPattern:
    """The pattern of `nll_greedy`'s rounds: one full layer for each. The other arguments are those of `nll_pattern`.

    Its provenance has also what `provenance_of` gives.
    """
    provenance = provenance_of(rounds)
    provenance["method"] = "nll-gradient" if "gradients" in provenance else "nll-greedy"
    return _as_scored(rounds[0], provenance["picked"], full_attention_decode, data, seed, provenance)


def provenance_of(rounds: Sequence[NLLScores]) -> dict[str, Any]:
    """What a greedy search found, as plain JSON values: the layers in the order in which they were picked, each layer's
    scores in the first round and in all, and the gradients that named the layers tried. Others have null."""
    provenance: dict[str, Any] = {
        "scores": _known(rounds[0].mean),
        "picked": [layer for scores in rounds for layer in scores.picked],
        "rounds": [_known(scores.mean) for scores in rounds],
    }
    gradients = [scores.gradient.tolist() for scores in rounds if scores.gradient is not None]
    return provenance | ({"gradients": gradients} if gradients else {})


def _known(values: np.ndarray) -> list[float | None]:
    """Plain JSON values: null for NaN."""
    return [None if math.isnan(value) else value for value in values.tolist()]


def _as_scored(
    scores: NLLScores,
    full_layers: Sequence[int],
    full_attention_decode: bool | None,
    data: str,
    seed: int | None,
    provenance: dict[str, Any],
) -> AttentionPattern:
    decode = scores.full_attention_decode if full_attention_decode is None else full_attention_decode
    provenance = provenance | {
        "data": data,
        "num_examples": len(scores.deltas),
        "intervals": [estimate.interval for estimate in scores.intervals()],
        "seed": seed,
        "scored_with_full_attention_decode": scores.full_attention_decode,
    }
    return AttentionPattern.from_full_layers(
        full_layers,
        scores.deltas.shape[1],
        scores.sliding_window,
        num_sink_tokens=scores.num_sink_tokens,
        full_attention_decode=decode,
        provenance=provenance,
    )
