"""Gemma 3's text model: Gemma 2 with QK norms, without softcaps, and with another RoPE in windowed layers."""

from __future__ import annotations

from swa_jax.checkpoint.families import gemma2
from swa_jax.checkpoint.families.common import Family, HfConfig, HfKeys
from swa_jax.checkpoint.families.rope import rope_keys_by_type, rope_of, with_local_rope
from swa_jax.checkpoint.families.windows import one_full_in, window_keys_by_type, windows_of
from swa_jax.model.config import ModelConfig
from swa_jax.model.layer_types import FULL

DEFAULT_CONTEXT = 131072
DEFAULTS = gemma2.DEFAULTS | {
    "vocab_size": 262208,  # the text_config of Gemma 3 4B says neither this nor the number of heads
    "num_attention_heads": 8,
    "max_position_embeddings": DEFAULT_CONTEXT,
    "rope_theta": 1e6,
}
DEFAULT_LOCAL_THETA = 10000.0
read_types = one_full_in(6, "sliding_window_pattern")


def from_hf(hf: HfConfig) -> ModelConfig:
    # transformers stores this key and applies none.
    given = {key: value for key, value in rope_of(hf, FULL).items() if key != "attn_logit_softcapping"}
    config = gemma2.read_gemma(given, DEFAULTS, attention_softcap=None, logit_softcap=None, qk_norm=True)
    local = hf.get("rope_local_base_freq", DEFAULT_LOCAL_THETA)
    return with_local_rope(config, hf, read_types(hf, config.num_hidden_layers), local)


def to_hf(config: ModelConfig) -> HfKeys:
    local = config.local_rope_theta if config.rope_layers else config.rope_theta
    return gemma2.to_hf(config) | rope_keys_by_type(config) | {"rope_local_base_freq": local}


read_windows = windows_of(read_types, gemma2.DEFAULT_WINDOW, DEFAULT_CONTEXT)
FAMILY = Family("gemma3_text", "Gemma3ForCausalLM", from_hf, to_hf, read_windows, window_keys_by_type)
