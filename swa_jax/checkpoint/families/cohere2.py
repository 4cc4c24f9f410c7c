"""Cohere 2 (Command R7B, Command A): Cohere with windows, and rotary embeddings in windowed layers only."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from swa_jax.base.errors import ConfigError
from swa_jax.checkpoint.families import cohere
from swa_jax.checkpoint.families.common import Family, HfConfig
from swa_jax.checkpoint.families.windows import one_full_in, window_keys_with_nope, windows_of
from swa_jax.model.config import ModelConfig
from swa_jax.model.layer_stacks import nope_of_full_layers
from swa_jax.model.layer_types import WINDOW

DEFAULT_WINDOW, DEFAULT_INTERVAL = 4096, 4
read_types = one_full_in(DEFAULT_INTERVAL, "sliding_window_pattern")


def from_hf(hf: HfConfig) -> ModelConfig:
    config = cohere.read_cohere(hf, cohere.DEFAULTS)
    types = read_types(hf, config.num_hidden_layers)
    check_window(hf, types)
    return dataclasses.replace(config, rope_layers=nope_of_full_layers(types))


def check_window(hf: HfConfig, types: Sequence[str]) -> None:
    if WINDOW in types and hf.get("sliding_window", DEFAULT_WINDOW) is None:
        raise ConfigError(f"config.json: layer_types has {WINDOW}, but sliding_window is null: give the window")


FAMILY = Family(
    "cohere2",
    "Cohere2ForCausalLM",
    from_hf,
    cohere.to_hf,
    windows_of(read_types, DEFAULT_WINDOW, cohere.DEFAULT_CONTEXT),
    window_keys_with_nope,
    peculiarity="rotary embeddings in these layers alone",
)
