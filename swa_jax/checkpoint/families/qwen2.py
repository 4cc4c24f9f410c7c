"""Qwen2: biases on queries, keys and values; windows from a layer on, or by `layer_types`, if switched on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swa_jax.base.errors import ConfigError
from swa_jax.checkpoint.families.common import Family, Windows, layer_types, read_dense, write_dense
from swa_jax.model.config import ModelConfig
from swa_jax.model.layer_types import FULL, WINDOW
from swa_jax.model.pattern import AttentionPattern

DEFAULTS = {"num_key_value_heads": 32, "max_position_embeddings": 32768}
DEFAULT_WINDOW, DEFAULT_FULL_LAYERS = 4096, 28  # where the keys are absent


def from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    return read_dense(hf, DEFAULTS, attention_bias=True)


def read_windows(hf: Mapping[str, Any], layers: int) -> Windows:
    """Without `use_sliding_window` the window is stored, but not used. The first `max_window_layers` are full."""
    window = hf.get("sliding_window", DEFAULT_WINDOW) if hf.get("use_sliding_window", False) else None
    full = layers if window is None else hf.get("max_window_layers", DEFAULT_FULL_LAYERS)
    if type(full) is not int:
        raise ConfigError(f"config.json: max_window_layers must be a whole number, got {full!r}")
    return window, layer_types(hf, [FULL if i < full else WINDOW for i in range(layers)])


def window_keys(config: ModelConfig, pattern: AttentionPattern) -> dict[str, Any]:
    window, types = pattern.sliding_window, list(pattern.layer_types)
    keys = {"sliding_window": window, "layer_types": types, "use_sliding_window": window is not None}
    if window is not None:  # how many layers at the start are full: what older readers go by
        keys["max_window_layers"] = types.index(WINDOW)
    return keys


FAMILY = Family("qwen2", "Qwen2ForCausalLM", from_hf, write_dense, read_windows, window_keys)
