"""Mellum with dense layers: Qwen3 whose rotary embeddings may differ between full and windowed layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swa_jax.errors import ConfigError
from swa_jax.families import qwen3
from swa_jax.families.common import Family, Windows, layer_types
from swa_jax.families.rope import (
    read_windows_by_type,
    rope_keys_by_type,
    rope_of,
    window_keys_by_type,
    with_local_rope,
)
from swa_jax.model.config import ModelConfig
from swa_jax.model.layer_types import FULL, WINDOW

DEFAULT_CONTEXT = 131072
DEFAULTS = {"num_key_value_heads": 4, "max_position_embeddings": DEFAULT_CONTEXT, "head_dim": 128}
DEFAULT_ROPE = {
    FULL: {"rope_type": "default", "rope_theta": 500000.0},
    WINDOW: {"rope_type": "default", "rope_theta": 10000.0},
}
DEFAULT_WINDOW = 1024
# Keys of the experts, which a model of dense layers does not have.
_EXPERTS = ("num_experts", "num_local_experts")


def from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """RoPE stands in `rope_parameters`, by layer type, and nowhere else; every layer must be dense."""
    mlps = hf.get("mlp_layer_types")
    if not isinstance(mlps, list) or set(mlps) != {"dense"}:
        raise ConfigError(
            "config.json: mixtures of experts are not supported for mellum; supported: mlp_layer_types with 'dense' "
            "for every layer"
        )
    ignored = ("rope_theta", "rope_scaling", *_EXPERTS)
    own = {key: value for key, value in hf.items() if key not in ignored}
    own["rope_parameters"] = hf.get("rope_parameters") or DEFAULT_ROPE
    config = qwen3.read_qwen3(rope_of(own, FULL), DEFAULTS)
    if len(mlps) != config.num_hidden_layers:
        raise ConfigError(
            f"config.json: mlp_layer_types has {len(mlps)} entries for {config.num_hidden_layers} layers"
        )
    types = layer_types(hf, [FULL] * config.num_hidden_layers)
    return with_local_rope(config, own, types, config.rope_theta)


def to_hf(config: ModelConfig) -> dict[str, Any]:
    hf = (
        qwen3.to_hf(config)
        | rope_keys_by_type(config)
        | {"mlp_layer_types": ["dense"] * config.num_hidden_layers}
    )
    return {key: value for key, value in hf.items() if key not in ("rope_theta", "rope_scaling")}


def read_windows(hf: Mapping[str, Any], layers: int) -> Windows:
    context = hf.get("max_position_embeddings") or DEFAULT_CONTEXT
    types = layer_types(hf, [FULL] * layers)
    return read_windows_by_type(hf.get("sliding_window", DEFAULT_WINDOW), types, context)


FAMILY = Family("mellum", "MellumForCausalLM", from_hf, to_hf, read_windows, window_keys_by_type)
