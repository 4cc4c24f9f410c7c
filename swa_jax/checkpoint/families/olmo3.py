"""OLMo 3: OLMo 2 with windows by `layer_types`; rotary embeddings may differ between full and windowed layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swa_jax.checkpoint.families import olmo2
from swa_jax.checkpoint.families.common import Family, Windows, layer_types
from swa_jax.checkpoint.families.rope import (
    read_windows_by_type,
    rope_keys_by_type,
    rope_of,
    window_keys_by_type,
    with_local_rope,
)
from swa_jax.model.config import ModelConfig
from swa_jax.model.layer_types import FULL, WINDOW

DEFAULT_THETA, DEFAULT_WINDOW, DEFAULT_CONTEXT = 500000.0, 4096, 2048


def from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    theta = hf.get("rope_theta") or DEFAULT_THETA
    config = olmo2.from_hf({**rope_of(hf, FULL), "rope_theta": theta})
    return with_local_rope(config, hf, _types(hf, config.num_hidden_layers), theta)


def to_hf(config: ModelConfig) -> dict[str, Any]:
    return olmo2.to_hf(config) | rope_keys_by_type(config)


def _types(hf: Mapping[str, Any], layers: int) -> list[str]:
    """Without `layer_types` every fourth layer is full."""
    return layer_types(hf, [FULL if (i + 1) % 4 == 0 else WINDOW for i in range(layers)])


def read_windows(hf: Mapping[str, Any], layers: int) -> Windows:
    context = hf.get("max_position_embeddings") or DEFAULT_CONTEXT
    return read_windows_by_type(hf.get("sliding_window", DEFAULT_WINDOW), _types(hf, layers), context)


FAMILY = Family("olmo3", "Olmo3ForCausalLM", from_hf, to_hf, read_windows, window_keys_by_type)
