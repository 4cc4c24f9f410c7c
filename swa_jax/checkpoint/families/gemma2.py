"""Gemma 2: norms before and after attention and MLP, softcaps, a scale of its own, every second layer windowed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swa_jax.base.errors import ConfigError
from swa_jax.checkpoint.families.common import Family, Windows, layer_types, read_dense, write_dense
from swa_jax.checkpoint.families.rope import window_always
from swa_jax.model.config import ModelConfig
from swa_jax.model.layer_types import FULL, WINDOW

DEFAULTS = {"num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 8192, "tie_word_embeddings": True}
DEFAULT_WINDOW = 4096


def from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    return read_gemma(hf, DEFAULTS, attention_softcap=50.0, logit_softcap=30.0)


def read_gemma(
    hf: Mapping[str, Any],
    defaults: Mapping[str, Any],
    *,
    attention_softcap: float | None,
    logit_softcap: float | None,
    **fields: Any,
) -> ModelConfig:
    """What Gemmas share; the softcaps are those of an absent key, where null means none."""
    if hf.get("use_bidirectional_attention"):
        raise ConfigError("config.json: use_bidirectional_attention is not supported; supported: causal attention")
    scalar, width = hf.get("query_pre_attn_scalar", 256), hf.get("hidden_size")
    for key, value in (("query_pre_attn_scalar", scalar), ("hidden_size", width)):
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise ConfigError(f"config.json: {key} must be a number above 0, got {value!r}")
    bias = bool(hf.get("attention_bias"))
    return read_dense(
        {**hf, "hidden_act": hf.get("hidden_activation", "gelu_pytorch_tanh")},
        defaults,
        attention_bias=bias,
        attention_out_bias=bias,
        norm_unit_offset=True,
        attention_scale=scalar**-0.5,
        attention_softcap=hf.get("attn_logit_softcapping", attention_softcap),
        logit_softcap=hf.get("final_logit_softcapping", logit_softcap),
        embedding_multiplier=width**0.5,  # type: ignore[operator]  # checked above
        **{"norm_placement": "sandwich"} | fields,
    )


def to_hf(config: ModelConfig) -> dict[str, Any]:
    scalar = (config.attention_scale or config.head_dim**-0.5) ** -2
    hf = write_dense(
        config,
        attention_bias=config.attention_bias,
        query_pre_attn_scalar=round(scalar) if abs(scalar - round(scalar)) < 1e-6 else scalar,
        attn_logit_softcapping=config.attention_softcap,
        final_logit_softcapping=config.logit_softcap,
    )
    return hf | {"hidden_activation": hf["hidden_act"]}


def read_windows(hf: Mapping[str, Any], layers: int) -> Windows:
    by_default = [FULL if i % 2 else WINDOW for i in range(layers)]
    return hf.get("sliding_window", DEFAULT_WINDOW), layer_types(hf, by_default)


FAMILY = Family("gemma2", "Gemma2ForCausalLM", from_hf, to_hf, read_windows, window_always)
