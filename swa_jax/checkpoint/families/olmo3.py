"""OLMo 3: OLMo 2 with windows by `layer_types`; rotary embeddings may differ between full and windowed layers."""

from __future__ import annotations

from swa_jax.checkpoint.families import olmo2
from swa_jax.checkpoint.families.common import Family, HfConfig, HfKeys
from swa_jax.checkpoint.families.rope import rope_keys_by_type, rope_of, with_local_rope
from swa_jax.checkpoint.families.windows import one_full_in, window_keys_by_type, windows_of
from swa_jax.model.config import ModelConfig
from swa_jax.model.layer_types import FULL

DEFAULT_THETA, DEFAULT_WINDOW, DEFAULT_CONTEXT = 500000.0, 4096, 2048
read_types = one_full_in(4)


def from_hf(hf: HfConfig) -> ModelConfig:
    theta = hf.get("rope_theta") or DEFAULT_THETA
    config = olmo2.from_hf({**rope_of(hf, FULL), "rope_theta": theta})
    return with_local_rope(config, hf, read_types(hf, config.num_hidden_layers), theta)


def to_hf(config: ModelConfig) -> HfKeys:
    return olmo2.to_hf(config) | rope_keys_by_type(config)


read_windows = windows_of(read_types, DEFAULT_WINDOW, DEFAULT_CONTEXT)
FAMILY = Family("olmo3", "Olmo3ForCausalLM", from_hf, to_hf, read_windows, window_keys_by_type)
