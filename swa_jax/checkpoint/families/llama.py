"""Llama: full attention in every layer, with biases where `attention_bias` and `mlp_bias` say so."""

from __future__ import annotations

from swa_jax.checkpoint.families.common import Family, HfConfig, attention_biases, read_dense, writes
from swa_jax.model.config import ModelConfig

DEFAULTS = {"num_key_value_heads": None, "max_position_embeddings": 2048}


def from_hf(hf: HfConfig) -> ModelConfig:
    return read_dense(hf, DEFAULTS, **attention_biases(hf), mlp_bias=bool(hf.get("mlp_bias")))


FAMILY = Family(
    "llama", "LlamaForCausalLM", from_hf, writes("attention_bias", "mlp_bias"), peculiarity="Llama's biases"
)
