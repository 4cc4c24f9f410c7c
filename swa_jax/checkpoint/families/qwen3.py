"""Qwen3: queries and keys are normed head by head; windows as in Qwen2."""

from __future__ import annotations

from swa_jax.checkpoint.families.common import Family, HfConfig, attention_biases, read_dense, writes
from swa_jax.checkpoint.families.qwen2 import read_windows, window_keys
from swa_jax.model.config import ModelConfig

DEFAULTS = {"num_key_value_heads": 32, "max_position_embeddings": 32768, "head_dim": 128}


def from_hf(hf: HfConfig) -> ModelConfig:
    return read_dense(hf, DEFAULTS, qk_norm=True, **attention_biases(hf))


FAMILY = Family("qwen3", "Qwen3ForCausalLM", from_hf, writes("attention_bias"), read_windows, window_keys)
