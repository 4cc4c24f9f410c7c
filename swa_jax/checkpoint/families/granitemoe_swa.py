"""Granite-SWA with experts: all of a layer's experts in one tensor, and perhaps a shared one."""

from __future__ import annotations

from swa_jax.checkpoint.families import experts, granite, granite_swa
from swa_jax.checkpoint.families.common import Family, HfConfig, HfKeys
from swa_jax.checkpoint.families.grammar import whole
from swa_jax.checkpoint.families.windows import window_always
from swa_jax.model.config import ModelConfig

DEFAULTS = {"num_key_value_heads": None, "max_position_embeddings": 2048}
_LAYER = "model.layers.{layer}"
_SHARED = "layers.experts.shared_expert"
TENSOR_NAMES = {
    "layers.experts.expert_router.kernel": f"{_LAYER}.block_sparse_moe.router.weight",
    f"{_SHARED}.down_proj.kernel": f"{_LAYER}.shared_mlp.output_linear.weight",
}
JOINED = {
    f"{_LAYER}.block_sparse_moe.experts.gate_up_proj": (
        "layers.experts.gate_proj.kernel",
        "layers.experts.up_proj.kernel",
    ),
    f"{_LAYER}.block_sparse_moe.experts.down_proj": ("layers.experts.down_proj.kernel",),
    f"{_LAYER}.shared_mlp.input_linear.weight": (f"{_SHARED}.gate_proj.kernel", f"{_SHARED}.up_proj.kernel"),
}


def from_hf(hf: HfConfig) -> ModelConfig:
    fields = experts.read(hf, count=8, per_token=2, width=("intermediate_size", 11008))
    fields |= {"norm_topk_prob": True, "shared_expert_intermediate_size": whole(hf, "shared_intermediate_size", 0)}
    config = granite.read_granite(experts.without(hf), DEFAULTS, sink_logits=True, **fields)
    return granite_swa.with_thetas(config, hf.get("layer_rope_theta"))


def to_hf(config: ModelConfig) -> HfKeys:
    shared = {"shared_intermediate_size": config.shared_expert_intermediate_size}
    return granite_swa.to_hf(config) | experts.keys(config) | shared


FAMILY = Family(
    "granitemoe_swa", "GraniteMoeSWAForCausalLM", from_hf, to_hf, granite_swa.read_windows, window_always,
    peculiarity="sink logits", tensor_names=TENSOR_NAMES, joined=JOINED,
)  # fmt: skip
