"""Mistral: Llama without biases, with a window in every layer or in none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swa_jax.checkpoint.families.common import Family, Windows, read_dense, write_dense
from swa_jax.model.config import ModelConfig
from swa_jax.model.layer_types import FULL, WINDOW
from swa_jax.model.pattern import AttentionPattern

DEFAULTS = {"num_key_value_heads": 8, "max_position_embeddings": 4096 * 32}
DEFAULT_WINDOW = 4096  # where the key is absent; null means none


def from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    return read_dense(hf, DEFAULTS)


def read_windows(hf: Mapping[str, Any], layers: int) -> Windows:
    return windows_alike(hf.get("sliding_window", DEFAULT_WINDOW), layers)


def windows_alike(window: int | None, layers: int) -> Windows:
    return window, [FULL if window is None else WINDOW] * layers


def window_keys(config: ModelConfig, pattern: AttentionPattern) -> dict[str, Any]:
    return {"sliding_window": pattern.sliding_window}


FAMILY = Family("mistral", "MistralForCausalLM", from_hf, write_dense, read_windows, window_keys)
