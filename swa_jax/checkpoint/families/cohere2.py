"""Cohere 2 (Command R7B, Command A): Cohere with windows, and rotary embeddings in windowed layers only."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from swa_jax.base.errors import ConfigError
from swa_jax.checkpoint.families import cohere
from swa_jax.checkpoint.families.common import Family, Windows, layer_types, positive_int
from swa_jax.checkpoint.families.rope import nope_of_full_layers, read_windows_by_type, window_keys_with_nope
from swa_jax.model.config import ModelConfig
from swa_jax.model.layer_types import FULL, WINDOW
from swa_jax.model.pattern import AttentionPattern

DEFAULT_WINDOW, DEFAULT_INTERVAL = 4096, 4


def from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    config = cohere.read_cohere(hf, cohere.DEFAULTS)
    types = _types(hf, config.num_hidden_layers)
    check_window(hf, types)
    return dataclasses.replace(config, rope_layers=nope_of_full_layers(types))


def check_window(hf: Mapping[str, Any], types: Sequence[str]) -> None:
    if WINDOW in types and hf.get("sliding_window", DEFAULT_WINDOW) is None:
        raise ConfigError(f"config.json: layer_types has {WINDOW}, but sliding_window is null: give the window")


def to_hf(config: ModelConfig) -> dict[str, Any]:
    full = AttentionPattern((FULL,) * config.num_hidden_layers)
    return cohere.to_hf(config) | window_keys_with_nope(config, full)


def _types(hf: Mapping[str, Any], layers: int) -> list[str]:
    """Without `layer_types` one layer in `sliding_window_pattern` is full."""
    interval = positive_int(hf, "sliding_window_pattern", DEFAULT_INTERVAL)
    return layer_types(hf, [WINDOW if (i + 1) % interval else FULL for i in range(layers)])


def read_windows(hf: Mapping[str, Any], layers: int) -> Windows:
    context = hf.get("max_position_embeddings") or cohere.DEFAULT_CONTEXT
    return read_windows_by_type(hf.get("sliding_window", DEFAULT_WINDOW), _types(hf, layers), context)


FAMILY = Family(
    "cohere2",
    "Cohere2ForCausalLM",
    from_hf,
    to_hf,
    read_windows,
    window_keys_with_nope,
    peculiarity="rotary embeddings in these layers alone",
)
