"""Gemma 3's text model: Gemma 2 with QK norms, without softcaps, and with another RoPE in windowed layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swa_jax.checkpoint.families import gemma2
from swa_jax.checkpoint.families.common import Family, Windows, layer_types, positive_int
from swa_jax.checkpoint.families.rope import (
    read_windows_by_type,
    rope_keys_by_type,
    rope_of,
    window_keys_by_type,
    with_local_rope,
)
from swa_jax.model.config import ModelConfig
from swa_jax.model.layer_types import FULL, WINDOW

DEFAULT_CONTEXT = 131072
DEFAULTS = gemma2.DEFAULTS | {
    "vocab_size": 262208,  # the text_config of Gemma 3 4B says neither this nor the number of heads
    "num_attention_heads": 8,
    "max_position_embeddings": DEFAULT_CONTEXT,
    "rope_theta": 1e6,
}
DEFAULT_LOCAL_THETA = 10000.0


def from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    # transformers stores this key and applies none.
    given = {key: value for key, value in rope_of(hf, FULL).items() if key != "attn_logit_softcapping"}
    config = gemma2.read_gemma(given, DEFAULTS, attention_softcap=None, logit_softcap=None, qk_norm=True)
    local = hf.get("rope_local_base_freq", DEFAULT_LOCAL_THETA)
    return with_local_rope(config, hf, _types(hf, config.num_hidden_layers), local)


def to_hf(config: ModelConfig) -> dict[str, Any]:
    local = config.local_rope_theta if config.rope_layers else config.rope_theta
    return gemma2.to_hf(config) | rope_keys_by_type(config) | {"rope_local_base_freq": local}


def _types(hf: Mapping[str, Any], layers: int) -> list[str]:
    """Without `layer_types` one layer in `sliding_window_pattern` is full."""
    n = positive_int(hf, "sliding_window_pattern", 6)
    return layer_types(hf, [WINDOW if (i + 1) % n else FULL for i in range(layers)])


def read_windows(hf: Mapping[str, Any], layers: int) -> Windows:
    context = hf.get("max_position_embeddings") or DEFAULT_CONTEXT
    return read_windows_by_type(hf.get("sliding_window", gemma2.DEFAULT_WINDOW), _types(hf, layers), context)


FAMILY = Family("gemma3_text", "Gemma3ForCausalLM", from_hf, to_hf, read_windows, window_keys_by_type)
