"""Ministral 3: Mistral with YaRN, and a factor on queries that grows with their position."""

from __future__ import annotations

import dataclasses

from swa_jax.base.errors import ConfigError
from swa_jax.checkpoint.families.common import Family, HfConfig, HfKeys, read_dense, write_dense
from swa_jax.checkpoint.families.grammar import is_number, shortened
from swa_jax.checkpoint.families.rope import rope_mapping, with_default_rope
from swa_jax.checkpoint.families.windows import window_alike_keys, windows_alike
from swa_jax.model.config import ModelConfig

DEFAULTS = {"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262144, "rms_norm_eps": 1e-5}
DEFAULT_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
BETA = "llama_4_scaling_beta"


def from_hf(hf: HfConfig) -> ModelConfig:
    """The factor's key stands among the RoPE parameters, and goes by their `original_max_position_embeddings`."""
    hf = with_default_rope(hf, DEFAULT_ROPE)
    config, (key, rope) = read_dense(hf, DEFAULTS), rope_mapping(hf)
    beta = rope.get(BETA) or 0.0
    if not is_number(beta) or not 0 <= beta <= 100:
        raise ConfigError(f"config.json: {key}.{BETA} must be a number from 0 to 100, got {shortened(beta)}")
    if not beta:
        return config
    if config.rope_scaling is None:
        raise ConfigError(f"config.json: {key}.{BETA} is not supported with rope_type 'default'; supported: with yarn")
    return dataclasses.replace(
        config, rope_scaling=dataclasses.replace(config.rope_scaling, llama_4_scaling_beta=float(beta))
    )


def to_hf(config: ModelConfig) -> HfKeys:
    """Hugging Face's class needs both numbers of the factor, also where it is 1."""
    hf, scaling = write_dense(config), config.rope_scaling
    beta = 0.0 if scaling is None else scaling.llama_4_scaling_beta
    factor = {"original_max_position_embeddings": config.max_position_embeddings, BETA: beta}
    hf["rope_parameters"] = factor | hf["rope_parameters"]
    if scaling is not None:
        hf["rope_scaling"] = factor | hf["rope_scaling"]
    return hf


FAMILY = Family(
    "ministral3",
    "Ministral3ForCausalLM",
    from_hf,
    to_hf,
    windows_alike(),
    window_alike_keys,
    peculiarity="Ministral 3's factor on queries",
)
