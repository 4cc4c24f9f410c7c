"""Models whose full layers have heads and rotary embeddings of another kind than their windowed ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from swa_jax.base.errors import ConfigError
from swa_jax.checkpoint.families.grammar import HfConfig, HfKeys
from swa_jax.checkpoint.families.rope import read_local_theta, rope_keys, rope_kinds_of
from swa_jax.model.config import ModelConfig
from swa_jax.model.layer_types import FULL, WINDOW

# The fields of `ModelConfig` that full layers may have of their own, and where those stand.
_OF_FULL_LAYERS = {
    "num_attention_heads": "num_global_attention_heads",
    "num_key_value_heads": "num_global_key_value_heads",
    "partial_rotary_factor": "global_partial_rotary_factor",
    "sink_logits": "global_sink_logits",
}


def ropes_by_type(
    hf: HfConfig, types: Sequence[str], defaults: Mapping[str, Any], share: float
) -> dict[str, dict[str, Any]]:
    """`rope_parameters` of full and windowed layers.

    Args:
      defaults: the same where `config.json` has none.
      share: `partial_rotary_factor` where one of them does not say it.

    Raises:
      ConfigError: those of a layer type that occurs are missing, or are no mapping.
    """
    given = defaults if hf.get("rope_parameters") is None else hf["rope_parameters"]
    found = {}
    for kind in (FULL, WINDOW):
        rope = given.get(kind) if isinstance(given, Mapping) else None
        if kind in types and not isinstance(rope, Mapping):
            raise ConfigError(f"config.json: rope_parameters.{kind} must be a mapping, got {rope!r}")
        found[kind] = {"partial_rotary_factor": share, **(rope or {})}
    return found


def with_layer_kinds(
    config: ModelConfig,
    types: Sequence[str],
    ropes: Mapping[str, Mapping[str, Any]],
    full: Mapping[str, Any],
    windowed: Mapping[str, Any],
) -> ModelConfig:
    """The model, read with the RoPE of its full layers, with the fields and the RoPE of either kind of layer.

    Raises `ConfigError` as `read_local_theta`.
    """
    shares = {kind: {"partial_rotary_factor": rope["partial_rotary_factor"]} for kind, rope in ropes.items()}
    own, context = {"rope_parameters": ropes[WINDOW]}, config.max_position_embeddings
    theta = read_local_theta(own, context, ropes[WINDOW]["partial_rotary_factor"])
    if WINDOW not in types:
        return dataclasses.replace(config, **full, **shares[FULL])
    fields = {**windowed, **shares[WINDOW]}
    if FULL in types:
        fields |= {_OF_FULL_LAYERS[name]: value for name, value in {**full, **shares[FULL]}.items()}
    return dataclasses.replace(config, rope_layers=rope_kinds_of(types), local_rope_theta=theta, **fields)


def of_full_layers(config: ModelConfig, name: str) -> Any:
    """A field of `ModelConfig`, as full layers have it."""
    own = getattr(config, _OF_FULL_LAYERS[name])
    return getattr(config, name) if own is None else own


def layer_kind_keys(config: ModelConfig) -> HfKeys:
    """`rope_parameters` of full and windowed layers."""
    share = of_full_layers(config, "partial_rotary_factor")
    full = rope_keys(dataclasses.replace(config, partial_rotary_factor=share))["rope_parameters"]
    local = {"rope_type": "default", "rope_theta": config.local_rope_theta}
    return {
        "rope_parameters": {
            FULL: {**full, "partial_rotary_factor": share},
            WINDOW: {**local, "partial_rotary_factor": config.partial_rotary_factor},
        }
    }
