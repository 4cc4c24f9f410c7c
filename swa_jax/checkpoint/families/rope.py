"""Rotary embeddings in `config.json`: both spellings, one for all layers or one for each layer type."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from swa_jax.base.errors import ConfigError
from swa_jax.base.settings import from_dict, to_dict
from swa_jax.checkpoint.families.grammar import HfConfig, HfKeys, is_number
from swa_jax.model.config import ModelConfig, RopeKind, RopeScaling
from swa_jax.model.layer_types import FULL, WINDOW

# Where the rotary embeddings of a model are described; each family writes its own of these keys.
ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters", "rope_local_base_freq")

# The keys of `rope_parameters` that each type reads, and those among them it cannot do without.
_ROPE_FIELDS: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
    "longrope": ("factor", "original_max_position_embeddings", "attention_factor", "short_factor", "long_factor"),
    "proportional": ("factor", "partial_rotary_factor"),
}
_ROPE_REQUIRED = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
    "longrope": ("short_factor", "long_factor"),
    "proportional": (),
}


# ---- one for all layers ----


def read_rope(
    hf: HfConfig, default_theta: float, max_positions: int, partial_rotary_factor: float = 1.0
) -> tuple[float, RopeScaling | None]:
    """theta and the scaling, from either spelling; the family rotates `partial_rotary_factor` of the channels."""
    key, rope = rope_mapping(hf)
    theta = rope.get("rope_theta", hf.get("rope_theta"))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "proportional" and read_partial_rotary(hf) != partial_rotary_factor:
        raise ConfigError(
            f"config.json: partial_rotary_factor is not supported; supported: {partial_rotary_factor}, others in phi3"
        )
    if theta is None:
        theta = default_theta
    if not is_number(theta) or theta <= 0:
        raise ConfigError(f"config.json: rope_theta must be a positive number, got {theta!r}")
    if kind == "default":
        return float(theta), None
    if not isinstance(kind, str) or kind not in _ROPE_FIELDS:
        route = ""
        if kind == "dynamic":  # it is the default up to the length of the first training
            route = f"; remove {key} to use the model up to max_position_embeddings ({max_positions}), or set yarn"
        raise ConfigError(
            f"config.json: {key}.rope_type '{kind}' is not supported; supported: default, "
            f"{', '.join(_ROPE_FIELDS)}{route}"
        )
    values = {name: rope[name] for name in _ROPE_FIELDS[kind] if rope.get(name) is not None}
    for name in _ROPE_REQUIRED[kind]:
        if name not in values:
            raise ConfigError(f"config.json: {key}.{name} is missing; rope_type '{kind}' needs it")
    if kind == "proportional":
        values.setdefault("factor", 1.0)
    elif kind != "linear":
        # Some checkpoints keep the pretraining length outside the mapping; it wins there.
        original = hf.get("original_max_position_embeddings")
        if original is None:
            original = values.get("original_max_position_embeddings", max_positions)
        if type(original) is not int or original < 1:
            raise ConfigError(
                f"config.json: original_max_position_embeddings must be a whole number above 0, got {original!r}"
            )
        values["original_max_position_embeddings"] = original
        factor = max_positions / original
        values.setdefault("factor", max(factor, 1.0) if kind == "longrope" else factor)
    return float(theta), from_dict(RopeScaling, {"rope_type": kind} | values, f"config.json.{key}")


def with_default_rope(hf: HfConfig, rope: Mapping[str, Any]) -> HfKeys:
    """`hf`, with these RoPE parameters where it says none; a `rope_theta` alone does not count."""
    said = hf.get("rope_parameters") is not None or hf.get("rope_scaling") is not None
    return dict(hf) if said else {**hf, "rope_parameters": rope}


def read_partial_rotary(hf: HfConfig) -> float:
    """The share of a head's channels that is rotated."""
    factor = rope_mapping(hf)[1].get("partial_rotary_factor", hf.get("partial_rotary_factor"))
    if factor is None:
        return 1.0
    if not is_number(factor):
        raise ConfigError(f"config.json: partial_rotary_factor must be a number, got {factor!r}")
    return float(factor)


def rope_mapping(hf: HfConfig) -> tuple[str, Mapping[str, Any]]:
    """The key that holds the RoPE parameters, and what it holds; Hugging Face lets a non-empty `rope_scaling` win."""
    key = "rope_scaling" if hf.get("rope_scaling") else "rope_parameters"
    rope = hf.get(key) or {}
    if not isinstance(rope, Mapping):
        raise ConfigError(f"config.json: '{key}' must be a mapping, got {rope!r}")
    return key, _agreed(rope, key)


def _agreed(rope: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """One set of RoPE parameters, also where they are nested by layer type."""
    nested = [value for value in rope.values() if isinstance(value, Mapping)]
    if not nested:
        return rope
    if any(other != nested[0] for other in nested):
        raise ConfigError(
            f"config.json: {key} differs between layer types ({', '.join(rope)}); supported: one for all layers"
        )
    return nested[0]


def without_rope(hf: HfConfig) -> HfKeys:
    return {key: value for key, value in hf.items() if key not in (*ROPE_KEYS, "partial_rotary_factor")}


def rope_keys(config: ModelConfig) -> HfKeys:
    """Both spellings, so that either transformers reads the same."""
    scaling: dict[str, Any] = {"rope_type": "default"}
    if config.rope_scaling is not None:
        kind, values = config.rope_scaling.rope_type, to_dict(config.rope_scaling)
        scaling = {"rope_type": kind} | {k: values[k] for k in _ROPE_FIELDS[kind] if values[k] is not None}
    factor = config.partial_rotary_factor
    partial = {} if factor == 1 else {"partial_rotary_factor": factor}
    return partial | {
        "rope_theta": config.rope_theta,
        "rope_scaling": None if config.rope_scaling is None else dict(scaling),
        "rope_parameters": scaling | partial | {"rope_theta": config.rope_theta},
    }


# ---- one for each layer type ----
#
# RoPE belongs to a layer's weights: a full layer that a pattern gives a window keeps its own. Hugging Face's classes
# choose it by the layer's type instead, so they know such a model only under the layer types it was trained with.


def rope_of(hf: HfConfig, layer_type: str) -> Mapping[str, Any]:
    """`hf` with the RoPE parameters of one layer type, where they are nested by layer type."""
    rope = hf.get("rope_parameters")
    if not isinstance(rope, Mapping) or not any(isinstance(value, Mapping) for value in rope.values()):
        return hf
    return {**hf, "rope_parameters": rope.get(layer_type)}


def with_local_rope(config: ModelConfig, hf: HfConfig, types: Sequence[str], default_theta: float) -> ModelConfig:
    """The model, read with the RoPE of its full layers, with that of the windowed layers as its local one.

    Args:
      types: of the layers, as `config.json` has them.
      default_theta: of windowed layers, where `rope_parameters` does not say it.

    Raises:
      ConfigError: the windowed layers scale their rotary embeddings, which no local RoPE does here.
    """
    own = {key: value for key, value in rope_of(hf, WINDOW).items() if key not in ("rope_theta", "rope_scaling")}
    theta, scaling = read_rope(own, default_theta, config.max_position_embeddings)
    if (theta, scaling) == (config.rope_theta, config.rope_scaling):
        return config
    if scaling is not None:
        raise ConfigError(
            f"config.json: rope_parameters.{WINDOW}.rope_type '{scaling.rope_type}' is not supported; supported: "
            "default, or the same parameters for all layer types"
        )
    return dataclasses.replace(config, rope_layers=rope_kinds_of(types), local_rope_theta=theta)


def rope_kinds_of(types: Sequence[str]) -> tuple[RopeKind, ...]:
    """`ModelConfig.rope_layers` of a model whose windowed layers have a RoPE of their own."""
    return tuple("local" if kind == WINDOW else "global" for kind in types)


def read_local_theta(hf: HfConfig, max_positions: int, partial_rotary_factor: float = 1.0) -> float:
    """theta of the RoPE of windowed layers, 10,000 where it is not said.

    Raises:
      ConfigError: it is scaled, which no local RoPE is here.
    """
    theta, scaling = read_rope(hf, 10000.0, max_positions, partial_rotary_factor)
    if scaling is not None:
        raise ConfigError(
            f"config.json: rope_parameters.{WINDOW}.rope_type '{scaling.rope_type}' is not supported; supported: "
            "default"
        )
    return theta


def rope_keys_by_type(config: ModelConfig) -> HfKeys:
    """`rope_parameters` nested by layer type."""
    plain = rope_keys(config)["rope_parameters"]
    local = {"rope_type": "default", "rope_theta": config.local_rope_theta} if config.rope_layers else plain
    return {"rope_parameters": {FULL: plain, WINDOW: local}}
