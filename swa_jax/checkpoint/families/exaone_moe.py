"""EXAONE-MoE (K-EXAONE): EXAONE 4 with norms before attention and MLP, sigmoid routing, and a shared expert."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from swa_jax.checkpoint.families import exaone4
from swa_jax.checkpoint.families.common import Family, read_dense, write_dense
from swa_jax.checkpoint.families.experts import (
    expert_group_keys,
    expert_groups,
    expert_keys_beside_dense,
    mlp_types,
    read_experts,
    shared_expert_keys,
    shared_experts,
    sigmoid_routing,
    whole,
    with_mlp_types,
    without_experts,
    written_mlp_types,
)
from swa_jax.model.config import ModelConfig
from swa_jax.model.layer_types import FULL
from swa_jax.model.pattern import AttentionPattern

TENSOR_NAMES = {"layers.experts.expert_router.choice_bias": "model.layers.{layer}.mlp.e_score_correction_bias"}


def from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    experts = read_experts(hf, count=64, per_token=8, width=("moe_intermediate_size", 1024), normalized=True)
    experts |= sigmoid_routing(hf, "routed_scaling_factor", 2.5) | expert_groups(hf)
    experts |= shared_experts(hf, 1, experts["moe_intermediate_size"])
    types = mlp_types(hf, whole(hf, "first_k_dense_replace", 1))
    config = read_dense(without_experts(hf), exaone4.DEFAULTS, qk_norm=True, **with_mlp_types(experts, types))
    return dataclasses.replace(config, rope_layers=exaone4.rope_layers(hf, config.num_hidden_layers))


def to_hf(config: ModelConfig) -> dict[str, Any]:
    hf = write_dense(config, mlp_layer_types=written_mlp_types(config))
    if config.num_experts:
        hf |= expert_keys_beside_dense(config) | shared_expert_keys(config) | expert_group_keys(config)
        hf["routed_scaling_factor"] = config.expert_multiplier
    return hf | exaone4.window_keys(config, AttentionPattern((FULL,) * config.num_hidden_layers))


FAMILY = Family(
    "exaone_moe",
    "ExaoneMoeForCausalLM",
    from_hf,
    to_hf,
    exaone4.read_windows,
    exaone4.window_keys,
    peculiarity="rotary embeddings in these layers alone",
    tensor_names=TENSOR_NAMES,
    mlps_by_peft=False,
)
