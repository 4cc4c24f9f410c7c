"""Granite: Llama with a factor on the embeddings, the attention logits, the residual stream and the output logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swa_jax.base.errors import ConfigError
from swa_jax.checkpoint.families import llama
from swa_jax.checkpoint.families.common import Family, read_dense, write_dense
from swa_jax.model.config import ModelConfig


def from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    return read_granite(hf, llama.DEFAULTS)


def read_granite(hf: Mapping[str, Any], defaults: Mapping[str, Any], **fields: Any) -> ModelConfig:
    """Factors that are absent are 1, also that of the attention logits; `logits_scaling` divides."""
    bias = bool(hf.get("attention_bias"))
    factors = {}
    for key in ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"):
        factors[key] = value = hf.get(key, 1.0)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise ConfigError(f"config.json: {key} must be a number above 0, got {value!r}")
    return read_dense(
        hf,
        defaults,
        attention_bias=bias,
        attention_out_bias=bias,
        mlp_bias=bool(hf.get("mlp_bias")),
        embedding_multiplier=factors["embedding_multiplier"],
        residual_multiplier=factors["residual_multiplier"],
        attention_scale=factors["attention_multiplier"],
        logit_multiplier=1 / factors["logits_scaling"],
        **fields,
    )


def to_hf(config: ModelConfig) -> dict[str, Any]:
    scaling = 1 / config.logit_multiplier
    return write_dense(
        config,
        attention_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
        embedding_multiplier=config.embedding_multiplier,
        residual_multiplier=config.residual_multiplier,
        attention_multiplier=config.attention_scale or config.head_dim**-0.5,
        logits_scaling=round(scaling) if abs(scaling - round(scaling)) < 1e-6 else scaling,
    )


FAMILY = Family("granite", "GraniteForCausalLM", from_hf, to_hf, peculiarity="Granite's factors")
