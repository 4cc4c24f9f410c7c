"""Gemma 2: norms before and after attention and MLP, softcaps, a scale of its own, every second layer windowed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swa_jax.base.errors import ConfigError
from swa_jax.checkpoint.families.common import Family, HfConfig, HfKeys, attention_biases, read_dense, write_dense
from swa_jax.checkpoint.families.grammar import positive_number
from swa_jax.checkpoint.families.windows import one_full_in, window_always, windows_of
from swa_jax.model.config import ModelConfig

DEFAULTS = {"num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 8192, "tie_word_embeddings": True}
DEFAULT_WINDOW = 4096


def from_hf(hf: HfConfig) -> ModelConfig:
    return read_gemma(hf, DEFAULTS, attention_softcap=50.0, logit_softcap=30.0)


def read_gemma(
    hf: HfConfig,
    defaults: Mapping[str, Any],
    *,
    attention_softcap: float | None,
    logit_softcap: float | None,
    **fields: Any,
) -> ModelConfig:
    """What Gemmas share; the softcaps are those of an absent key, where null means none."""
    if hf.get("use_bidirectional_attention"):
        raise ConfigError("config.json: use_bidirectional_attention is not supported; supported: causal attention")
    return read_dense(
        {**hf, "hidden_act": hf.get("hidden_activation", "gelu_pytorch_tanh")},
        defaults,
        **attention_biases(hf),
        norm_unit_offset=True,
        attention_scale=positive_number(hf, "query_pre_attn_scalar", 256) ** -0.5,
        attention_softcap=hf.get("attn_logit_softcapping", attention_softcap),
        logit_softcap=hf.get("final_logit_softcapping", logit_softcap),
        embedding_multiplier=positive_number(hf, "hidden_size", None) ** 0.5,
        **{"norm_placement": "sandwich"} | fields,
    )


def to_hf(config: ModelConfig) -> HfKeys:
    scalar = (config.attention_scale or config.head_dim**-0.5) ** -2
    hf = write_dense(
        config,
        "attention_bias",
        query_pre_attn_scalar=round(scalar) if abs(scalar - round(scalar)) < 1e-6 else scalar,
        attn_logit_softcapping=config.attention_softcap,
        final_logit_softcapping=config.logit_softcap,
    )
    return hf | {"hidden_activation": hf["hidden_act"]}


read_windows = windows_of(one_full_in(2), DEFAULT_WINDOW)
FAMILY = Family("gemma2", "Gemma2ForCausalLM", from_hf, to_hf, read_windows, window_always)
