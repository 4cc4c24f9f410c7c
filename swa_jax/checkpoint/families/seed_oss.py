"""Seed-OSS: Llama with biases on queries, keys and values alone, or also on what attention gives."""

from __future__ import annotations

from swa_jax.checkpoint.families.common import Family, HfConfig, read_dense, writes
from swa_jax.model.config import ModelConfig

DEFAULTS = {"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 524288}
BIASES = {"attention_bias": True, "attention_out_bias": False, "mlp_bias": False}


def from_hf(hf: HfConfig) -> ModelConfig:
    return read_dense(hf, DEFAULTS, **{key: bool(hf.get(key, default)) for key, default in BIASES.items()})


FAMILY = Family("seed_oss", "SeedOssForCausalLM", from_hf, writes(*BIASES), peculiarity="Seed-OSS's biases")
