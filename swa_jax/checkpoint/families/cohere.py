"""Cohere (Command R): attention and MLP side by side behind one LayerNorm; RoPE rotates neighbouring channels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swa_jax.base.errors import ConfigError
from swa_jax.checkpoint.families.common import Family, HfConfig, HfKeys, attention_biases, read_dense, write_dense
from swa_jax.checkpoint.families.grammar import positive_number
from swa_jax.model.config import ModelConfig

DEFAULT_CONTEXT = 8192
DEFAULTS = {"num_key_value_heads": None, "max_position_embeddings": DEFAULT_CONTEXT, "tie_word_embeddings": True}


def from_hf(hf: HfConfig) -> ModelConfig:
    if hf.get("use_qk_norm"):
        raise ConfigError(
            "config.json: use_qk_norm (a norm with weights of its own for each head) is not supported; supported: "
            "Cohere models without it"
        )
    return read_cohere(hf, DEFAULTS | {"rope_theta": 500000.0})


def read_cohere(hf: HfConfig, defaults: Mapping[str, Any], **fields: Any) -> ModelConfig:
    """What Cohere, Cohere 2 and Cohere 2 with experts share; `fields` are the last one's."""
    return read_dense(
        hf,
        defaults,
        **attention_biases(hf),
        norm_type="layer",
        norm_placement="parallel",
        rms_norm_eps=hf.get("layer_norm_eps", 1e-5),
        rope_interleaved=True,
        logit_multiplier=float(positive_number(hf, "logit_scale", 0.0625)),
        **fields,
    )


def to_hf(config: ModelConfig) -> HfKeys:
    hf = write_dense(config, "attention_bias", logit_scale=config.logit_multiplier)
    return hf | {"layer_norm_eps": hf.pop("rms_norm_eps")}


FAMILY = Family("cohere", "CohereForCausalLM", from_hf, to_hf, peculiarity="Cohere's rotary embeddings in every layer")
