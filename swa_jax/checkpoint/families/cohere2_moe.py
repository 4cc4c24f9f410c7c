"""Cohere 2 with experts: dense layers first, which are all turned where `prefix_dense_sliding_window_pattern` is 1."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from swa_jax.base.errors import ConfigError
from swa_jax.base.settings import nearest
from swa_jax.checkpoint.families import cohere, cohere2
from swa_jax.checkpoint.families.common import Family, Windows, layer_types, positive_int
from swa_jax.checkpoint.families.experts import (
    COUNT_KEYS,
    mlp_types,
    read_experts,
    shared_expert_keys,
    shared_experts,
    whole,
    with_mlp_types,
    without_experts,
    written_mlp_types,
)
from swa_jax.checkpoint.families.rope import nope_of_full_layers, read_windows_by_type, window_keys_with_nope
from swa_jax.model.config import ModelConfig, RopeKind
from swa_jax.model.layer_types import FULL, WINDOW
from swa_jax.model.pattern import AttentionPattern

DEFAULTS = cohere.DEFAULTS | {"head_dim": 128}
_PREFIX_PATTERN = "prefix_dense_sliding_window_pattern"
_COMBINATIONS = {"average": 0.5, "sum": 1.0}  # of what the chosen experts and the shared one give


def from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """`intermediate_size` is the width of an expert, and of a dense MLP without `prefix_dense_intermediate_size`."""
    types = mlp_types(hf, _prefix(hf))
    dense = dict(hf)
    if hf.get("prefix_dense_intermediate_size") is not None:
        dense["intermediate_size"] = hf["prefix_dense_intermediate_size"]
    by_rms = hf.get("rms_norm_eps")
    config = cohere.read_cohere(without_experts(dense), DEFAULTS, **with_mlp_types(_experts(hf), types))
    if by_rms is not None:
        config = dataclasses.replace(config, norm_type="rms", rms_norm_eps=by_rms)
    layers = _types(hf, config.num_hidden_layers)
    cohere2.check_window(hf, layers)
    return dataclasses.replace(config, rope_layers=_rope_layers(hf, layers, config))


def _experts(hf: Mapping[str, Any]) -> dict[str, Any]:
    experts = read_experts(hf, count=8, per_token=2, width=("intermediate_size", 22528), normalized=True)
    experts |= shared_experts(hf, 0, experts["moe_intermediate_size"])
    scores = _one_of(hf, "expert_selection_fn", ("softmax", "sigmoid"))
    mean = _COMBINATIONS[_one_of(hf, "shared_expert_combination_strategy", tuple(_COMBINATIONS))]
    if not experts["shared_expert_intermediate_size"]:
        mean = 1.0
    normalized = experts["norm_topk_prob"] or scores == "softmax"
    return experts | {"router_scores": scores, "mixture_multiplier": mean, "norm_topk_prob": normalized}


def _one_of(hf: Mapping[str, Any], key: str, known: tuple[str, ...]) -> str:
    """The first is what an absent key means."""
    value = known[0] if hf.get(key) is None else hf[key]
    if value not in known:
        raise ConfigError(f"config.json: {key} is {value!r}{nearest(str(value), known)}")
    return value


def _prefix(hf: Mapping[str, Any]) -> int:
    return whole(hf, "first_k_dense_replace", 0)


def _types(hf: Mapping[str, Any], layers: int) -> list[str]:
    """Without `layer_types` the dense layers and those behind them count by intervals of their own."""
    own, prefix = (positive_int(hf, "sliding_window_pattern", cohere2.DEFAULT_INTERVAL), min(_prefix(hf), layers))
    first = positive_int(hf, _PREFIX_PATTERN, 1)
    counted = [(i, first) for i in range(prefix)] + [(i, own) for i in range(layers - prefix)]
    return layer_types(hf, [WINDOW if (i + 1) % interval else FULL for i, interval in counted])


def _rope_layers(hf: Mapping[str, Any], layers: list[str], config: ModelConfig) -> tuple[RopeKind, ...]:
    forced = config.dense_layers if positive_int(hf, _PREFIX_PATTERN, 1) == 1 else ()
    return tuple("global" if i in forced else kind for i, kind in enumerate(nope_of_full_layers(layers)))


def to_hf(config: ModelConfig) -> dict[str, Any]:
    hf = cohere.to_hf(config) | {"mlp_layer_types": written_mlp_types(config)}
    if config.norm_type == "rms":
        hf["rms_norm_eps"] = config.rms_norm_eps
    if config.num_experts:
        multipliers = {factor: name for name, factor in _COMBINATIONS.items()}
        hf |= (
            dict.fromkeys(COUNT_KEYS, config.num_experts)
            | shared_expert_keys(config)
            | {
                "num_experts_per_tok": config.num_experts_per_tok,
                "intermediate_size": config.moe_intermediate_size,
                "prefix_dense_intermediate_size": config.intermediate_size,
                "expert_selection_fn": config.router_scores,
                "norm_topk_prob": config.norm_topk_prob,
                "shared_expert_combination_strategy": multipliers.get(config.mixture_multiplier, "average"),
            }
        )
    return hf | window_keys(config, AttentionPattern((FULL,) * config.num_hidden_layers))


def read_windows(hf: Mapping[str, Any], layers: int) -> Windows:
    context = hf.get("max_position_embeddings") or cohere.DEFAULT_CONTEXT
    return read_windows_by_type(hf.get("sliding_window", cohere2.DEFAULT_WINDOW), _types(hf, layers), context)


def window_keys(config: ModelConfig, pattern: AttentionPattern) -> dict[str, Any]:
    """Dense layers have any type where all of them are turned."""
    keys = window_keys_with_nope(config, pattern)
    turned = config.rope_layers or ("global",) * config.num_hidden_layers
    forced = all(turned[i] != "none" for i in config.dense_layers)
    if forced:
        free = dict(enumerate(pattern.layer_types))
        keys["layer_types"] = [
            free[i] if i in config.dense_layers else kind for i, kind in enumerate(keys["layer_types"])
        ]
    return keys | {_PREFIX_PATTERN: 1 if forced else 2}


FAMILY = Family(
    "cohere2_moe",
    "Cohere2MoeForCausalLM",
    from_hf,
    to_hf,
    read_windows,
    window_keys,
    peculiarity="rotary embeddings in these layers alone",
    mlps_by_peft=False,
)
