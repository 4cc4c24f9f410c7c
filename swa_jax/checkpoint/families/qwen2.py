"""Qwen2: biases on queries, keys and values; windows from a layer on, or by `layer_types`, if switched on."""

from __future__ import annotations

from swa_jax.checkpoint.families.common import Family, HfConfig, HfKeys, read_dense, write_dense
from swa_jax.checkpoint.families.grammar import whole
from swa_jax.checkpoint.families.windows import Windows, layer_types
from swa_jax.model.config import ModelConfig
from swa_jax.model.layer_types import FULL, WINDOW
from swa_jax.model.pattern import AttentionPattern

DEFAULTS = {"num_key_value_heads": 32, "max_position_embeddings": 32768}
DEFAULT_WINDOW, DEFAULT_FULL_LAYERS = 4096, 28  # where the keys are absent


def from_hf(hf: HfConfig) -> ModelConfig:
    return read_dense(hf, DEFAULTS, attention_bias=True)


def read_windows(hf: HfConfig, layers: int) -> Windows:
    """Without `use_sliding_window` the window is stored, but not used. The first `max_window_layers` are full."""
    window = hf.get("sliding_window", DEFAULT_WINDOW) if hf.get("use_sliding_window", False) else None
    full = layers if window is None else whole(hf, "max_window_layers", DEFAULT_FULL_LAYERS)
    return window, layer_types(hf, [FULL if i < full else WINDOW for i in range(layers)])


def window_keys(config: ModelConfig, pattern: AttentionPattern) -> HfKeys:
    window, types = pattern.sliding_window, list(pattern.layer_types)
    keys = {"sliding_window": window, "layer_types": types, "use_sliding_window": window is not None}
    if window is not None:  # how many layers at the start are full: what older readers go by
        keys["max_window_layers"] = types.index(WINDOW)
    return keys


FAMILY = Family("qwen2", "Qwen2ForCausalLM", from_hf, write_dense, read_windows, window_keys)
