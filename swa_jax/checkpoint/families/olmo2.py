"""OLMo 2: norms on what attention and MLP give and none before them; queries and keys normed over all heads at once."""

from __future__ import annotations

from swa_jax.checkpoint.families.common import Family, HfConfig, attention_biases, read_dense, writes
from swa_jax.model.config import ModelConfig

DEFAULTS = {"num_key_value_heads": None, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5}


def from_hf(hf: HfConfig) -> ModelConfig:
    norms = {"norm_placement": "post", "qk_norm": True, "qk_norm_over": "projection"}
    return read_dense(hf, DEFAULTS, **attention_biases(hf), **norms)


to_hf = writes("attention_bias")
FAMILY = Family("olmo2", "Olmo2ForCausalLM", from_hf, to_hf, peculiarity="OLMo 2's norms")
