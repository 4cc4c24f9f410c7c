"""AFMoE (Trinity): gated attention, norms on both sides, sigmoid routing, a shared expert, dense layers first; rotary
embeddings in windowed layers only."""

from __future__ import annotations

import dataclasses

from swa_jax.checkpoint.families import experts
from swa_jax.checkpoint.families.common import Family, HfConfig, HfKeys, attention_biases, read_dense, write_dense
from swa_jax.checkpoint.families.grammar import whole
from swa_jax.checkpoint.families.windows import one_full_in, window_keys_with_nope, windows_of
from swa_jax.model.config import ModelConfig
from swa_jax.model.layer_stacks import nope_of_full_layers

DEFAULT_CONTEXT, DEFAULT_WINDOW = 16384, 1024
read_types = one_full_in(4, "global_attn_every_n_layers")
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


def from_hf(hf: HfConfig) -> ModelConfig:
    """As in Hugging Face's class the keys of the first release that say how it routes (`score_func`, `route_norm`) are
    not read: it always routes by sigmoids whose weights sum to `route_scale`."""
    fields = experts.read(hf, count=64, per_token=6, width=("moe_intermediate_size", 1408))
    fields |= experts.sigmoid_routing(hf, "route_scale", 1.0) | {"norm_topk_prob": True}
    fields |= experts.shared(hf, 2, fields["moe_intermediate_size"])
    config = read_dense(
        experts.without(hf),
        DEFAULTS,
        qk_norm=True,
        norm_placement="sandwich",
        attention_gate="channel",
        **attention_biases(hf),
        **experts.with_mlp_types(fields, experts.mlp_types(hf, whole(hf, "num_dense_layers", 1))),
    )
    return dataclasses.replace(
        config,
        rope_layers=nope_of_full_layers(read_types(hf, config.num_hidden_layers)),
        embedding_multiplier=config.hidden_size**0.5 if hf.get("mup_enabled") else 1.0,
    )


def to_hf(config: ModelConfig) -> HfKeys:
    hf = write_dense(
        config,
        "attention_bias",
        mup_enabled=config.embedding_multiplier != 1,
        num_dense_layers=len(config.dense_layers),
        route_scale=config.expert_multiplier,
    )
    if config.num_experts:
        hf |= experts.keys_beside_dense(config) | experts.shared_keys(config)
    return hf


FAMILY = Family(
    "afmoe",
    "AfmoeForCausalLM",
    from_hf,
    to_hf,
    windows_of(read_types, DEFAULT_WINDOW, DEFAULT_CONTEXT),
    window_keys_with_nope,
    peculiarity="gated attention",
    tensor_names=TENSOR_NAMES,
    mlps_by_peft=False,
)
