"""Mixtral: Mistral with experts in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swa_jax.checkpoint.families import mistral
from swa_jax.checkpoint.families.common import Family, Windows, read_dense, write_dense
from swa_jax.checkpoint.families.experts import expert_keys, read_experts, without_experts
from swa_jax.model.config import ModelConfig
from swa_jax.model.layer_types import FULL, WINDOW

DEFAULTS = mistral.DEFAULTS | {"rope_theta": 1e6, "rms_norm_eps": 1e-5}
_EXPERTS = "model.layers.{layer}.block_sparse_moe"
TENSOR_NAMES = {
    "layers.experts.expert_router.kernel": f"{_EXPERTS}.gate.weight",
    "layers.experts.gate_proj.kernel": f"{_EXPERTS}.experts.{{expert}}.w1.weight",
    "layers.experts.up_proj.kernel": f"{_EXPERTS}.experts.{{expert}}.w3.weight",
    "layers.experts.down_proj.kernel": f"{_EXPERTS}.experts.{{expert}}.w2.weight",
}


def from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    experts = read_experts(hf, count=8, per_token=2, width=("intermediate_size", 14336), normalized=True)
    return read_dense(without_experts(hf), DEFAULTS, **experts | {"norm_topk_prob": True})


def to_hf(config: ModelConfig) -> dict[str, Any]:
    return write_dense(config) | expert_keys(config)


def read_windows(hf: Mapping[str, Any], layers: int) -> Windows:
    window = hf.get("sliding_window")
    return window, [FULL if window is None else WINDOW] * layers


FAMILY = Family(
    "mixtral", "MixtralForCausalLM", from_hf, to_hf, read_windows, mistral.window_keys, tensor_names=TENSOR_NAMES
)
