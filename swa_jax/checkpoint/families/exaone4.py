"""EXAONE 4: norms on what attention and MLP give, QK norms; a model with windows turns windowed layers only."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from swa_jax.checkpoint.families.common import Family, Windows, layer_types, positive_int, read_dense, write_dense
from swa_jax.checkpoint.families.rope import nope_of_full_layers, read_windows_by_type, window_keys_with_nope
from swa_jax.model.config import ModelConfig, RopeKind
from swa_jax.model.layer_types import FULL, WINDOW
from swa_jax.model.pattern import AttentionPattern

DEFAULT_CONTEXT = 2048
DEFAULTS = {"num_key_value_heads": 32, "max_position_embeddings": DEFAULT_CONTEXT, "rms_norm_eps": 1e-5}
DEFAULT_WINDOW, DEFAULT_INTERVAL = 4096, 4


def from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    config = read_dense(hf, DEFAULTS, norm_placement="post", qk_norm=True)
    return dataclasses.replace(config, rope_layers=rope_layers(hf, config.num_hidden_layers))


def rope_layers(hf: Mapping[str, Any], layers: int) -> tuple[RopeKind, ...]:
    """Without a window all layers have rotary embeddings."""
    return () if _window(hf) is None else nope_of_full_layers(_types(hf, layers))


def to_hf(config: ModelConfig) -> dict[str, Any]:
    return write_dense(config) | window_keys(config, AttentionPattern((FULL,) * config.num_hidden_layers))


def _window(hf: Mapping[str, Any]) -> int | None:
    return hf.get("sliding_window", DEFAULT_WINDOW)


def _types(hf: Mapping[str, Any], layers: int) -> list[str]:
    """Without `layer_types` one layer in `sliding_window_pattern` is full."""
    if hf.get("layer_types") is not None:
        return layer_types(hf, [FULL] * layers)
    interval = positive_int(hf, "sliding_window_pattern", DEFAULT_INTERVAL)
    return [WINDOW if (i + 1) % interval else FULL for i in range(layers)]


def read_windows(hf: Mapping[str, Any], layers: int) -> Windows:
    if _window(hf) is None:
        return None, [FULL] * layers
    context = hf.get("max_position_embeddings") or DEFAULT_CONTEXT
    return read_windows_by_type(_window(hf), _types(hf, layers), context)


def window_keys(config: ModelConfig, pattern: AttentionPattern) -> dict[str, Any]:
    """Without a window every layer has rotary embeddings, and only then may a full layer have them."""
    if not config.rope_layers and pattern.sliding_window is None:
        return {"sliding_window": None, "layer_types": [FULL] * pattern.num_layers}
    return window_keys_with_nope(config, pattern)


FAMILY = Family(
    "exaone4",
    "Exaone4ForCausalLM",
    from_hf,
    to_hf,
    read_windows,
    window_keys,
    peculiarity="rotary embeddings in these layers alone",
)
