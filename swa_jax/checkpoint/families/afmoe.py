"""AFMoE (Trinity): gated attention, norms on both sides, sigmoid routing, a shared expert, dense layers first; rotary
embeddings in windowed layers only."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from swa_jax.checkpoint.families.common import Family, Windows, layer_types, positive_int, read_dense, write_dense
from swa_jax.checkpoint.families.experts import (
    expert_keys_beside_dense,
    mlp_types,
    read_experts,
    shared_expert_keys,
    shared_experts,
    sigmoid_routing,
    whole,
    with_mlp_types,
    without_experts,
)
from swa_jax.checkpoint.families.rope import nope_of_full_layers, read_windows_by_type, window_keys_with_nope
from swa_jax.model.config import ModelConfig
from swa_jax.model.layer_types import FULL, WINDOW
from swa_jax.model.pattern import AttentionPattern

DEFAULT_CONTEXT, DEFAULT_WINDOW, DEFAULT_INTERVAL = 16384, 1024, 4
DEFAULTS = {
    "num_key_value_heads": None,
    "head_dim": 128,
    "max_position_embeddings": DEFAULT_CONTEXT,
    "rms_norm_eps": 1e-5,
}
_LAYER = "model.layers.{layer}"
TENSOR_NAMES = {
    "layers.attention.g_proj.kernel": f"{_LAYER}.self_attn.gate_proj.weight",
    "layers.experts.expert_router.kernel": f"{_LAYER}.mlp.router.gate.weight",
    "layers.experts.expert_router.choice_bias": f"{_LAYER}.mlp.expert_bias",
    "layers.post_attention_norm.scale": f"{_LAYER}.pre_mlp_layernorm.weight",
    "layers.mlp_out_norm.scale": f"{_LAYER}.post_mlp_layernorm.weight",
}


def from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """As in Hugging Face's class the keys of the first release that say how it routes (`score_func`, `route_norm`) are
    not read: it always routes by sigmoids whose weights sum to `route_scale`."""
    bias = bool(hf.get("attention_bias"))
    experts = read_experts(hf, count=64, per_token=6, width=("moe_intermediate_size", 1408), normalized=True)
    experts |= sigmoid_routing(hf, "route_scale", 1.0) | {"norm_topk_prob": True}
    experts |= shared_experts(hf, 2, experts["moe_intermediate_size"])
    config = read_dense(
        without_experts(hf),
        DEFAULTS,
        qk_norm=True,
        norm_placement="sandwich",
        attention_gate="channel",
        attention_bias=bias,
        attention_out_bias=bias,
        **with_mlp_types(experts, mlp_types(hf, whole(hf, "num_dense_layers", 1))),
    )
    return dataclasses.replace(
        config,
        rope_layers=nope_of_full_layers(_types(hf, config.num_hidden_layers)),
        embedding_multiplier=config.hidden_size**0.5 if hf.get("mup_enabled") else 1.0,
    )


def to_hf(config: ModelConfig) -> dict[str, Any]:
    hf = write_dense(
        config,
        attention_bias=config.attention_bias,
        mup_enabled=config.embedding_multiplier != 1,
        num_dense_layers=len(config.dense_layers),
        route_scale=config.expert_multiplier,
    )
    if config.num_experts:
        hf |= expert_keys_beside_dense(config) | shared_expert_keys(config)
    full = AttentionPattern((FULL,) * config.num_hidden_layers)
    return hf | window_keys_with_nope(config, full)


def _types(hf: Mapping[str, Any], layers: int) -> list[str]:
    """Without `layer_types` one layer in `global_attn_every_n_layers` is full."""
    interval = positive_int(hf, "global_attn_every_n_layers", DEFAULT_INTERVAL)
    return layer_types(hf, [WINDOW if (i + 1) % interval else FULL for i in range(layers)])


def read_windows(hf: Mapping[str, Any], layers: int) -> Windows:
    context = hf.get("max_position_embeddings") or DEFAULT_CONTEXT
    return read_windows_by_type(hf.get("sliding_window", DEFAULT_WINDOW), _types(hf, layers), context)


FAMILY = Family(
    "afmoe",
    "AfmoeForCausalLM",
    from_hf,
    to_hf,
    read_windows,
    window_keys_with_nope,
    peculiarity="gated attention",
    tensor_names=TENSOR_NAMES,
    mlps_by_peft=False,
)
