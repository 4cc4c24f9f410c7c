"""CWM: Llama with windows by `layer_types`; without a word on RoPE it is scaled as Llama 3.1's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swa_jax.checkpoint.families.common import Family, Windows, layer_types, read_dense, write_dense
from swa_jax.checkpoint.families.rope import window_always, with_default_rope
from swa_jax.model.config import ModelConfig
from swa_jax.model.layer_types import FULL, WINDOW

DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
}
DEFAULT_WINDOW = 8192
DEFAULT_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e6,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    return read_dense(with_default_rope(hf, DEFAULT_ROPE), DEFAULTS, mlp_bias=bool(hf.get("mlp_bias")))


def to_hf(config: ModelConfig) -> dict[str, Any]:
    return write_dense(config, mlp_bias=config.mlp_bias)


def read_windows(hf: Mapping[str, Any], layers: int) -> Windows:
    """Without `layer_types` layers 0, 4, 8 and so on are full."""
    types = layer_types(hf, [WINDOW if i % 4 else FULL for i in range(layers)])
    return hf.get("sliding_window", DEFAULT_WINDOW) or None, types


FAMILY = Family("cwm", "CwmForCausalLM", from_hf, to_hf, read_windows, window_always)
