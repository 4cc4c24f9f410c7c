"""gpt-oss: experts with biases in every layer, sink logits, and a window in every second layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swa_jax.checkpoint.families.common import Family, Windows, layer_types, read_dense, write_dense
from swa_jax.checkpoint.families.experts import expert_keys, read_experts, without_experts
from swa_jax.checkpoint.families.quantization import is_mxfp4, without_quantization
from swa_jax.checkpoint.families.rope import with_default_rope
from swa_jax.model.config import ModelConfig
from swa_jax.model.layer_types import FULL, WINDOW
from swa_jax.model.pattern import AttentionPattern

DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
}
DEFAULT_WINDOW = 128
DEFAULT_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Weights in MXFP4 are the import's to turn into bf16 (`swa_jax.checkpoint.mxfp4`)."""
    experts = read_experts(hf, count=128, per_token=4, width=("intermediate_size", 2880), normalized=True)
    hf = with_default_rope(without_experts(hf), DEFAULT_ROPE)
    if is_mxfp4(hf):
        hf = without_quantization(hf)
    bias = bool(hf.get("attention_bias", True))
    return read_dense(
        hf,
        DEFAULTS,
        attention_bias=bias,
        attention_out_bias=bias,
        sink_logits=True,
        mlp_bias=True,
        fused_experts=True,
        swiglu_limit=hf.get("swiglu_limit", 7.0),
        swiglu_alpha=hf.get("swiglu_alpha", 1.702),
        **experts | {"norm_topk_prob": True},
    )


def to_hf(config: ModelConfig) -> dict[str, Any]:
    return write_dense(
        config, attention_bias=config.attention_bias, swiglu_limit=config.swiglu_limit, swiglu_alpha=config.swiglu_alpha
    ) | expert_keys(config)


def read_windows(hf: Mapping[str, Any], layers: int) -> Windows:
    types = layer_types(hf, [FULL if i % 2 else WINDOW for i in range(layers)])
    return hf.get("sliding_window", DEFAULT_WINDOW), types


def window_keys(config: ModelConfig, pattern: AttentionPattern) -> dict[str, Any]:
    """Hugging Face's class needs a window even where no layer has it."""
    return {"sliding_window": pattern.sliding_window or DEFAULT_WINDOW, "layer_types": list(pattern.layer_types)}


FAMILY = Family(
    "gpt_oss", "GptOssForCausalLM", from_hf, to_hf, read_windows, window_keys, peculiarity="gpt-oss's experts"
)
