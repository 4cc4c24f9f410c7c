"""Granite: Llama with a factor on the embeddings, the attention logits, the residual stream and the output logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swa_jax.checkpoint.families import llama
from swa_jax.checkpoint.families.common import Family, HfConfig, HfKeys, attention_biases, read_dense, write_dense
from swa_jax.checkpoint.families.grammar import positive_number
from swa_jax.model.config import ModelConfig


def from_hf(hf: HfConfig) -> ModelConfig:
    return read_granite(hf, llama.DEFAULTS)


def read_granite(hf: HfConfig, defaults: Mapping[str, Any], **fields: Any) -> ModelConfig:
    """Factors that are absent are 1, also that of the attention logits; `logits_scaling` divides."""
    return read_dense(
        hf,
        defaults,
        **attention_biases(hf),
        mlp_bias=bool(hf.get("mlp_bias")),
        embedding_multiplier=positive_number(hf, "embedding_multiplier", 1.0),
        residual_multiplier=positive_number(hf, "residual_multiplier", 1.0),
        attention_scale=positive_number(hf, "attention_multiplier", 1.0),
        logit_multiplier=1 / positive_number(hf, "logits_scaling", 1.0),
        **fields,
    )


def to_hf(config: ModelConfig) -> HfKeys:
    scaling = 1 / config.logit_multiplier
    return write_dense(
        config,
        "attention_bias",
        "mlp_bias",
        "embedding_multiplier",
        "residual_multiplier",
        attention_multiplier=config.attention_scale or config.head_dim**-0.5,
        logits_scaling=round(scaling) if abs(scaling - round(scaling)) < 1e-6 else scaling,
    )


FAMILY = Family("granite", "GraniteForCausalLM", from_hf, to_hf, peculiarity="Granite's factors")
