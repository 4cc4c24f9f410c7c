"""Floating-point operations of a model, counted from its configuration: a multiplication and an addition are two."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from swa_jax.model.config import ModelConfig
from swa_jax.model.layer_types import FULL, HYBRID, LINEAR, SWITCH
from swa_jax.model.lora import LoraConfig
from swa_jax.model.parameters import parameters
from swa_jax.model.pattern import AttentionPattern


def matrix_parameters(config: ModelConfig) -> int:
    """Weights that a token is multiplied with: the projections of all layers, of experts those that it meets, and the
    output matrix."""
    return sum(parameter.active_size for parameter in parameters(config) if parameter.matrix or parameter.output)


def visible_keys(
    position: np.ndarray, window: int | None, num_sink_tokens: int = 0, *, chunked: bool = False
) -> np.ndarray:
    """Keys that a query at `position` (from 0) of one document sees, in a window or in its chunk."""
    seen = np.asarray(position, np.int64) + 1
    if window is None:
        return seen
    near = (seen - 1) % window + 1 if chunked else window
    return np.minimum(seen, near + np.minimum(num_sink_tokens, seen))


def attention_flops(
    config: ModelConfig, pattern: AttentionPattern, position: np.ndarray, full_ratio: float = 1.0
) -> np.ndarray:
    """Forward operations of all layers' attention for the token at each position: 4 D for a head and visible key; and
    those of linear layers on their states.

    Args:
      full_ratio: share of the tokens that routed layers send to full attention (a backward pass or a prefill; a
        forward pass that trains computes both branches, full_ratio = 1).
    """
    kinds = attention_flops_by_kind(config, pattern, position, full_ratio)
    # A state [Dk, Dv] is read for the update, changed, and read for what a head says.
    states = 6.0 * config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim
    return np.sum([part for parts in kinds.values() for part in parts], axis=0) + states * len(config.linear_layers)


class AttentionParts(NamedTuple):
    """Operations of the token at each position."""

    window: np.ndarray  # on keys in the window
    others: np.ndarray  # of full attention, or on what a routed token sees beside its window


def attention_flops_by_kind(
    config: ModelConfig, pattern: AttentionPattern, position: np.ndarray, full_ratio: float = 1.0
) -> dict[str, AttentionParts]:
    """`attention_flops` of the layers of each type that occurs in the pattern, in two parts."""
    costs = [4.0 * channels for channels in _query_channels(config)]
    return _summed(config, pattern, position, full_ratio, costs)


def _summed(
    config: ModelConfig, pattern: AttentionPattern, position: np.ndarray, full_ratio: float, costs: Sequence[float]
) -> dict[str, AttentionParts]:
    """The keys that the token at each position sees, each at the cost of its layer, of the layers of each type."""
    full = visible_keys(position, None)
    window = full
    if pattern.sliding_window is not None:
        window = visible_keys(position, pattern.sliding_window, pattern.num_sink_tokens, chunked=pattern.chunked)
    found: dict[str, AttentionParts] = {}
    layers = zip(pattern.layer_types, pattern.full_kv_heads, config.head_shapes, costs, strict=True)
    for kind, heads, (kv_heads, _), key in layers:
        if kind == LINEAR:
            continue
        share = {FULL: 1.0, HYBRID: len(heads) / kv_heads}.get(kind, 0.0)
        others = full_ratio * (full - window) if kind == SWITCH else share * full
        before = found.get(kind, AttentionParts(np.zeros(full.shape), np.zeros(full.shape)))
        found[kind] = AttentionParts(before.window + key * (1 - share) * window, before.others + key * others)
    return found


class AtPosition(NamedTuple):
    """What a model works for one token (SwiAttn, Figure 4)."""

    position: int  # tokens up to it, itself included
    prefill_flops: float
    kv_tokens_read: float  # of the cache when it is decoded: the mean over the channels of all KV heads


def work_by_position(
    config: ModelConfig, pattern: AttentionPattern, positions: Sequence[int], full_ratio: float = 1.0
) -> list[AtPosition]:
    """Operations of a prefill and tokens of the KV cache that decoding reads, at each position from 1 on.

    Under full-attention decode the prompt has the pattern's windows, and a decoded token reads everything.

    Args:
      full_ratio: share of the tokens that routed layers send to full attention.
    """
    at = np.asarray(positions, np.int64) - 1
    prefill = 2.0 * matrix_parameters(config) + attention_flops(config, pattern, at, full_ratio)
    if pattern.full_attention_decode:
        read = visible_keys(at, None).astype(np.float64)
    else:
        entries = [float(kv_heads * head_dim) for kv_heads, head_dim in config.head_shapes]
        kinds = _summed(config, pattern, at, full_ratio, entries)
        read = np.sum([part for parts in kinds.values() for part in parts], axis=0)
        read /= sum(entries[layer] for layer in config.attention_layers)
    rows = zip(positions, prefill.tolist(), read.tolist(), strict=True)
    return [AtPosition(*row) for row in rows]


def some_positions(length: int) -> list[int]:
    """The powers of four up to a length, and the length itself."""
    return [*(4**i for i in range(length.bit_length()) if 4**i < length), length]


def output_flops(config: ModelConfig) -> float:
    """Forward operations of a token's logits."""
    return 2.0 * config.hidden_size * config.vocab_size


def forward_flops(config: ModelConfig, keys: float) -> float:
    """Forward operations of a token that reads `keys` keys in a layer, the mean over the layers; its logits too."""
    return 2.0 * matrix_parameters(config) + 4.0 * sum(_query_channels(config)) * keys


def _query_channels(config: ModelConfig) -> list[int]:
    """The channels of all query heads, of each layer; linear layers have none."""
    sizes = [0 if i in config.linear_layers else head_dim for i, (_, head_dim) in enumerate(config.head_shapes)]
    return [heads * size for heads, size in zip(config.query_heads, sizes, strict=True)]


def train_flops_per_token(
    config: ModelConfig,
    pattern: AttentionPattern,
    length: int,
    full_ratio: float = 1.0,
    lora: LoraConfig | None = None,
    teacher: AttentionPattern | None = None,
) -> float:
    """Forward and backward, the mean over the tokens of a row that is one document; the backward is twice the forward.

    What is computed a second time for want of memory does not count. `full_ratio` is for the backward of routed layers.
    Under LoRA frozen weights have no gradient: their backward is once the forward, that of the adapters twice. A
    teacher of the same sizes, under its own pattern, has a forward pass only.
    """
    positions = np.arange(length)
    matrices = 2.0 * matrix_parameters(config)
    forward = attention_flops(config, pattern, positions).mean()
    backward = 2 * attention_flops(config, pattern, positions, full_ratio).mean()
    if teacher is not None:
        forward += matrices + attention_flops(config, teacher, positions).mean()
    if lora is None:
        return 3 * matrices + float(forward + backward)
    return 2 * matrices + 6 * lora.num_parameters(config) + float(forward + backward)
