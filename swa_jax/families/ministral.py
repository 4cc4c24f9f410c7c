"""Ministral: Mistral with `layer_types`, so that some layers may be full."""

from __future__ import annotations

from typing import Any

from swa_jax.families.common import Family, write_dense
from swa_jax.families.mistral import from_hf, read_windows
from swa_jax.model.config import ModelConfig
from swa_jax.model.pattern import AttentionPattern


def window_keys(config: ModelConfig, pattern: AttentionPattern) -> dict[str, Any]:
    return {"sliding_window": pattern.sliding_window, "layer_types": list(pattern.layer_types)}


FAMILY = Family("ministral", "MinistralForCausalLM", from_hf, write_dense, read_windows, window_keys)
