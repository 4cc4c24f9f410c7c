"""Mistral: Llama without biases, with a window in every layer or in none."""

from __future__ import annotations

from swa_jax.checkpoint.families.common import Family, HfConfig, read_dense, write_dense
from swa_jax.checkpoint.families.windows import window_alike_keys, windows_alike
from swa_jax.model.config import ModelConfig

DEFAULTS = {"num_key_value_heads": 8, "max_position_embeddings": 4096 * 32}
DEFAULT_WINDOW = 4096


def from_hf(hf: HfConfig) -> ModelConfig:
    return read_dense(hf, DEFAULTS)


FAMILY = Family("mistral", "MistralForCausalLM", from_hf, write_dense, windows_alike(DEFAULT_WINDOW), window_alike_keys)
