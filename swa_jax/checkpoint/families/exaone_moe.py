"""EXAONE-MoE (K-EXAONE): EXAONE 4 with norms before attention and MLP, sigmoid routing, and a shared expert."""

from __future__ import annotations

import dataclasses

from swa_jax.checkpoint.families import exaone4, experts
from swa_jax.checkpoint.families.common import Family, HfConfig, HfKeys, read_dense, write_dense
from swa_jax.checkpoint.families.grammar import whole
from swa_jax.model.config import ModelConfig

TENSOR_NAMES = {"layers.experts.expert_router.choice_bias": "model.layers.{layer}.mlp.e_score_correction_bias"}


def from_hf(hf: HfConfig) -> ModelConfig:
    fields = experts.read(hf, count=64, per_token=8, width=("moe_intermediate_size", 1024))
    fields |= experts.sigmoid_routing(hf, "routed_scaling_factor", 2.5) | experts.groups(hf)
    fields |= experts.shared(hf, 1, fields["moe_intermediate_size"])
    types = experts.mlp_types(hf, whole(hf, "first_k_dense_replace", 1))
    config = read_dense(experts.without(hf), exaone4.DEFAULTS, qk_norm=True, **experts.with_mlp_types(fields, types))
    return dataclasses.replace(config, rope_layers=exaone4.rope_layers(hf, config.num_hidden_layers))


def to_hf(config: ModelConfig) -> HfKeys:
    hf = write_dense(config, mlp_layer_types=list(config.mlp_kinds))
    if config.num_experts:
        hf |= experts.keys_beside_dense(config) | experts.shared_keys(config) | experts.group_keys(config)
        hf["routed_scaling_factor"] = config.expert_multiplier
    return hf


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
