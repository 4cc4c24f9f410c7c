"""Llama: full attention in every layer, with biases where `attention_bias` and `mlp_bias` say so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swa_jax.checkpoint.families.common import Family, read_dense, write_dense
from swa_jax.model.config import ModelConfig

DEFAULTS = {"num_key_value_heads": None, "max_position_embeddings": 2048}


def from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    bias = bool(hf.get("attention_bias"))
    return read_dense(hf, DEFAULTS, attention_bias=bias, attention_out_bias=bias, mlp_bias=bool(hf.get("mlp_bias")))


def to_hf(config: ModelConfig) -> dict[str, Any]:
    return write_dense(config, attention_bias=config.attention_bias, mlp_bias=config.mlp_bias)


FAMILY = Family("llama", "LlamaForCausalLM", from_hf, to_hf, peculiarity="Llama's biases")
