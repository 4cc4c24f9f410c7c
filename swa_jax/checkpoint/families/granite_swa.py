"""Granite-SWA: Granite with sink logits, windows by `layer_types`, and a theta of RoPE for each layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from swa_jax.base.errors import ConfigError
from swa_jax.checkpoint.families import granite
from swa_jax.checkpoint.families.common import Family, HfConfig, HfKeys
from swa_jax.checkpoint.families.grammar import is_number, shortened
from swa_jax.checkpoint.families.windows import one_full_in, window_always, windows_of
from swa_jax.model.config import ModelConfig, RopeKind

DEFAULTS = {
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
DEFAULT_WINDOW = 128
MOST_THETA = 1e12


def from_hf(hf: HfConfig) -> ModelConfig:
    return with_thetas(granite.read_granite(hf, DEFAULTS, sink_logits=True), hf.get("layer_rope_theta"))


def with_thetas(config: ModelConfig, thetas: Sequence[float] | None) -> ModelConfig:
    """The model with `layer_rope_theta`, one a layer: 0 is no rotary embedding, null that of the model everywhere.

    Raises:
      ConfigError: not one number a layer, or more thetas than the decoder has (two, or one with scaling).
    """
    if thetas is None:
        return config
    numbers = isinstance(thetas, list) and all(is_number(theta) and 0 <= theta <= MOST_THETA for theta in thetas)
    if not numbers or len(thetas) != config.num_hidden_layers:
        raise ConfigError(
            f"config.json: layer_rope_theta must be a list with a number from 0 to {MOST_THETA:g} for each of the "
            f"{config.num_hidden_layers} layers, got {shortened(thetas)}"
        )
    used = list(dict.fromkeys(float(theta) for theta in thetas if theta))
    most = 1 if config.rope_scaling else 2
    if len(used) > most:
        raise ConfigError(
            f"config.json: layer_rope_theta has {len(used)} thetas; supported: {most} beside 0"
            f"{' where RoPE is scaled' if config.rope_scaling else ''}"
        )
    first = used[0] if used else config.rope_theta
    kinds: dict[float, RopeKind] = {0.0: "none", first: "global"}
    return dataclasses.replace(
        config,
        rope_theta=first,
        local_rope_theta=used[1] if len(used) > 1 else config.local_rope_theta,
        rope_layers=tuple(kinds.get(float(theta), "local") for theta in thetas),
    )


def to_hf(config: ModelConfig) -> HfKeys:
    thetas = {"global": config.rope_theta, "local": config.local_rope_theta, "none": 0}
    return granite.to_hf(config) | {"layer_rope_theta": [thetas[kind] for kind in config.rope_kinds_by_layer]}


read_windows = windows_of(one_full_in(4, first=True), DEFAULT_WINDOW)
FAMILY = Family(
    "granite_swa", "GraniteSWAForCausalLM", from_hf, to_hf, read_windows, window_always, peculiarity="sink logits"
)
