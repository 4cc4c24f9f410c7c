"""CWM: Llama with windows by `layer_types`; without a word on RoPE it is scaled as Llama 3.1's."""

from __future__ import annotations

from swa_jax.checkpoint.families.common import Family, HfConfig, read_dense, writes
from swa_jax.checkpoint.families.rope import with_default_rope
from swa_jax.checkpoint.families.windows import one_full_in, window_always, windows_of
from swa_jax.model.config import ModelConfig

DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
}
DEFAULT_WINDOW = 8192
DEFAULT_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e6,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def from_hf(hf: HfConfig) -> ModelConfig:
    return read_dense(with_default_rope(hf, DEFAULT_ROPE), DEFAULTS, mlp_bias=bool(hf.get("mlp_bias")))


FAMILY = Family(
    "cwm",
    "CwmForCausalLM",
    from_hf,
    writes("mlp_bias"),
    windows_of(one_full_in(4, first=True), DEFAULT_WINDOW),
    window_always,
)
