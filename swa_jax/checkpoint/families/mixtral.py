"""Mixtral: Mistral with experts in every layer."""

from __future__ import annotations

from swa_jax.checkpoint.families import experts, mistral
from swa_jax.checkpoint.families.common import Family, HfConfig, HfKeys, read_dense, write_dense
from swa_jax.checkpoint.families.windows import window_alike_keys, windows_alike
from swa_jax.model.config import ModelConfig

DEFAULTS = mistral.DEFAULTS | {"rope_theta": 1e6, "rms_norm_eps": 1e-5}
_EXPERTS = "model.layers.{layer}.block_sparse_moe"
TENSOR_NAMES = {
    "layers.experts.expert_router.kernel": f"{_EXPERTS}.gate.weight",
    "layers.experts.gate_proj.kernel": f"{_EXPERTS}.experts.{{expert}}.w1.weight",
    "layers.experts.up_proj.kernel": f"{_EXPERTS}.experts.{{expert}}.w3.weight",
    "layers.experts.down_proj.kernel": f"{_EXPERTS}.experts.{{expert}}.w2.weight",
}


def from_hf(hf: HfConfig) -> ModelConfig:
    fields = experts.read(hf, count=8, per_token=2, width=("intermediate_size", 14336))
    return read_dense(experts.without(hf), DEFAULTS, **fields | {"norm_topk_prob": True})


def to_hf(config: ModelConfig) -> HfKeys:
    return write_dense(config) | experts.keys(config)


FAMILY = Family(
    "mixtral", "MixtralForCausalLM", from_hf, to_hf, windows_alike(), window_alike_keys, tensor_names=TENSOR_NAMES
)
