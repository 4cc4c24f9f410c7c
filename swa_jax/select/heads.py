"""Head masks: which KV head of which layer keeps full attention, bool [L, K]; the patterns made of them.

Under grouped queries a "head" of BOSCH is a KV head with all its query heads: only then does windowing it save memory.
True is full attention, the paper's z = 1; the paper's ratio rho is the share of windowed heads.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import ArrayLike

from swa_jax.base.errors import ConfigError
from swa_jax.model.config import ModelConfig
from swa_jax.model.layer_types import FULL, HYBRID, LINEAR, SWITCH, WINDOW
from swa_jax.model.pattern import AttentionPattern
from swa_jax.model.recipes import begin_middle_end
from swa_jax.model.window import Window

Heuristic = Literal["random", "random-heads", "begin-middle-end", "interleave"]


def windowed_count(ratio: float, heads: int) -> int:
    """ceil(ratio * heads): how many of `heads` are windowed at BOSCH's rho. Raises `ConfigError` outside [0, 1]."""
    if not 0 <= ratio <= 1:
        raise ConfigError(f"ratio is {ratio}: the share of windowed heads must lie between 0 and 1")
    return math.ceil(ratio * heads - 1e-9)  # 0.7 * 10 is a little over 7 in floating point


def single_heads(full: np.ndarray, heads_in: int) -> np.ndarray:
    """The mask [L, K * heads_in] of KV heads that a mask [L, K] of groups of neighbours stands for."""
    return full.repeat(heads_in, axis=1)


def of_all_layers(full: np.ndarray, config: ModelConfig) -> np.ndarray:
    """The mask [L, K] of all layers that a mask of those that attend stands for."""
    mask = np.zeros((config.num_hidden_layers, full.shape[1]), bool)
    mask[list(config.attention_layers)] = full
    return mask


def head_pattern(
    full: np.ndarray, window: Window, provenance: Mapping[str, Any] = {}, *, linear: Collection[int] = ()
) -> AttentionPattern:
    """The pattern of a mask [L, K]: layers whose heads agree are full or windowed, the others per-head hybrids; of
    `linear` layers the mask says nothing."""
    kinds = tuple(FULL if row.all() else HYBRID if row.any() else WINDOW for row in full)
    kinds = tuple(LINEAR if layer in linear else kind for layer, kind in enumerate(kinds))
    heads = tuple(
        tuple(np.flatnonzero(row).tolist()) if kind == HYBRID else () for row, kind in zip(full, kinds, strict=True)
    )
    return AttentionPattern(kinds, **window.fields, full_kv_heads=heads, provenance=dict(provenance))


def head_mask(pattern: AttentionPattern, num_kv_heads: int) -> np.ndarray:
    """The mask [L, K] of a pattern. Raises `ConfigError` for one with routed layers, which have none."""
    if SWITCH in pattern.layer_types:
        raise ConfigError(f"layer {pattern.layer_types.index(SWITCH)} is routed: it has no fixed full heads")
    full = np.zeros((pattern.num_layers, num_kv_heads), bool)
    for layer, kind in enumerate(pattern.layer_types):
        full[layer] = kind == FULL
        full[layer, list(pattern.full_kv_heads[layer])] = True
    return full


def heuristic_mask(kind: Heuristic, num_layers: int, num_kv_heads: int, ratio: float, seed: int = 0) -> np.ndarray:
    """The paper's layer-level heuristics at an exact number of heads, and heads drawn at random: [L, K].

    Layers are full as a whole, but for the last of them where the number of heads asks for a part.
    """
    total = num_layers * num_kv_heads
    full_heads = total - windowed_count(ratio, total)
    budget = -(-full_heads // num_kv_heads)  # layers with a full head
    rng = np.random.default_rng(seed)
    if kind == "random-heads":
        chosen = rng.permutation(total)
    else:
        if kind == "random":
            layers = np.sort(rng.choice(num_layers, budget, replace=False))
        elif kind == "begin-middle-end":
            layers = np.array(begin_middle_end(budget, num_layers), int)
        elif kind == "interleave":  # layers n - 1, 2n - 1, ... where the budget is one in n
            layers = (np.arange(1, budget + 1) * num_layers) // max(budget, 1) - 1
        else:
            raise ConfigError(f"heuristic '{kind}' is not known; known: {', '.join(get_args(Heuristic))}")
        chosen = (layers[:, None] * num_kv_heads + np.arange(num_kv_heads)).ravel()
    full = np.zeros(total, bool)
    full[chosen[:full_heads]] = True
    return full.reshape(num_layers, num_kv_heads)


class MaskDifference(NamedTuple):
    """How the windowed heads of one mask differ from those of another (BOSCH, Sections 4.2 and 4.3)."""

    turnover: float  # share of the first's windowed heads that the second does not window
    relative_turnover: float  # the same, over the most that the two head counts allow; 0 if they allow none
    jaccard_distance: float  # 1 - intersection / union


def compare_masks(first: np.ndarray, second: np.ndarray) -> MaskDifference:
    """Compare the windowed heads of two masks [L, K]; the paper's `first` has the smaller ratio."""
    if first.shape != second.shape:
        raise ConfigError(f"the masks are of different models: {first.shape} and {second.shape} heads")
    a, b = ~first, ~second
    lost, common, union = (a & ~b).sum(), (a & b).sum(), (a | b).sum()
    most = min(a.sum(), (~b).sum())
    return MaskDifference(
        float(lost / max(a.sum(), 1)), float(lost / most) if most else 0.0, float(1 - common / union) if union else 0.0
    )


def rank_correlation(first: ArrayLike, second: ArrayLike) -> float:
    """Spearman's, of two arrays of scores of one shape; equals share their mean rank, and where all tie it is 0."""
    a, b = (_ranks(np.ravel(scores)) for scores in (first, second))
    spread = float(np.sqrt((a**2).sum() * (b**2).sum()))
    return float((a * b).sum()) / spread if spread else 0.0


def _ranks(scores: np.ndarray) -> np.ndarray:
    """Ranks about their mean."""
    _, place, count = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(count) - (count - 1) / 2)[place]
    return ranks - ranks.mean()


def swap_back(small: np.ndarray, large: np.ndarray, seed: int = 0) -> np.ndarray:
    """BOSCH's A' (Section C.1): `large` with the heads only `small` windows, in place of as many drawn at random.

    Both masks [L, K]; the number of windowed heads is that of `large`.
    """
    only_small = np.flatnonzero(~small & large)
    drawn = np.random.default_rng(seed).choice(np.flatnonzero(~large), only_small.size, replace=False)
    full = large.copy().ravel()
    full[drawn], full[only_small] = True, False
    return full.reshape(large.shape)
