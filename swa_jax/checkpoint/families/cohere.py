"""Cohere (Command R): attention and MLP side by side behind one LayerNorm; RoPE turns neighbouring channels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swa_jax.base.errors import ConfigError
from swa_jax.checkpoint.families.common import Family, read_dense, write_dense
from swa_jax.model.config import ModelConfig

DEFAULT_CONTEXT = 8192
DEFAULTS = {"num_key_value_heads": None, "max_position_embeddings": DEFAULT_CONTEXT, "tie_word_embeddings": True}


def from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    if hf.get("use_qk_norm"):
        raise ConfigError(
            "config.json: use_qk_norm (a norm with weights of its own for each head) is not supported; supported: "
            "Cohere models without it"
        )
    return read_cohere(hf, DEFAULTS | {"rope_theta": 500000.0})


def read_cohere(hf: Mapping[str, Any], defaults: Mapping[str, Any], **fields: Any) -> ModelConfig:
    """What Cohere, Cohere 2 and Cohere 2 with experts share; `fields` are the last one's."""
    scale = hf.get("logit_scale", 0.0625)
    if isinstance(scale, bool) or not isinstance(scale, int | float) or scale <= 0:
        raise ConfigError(f"config.json: logit_scale must be a number above 0, got {scale!r}")
    bias = bool(hf.get("attention_bias"))
    return read_dense(
        hf,
        defaults,
        attention_bias=bias,
        attention_out_bias=bias,
        norm_type="layer",
        norm_placement="parallel",
        rms_norm_eps=hf.get("layer_norm_eps", 1e-5),
        rope_interleaved=True,
        logit_multiplier=float(scale),
        **fields,
    )


def to_hf(config: ModelConfig) -> dict[str, Any]:
    hf = write_dense(
        config,
        attention_bias=config.attention_bias,
        layer_norm_eps=config.rms_norm_eps,
        logit_scale=config.logit_multiplier,
    )
    del hf["rms_norm_eps"]
    return hf


FAMILY = Family("cohere", "CohereForCausalLM", from_hf, to_hf, peculiarity="Cohere's rotary embeddings in every layer")
