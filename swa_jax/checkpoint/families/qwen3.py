"""Qwen3: queries and keys are normed head by head; windows as in Qwen2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swa_jax.checkpoint.families.common import Family, read_dense, write_dense
from swa_jax.checkpoint.families.qwen2 import read_windows, window_keys
from swa_jax.model.config import ModelConfig

DEFAULTS = {"num_key_value_heads": 32, "max_position_embeddings": 32768, "head_dim": 128}


def from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    return read_qwen3(hf, DEFAULTS)


def read_qwen3(hf: Mapping[str, Any], defaults: Mapping[str, Any]) -> ModelConfig:
    bias = bool(hf.get("attention_bias"))
    return read_dense(hf, defaults, qk_norm=True, attention_bias=bias, attention_out_bias=bias)


def to_hf(config: ModelConfig) -> dict[str, Any]:
    return write_dense(config, attention_bias=config.attention_bias)


FAMILY = Family("qwen3", "Qwen3ForCausalLM", from_hf, to_hf, read_windows, window_keys)
