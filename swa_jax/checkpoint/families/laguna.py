"""Laguna: sigmoid routing, a shared expert, gated attention; full layers have fewer query heads and another RoPE."""

from __future__ import annotations

from collections.abc import Sequence

from swa_jax.base.errors import ConfigError
from swa_jax.checkpoint.families import experts
from swa_jax.checkpoint.families.common import Family, HfConfig, HfKeys, attention_biases, read_dense, write_dense
from swa_jax.checkpoint.families.grammar import layers_of, whole
from swa_jax.checkpoint.families.layer_kinds import layer_kind_keys, ropes_by_type, with_layer_kinds
from swa_jax.checkpoint.families.rope import without_rope
from swa_jax.checkpoint.families.windows import one_full_in, window_keys_by_type, windows_of
from swa_jax.model.config import ModelConfig
from swa_jax.model.layer_types import FULL, WINDOW

DEFAULT_CONTEXT, DEFAULT_WINDOW = 131072, 512
DEFAULTS = {"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": DEFAULT_CONTEXT}
DEFAULT_ROPE = {
    FULL: {"rope_type": "default", "rope_theta": 500000.0, "partial_rotary_factor": 0.5},
    WINDOW: {"rope_type": "default", "rope_theta": 10000.0},
}
_MLP = "model.layers.{layer}.mlp"
TENSOR_NAMES = {
    "layers.experts.expert_router.choice_bias": f"{_MLP}.experts.e_score_correction_bias",
    **{
        f"layers.experts.shared_expert.{name}.kernel": f"{_MLP}.shared_expert.{name}.weight"
        for name in ("gate_proj", "up_proj", "down_proj")
    },
}
read_types = one_full_in(1)


def from_hf(hf: HfConfig) -> ModelConfig:
    if hf.get("moe_apply_router_weight_on_input"):
        raise ConfigError(
            "config.json: moe_apply_router_weight_on_input is not supported; supported: weights on what experts give"
        )
    fields = experts.read(hf, count=256, per_token=8, width=("moe_intermediate_size", 512))
    fields |= experts.sigmoid_routing(hf, "moe_routed_scaling_factor", 1.0) | {
        "norm_topk_prob": True,
        "router_logit_softcap": hf.get("moe_router_logit_softcapping") or None,
        "shared_expert_intermediate_size": whole(hf, "shared_expert_intermediate_size", 512),
    }
    types = read_types(hf, layers_of(hf))
    ropes = ropes_by_type(hf, types, DEFAULT_ROPE, 1.0)
    config = read_dense(
        experts.without(without_rope(hf)) | {"rope_parameters": ropes[FULL]},
        DEFAULTS,
        qk_norm=True,
        attention_gate="head" if hf.get("gating", True) in (True, "per-head") else "channel",
        attention_gate_act="softplus",
        **attention_biases(hf),
        partial_rotary_factor=ropes[FULL]["partial_rotary_factor"],
        **experts.with_mlp_types(fields, experts.mlp_types(hf, 1)),
    )
    full, windowed = (_heads(hf, types, kind) for kind in (FULL, WINDOW))
    return with_layer_kinds(config, types, ropes, full, windowed)


def _heads(hf: HfConfig, types: Sequence[str], kind: str) -> dict[str, int]:
    """The query heads of the layers of one type, which are as many in all of them."""
    given = hf.get("num_attention_heads_per_layer")
    if given is None:
        return {"num_attention_heads": hf["num_attention_heads"]}
    if not isinstance(given, list) or len(given) != len(types) or any(type(n) is not int for n in given):
        raise ConfigError(
            f"config.json: num_attention_heads_per_layer must be a list with a number for each of the {len(types)} "
            f"layers, got {str(given)[:100]}"
        )
    counts = sorted({count for count, other in zip(given, types, strict=True) if other == kind})
    if len(counts) > 1:
        raise ConfigError(
            f"config.json: num_attention_heads_per_layer has {' and '.join(map(str, counts))} in layers of type {kind}"
            "; supported: one number for each layer type"
        )
    return {"num_attention_heads": counts[0]} if counts else {}


def to_hf(config: ModelConfig) -> HfKeys:
    hf = write_dense(
        config,
        "attention_bias",
        gating="per-head" if config.attention_gate == "head" else "per-element",
        mlp_layer_types=list(config.mlp_kinds),
        num_attention_heads_per_layer=list(config.query_heads),
    )
    if config.num_experts:
        hf |= experts.keys_beside_dense(config) | {
            "moe_routed_scaling_factor": config.expert_multiplier,
            "moe_router_logit_softcapping": config.router_logit_softcap or 0.0,
            "shared_expert_intermediate_size": config.shared_expert_intermediate_size,
        }
    return without_rope(hf) | layer_kind_keys(config)


FAMILY = Family(
    "laguna",
    "LagunaForCausalLM",
    from_hf,
    to_hf,
    windows_of(read_types, DEFAULT_WINDOW, DEFAULT_CONTEXT),
    window_keys_by_type,
    peculiarity="gated attention",
    tensor_names=TENSOR_NAMES,
)
