"""Seed-OSS: Llama with biases on queries, keys and values alone, or also on what attention gives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swa_jax.checkpoint.families.common import Family, read_dense, write_dense
from swa_jax.model.config import ModelConfig

DEFAULTS = {"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 524288}


def from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    return read_dense(
        hf,
        DEFAULTS,
        attention_bias=bool(hf.get("attention_bias", True)),
        attention_out_bias=bool(hf.get("attention_out_bias")),
        mlp_bias=bool(hf.get("mlp_bias")),
    )


def to_hf(config: ModelConfig) -> dict[str, Any]:
    return write_dense(
        config,
        attention_bias=config.attention_bias,
        attention_out_bias=config.attention_out_bias,
        mlp_bias=config.mlp_bias,
    )


FAMILY = Family("seed_oss", "SeedOssForCausalLM", from_hf, to_hf, peculiarity="Seed-OSS's biases")
