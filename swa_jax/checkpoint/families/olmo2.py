"""OLMo 2: norms on what attention and MLP give and none before them; queries and keys normed over all heads at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swa_jax.checkpoint.families.common import Family, read_dense, write_dense
from swa_jax.model.config import ModelConfig

DEFAULTS = {"num_key_value_heads": None, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5}


def from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    bias = bool(hf.get("attention_bias"))
    return read_dense(
        hf,
        DEFAULTS,
        attention_bias=bias,
        attention_out_bias=bias,
        norm_placement="post",
        qk_norm=True,
        qk_norm_over="projection",
    )


def to_hf(config: ModelConfig) -> dict[str, Any]:
    return write_dense(config, attention_bias=config.attention_bias)


FAMILY = Family("olmo2", "Olmo2ForCausalLM", from_hf, to_hf, peculiarity="OLMo 2's norms")
