"""Mellum 2: Qwen3-MoE, or Qwen3 where all layers are dense, with windows by `layer_types`.

Rotary embeddings may differ between full and windowed layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swa_jax.checkpoint.families.common import Family, Windows, layer_types, read_dense, write_dense
from swa_jax.checkpoint.families.experts import (
    expert_keys_beside_dense,
    mlp_types,
    read_experts,
    with_mlp_types,
    without_experts,
    written_mlp_types,
)
from swa_jax.checkpoint.families.rope import (
    ROPE_KEYS,
    read_windows_by_type,
    rope_keys_by_type,
    rope_of,
    window_keys_by_type,
    with_local_rope,
)
from swa_jax.model.config import ModelConfig
from swa_jax.model.layer_types import FULL, WINDOW

DEFAULT_CONTEXT, DEFAULT_WINDOW = 131072, 1024
DEFAULTS = {"num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": DEFAULT_CONTEXT}
DEFAULT_ROPE = {
    FULL: {"rope_type": "default", "rope_theta": 500000.0},
    WINDOW: {"rope_type": "default", "rope_theta": 10000.0},
}


def from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """As in Hugging Face's class RoPE stands in `rope_parameters`, by layer type, and nowhere else, and layers for
    multi-token prediction are left out."""
    bias = bool(hf.get("attention_bias"))
    experts = read_experts(hf, count=64, per_token=8, width=("moe_intermediate_size", 896), normalized=True)
    own = {key: value for key, value in hf.items() if key not in ROPE_KEYS}
    own["rope_parameters"] = hf.get("rope_parameters") or DEFAULT_ROPE
    config = read_dense(
        without_experts(rope_of(own, FULL)),
        DEFAULTS,
        qk_norm=True,
        attention_bias=bias,
        attention_out_bias=bias,
        **with_mlp_types(experts, mlp_types(hf)),
    )
    return with_local_rope(config, own, _types(hf, config.num_hidden_layers), config.rope_theta)


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """Without the older spelling of RoPE: Hugging Face's class would take it for the one of all layers."""
    types = written_mlp_types(config)
    own = write_dense(config, attention_bias=config.attention_bias, mlp_layer_types=types)
    own = {key: value for key, value in own.items() if key not in ROPE_KEYS}
    experts = expert_keys_beside_dense(config) if config.num_experts else {}
    return own | experts | rope_keys_by_type(config)


def _types(hf: Mapping[str, Any], layers: int) -> list[str]:
    return layer_types(hf, [FULL] * layers)


def read_windows(hf: Mapping[str, Any], layers: int) -> Windows:
    context = hf.get("max_position_embeddings") or DEFAULT_CONTEXT
    return read_windows_by_type(hf.get("sliding_window", DEFAULT_WINDOW), _types(hf, layers), context)


FAMILY = Family("mellum", "MellumForCausalLM", from_hf, to_hf, read_windows, window_keys_by_type, mlps_by_peft=False)
