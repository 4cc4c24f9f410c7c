"""Cohere 2 with experts: dense layers first, which are all rotated where `prefix_dense_sliding_window_pattern` is 1."""

from __future__ import annotations

import dataclasses
from typing import Any

from swa_jax.base.errors import ConfigError
from swa_jax.base.settings import nearest
from swa_jax.checkpoint.families import cohere, cohere2, experts
from swa_jax.checkpoint.families.common import Family, HfConfig, HfKeys
from swa_jax.checkpoint.families.grammar import whole
from swa_jax.checkpoint.families.windows import layer_types, window_keys_with_nope, windows_of
from swa_jax.model.config import ModelConfig, RopeKind
from swa_jax.model.layer_stacks import nope_of_full_layers
from swa_jax.model.layer_types import FULL, WINDOW
from swa_jax.model.pattern import AttentionPattern

DEFAULTS = cohere.DEFAULTS | {"head_dim": 128}
_PREFIX_PATTERN = "prefix_dense_sliding_window_pattern"
_COMBINATIONS = {"average": 0.5, "sum": 1.0}  # of what the chosen experts and the shared one give


def from_hf(hf: HfConfig) -> ModelConfig:
    """`intermediate_size` is the width of an expert, and of a dense MLP without `prefix_dense_intermediate_size`."""
    types = experts.mlp_types(hf, _prefix(hf))
    dense = dict(hf)
    if hf.get("prefix_dense_intermediate_size") is not None:
        dense["intermediate_size"] = hf["prefix_dense_intermediate_size"]
    by_rms = hf.get("rms_norm_eps")
    config = cohere.read_cohere(experts.without(dense), DEFAULTS, **experts.with_mlp_types(_experts(hf), types))
    if by_rms is not None:
        config = dataclasses.replace(config, norm_type="rms", rms_norm_eps=by_rms)
    layers = _types(hf, config.num_hidden_layers)
    cohere2.check_window(hf, layers)
    return dataclasses.replace(config, rope_layers=_rope_layers(hf, layers, config))


def _experts(hf: HfConfig) -> dict[str, Any]:
    fields = experts.read(hf, count=8, per_token=2, width=("intermediate_size", 22528))
    fields |= experts.shared(hf, 0, fields["moe_intermediate_size"])
    scores = _one_of(hf, "expert_selection_fn", ("softmax", "sigmoid"))
    mean = _COMBINATIONS[_one_of(hf, "shared_expert_combination_strategy", tuple(_COMBINATIONS))]
    if not fields["shared_expert_intermediate_size"]:
        mean = 1.0
    normalized = fields["norm_topk_prob"] or scores == "softmax"
    return fields | {"router_scores": scores, "mixture_multiplier": mean, "norm_topk_prob": normalized}


def _one_of(hf: HfConfig, key: str, known: tuple[str, ...]) -> str:
    """The first is what an absent key means."""
    value = known[0] if hf.get(key) is None else hf[key]
    if value not in known:
        raise ConfigError(f"config.json: {key} is {value!r}{nearest(str(value), known)}")
    return value


def _prefix(hf: HfConfig) -> int:
    return whole(hf, "first_k_dense_replace", 0)


def _types(hf: HfConfig, layers: int) -> list[str]:
    """Without `layer_types` the dense layers and those behind them count by intervals of their own."""
    own, prefix = (whole(hf, "sliding_window_pattern", cohere2.DEFAULT_INTERVAL, least=1), min(_prefix(hf), layers))
    first = whole(hf, _PREFIX_PATTERN, 1, least=1)
    counted = [(i, first) for i in range(prefix)] + [(i, own) for i in range(layers - prefix)]
    return layer_types(hf, [WINDOW if (i + 1) % interval else FULL for i, interval in counted])


def _rope_layers(hf: HfConfig, layers: list[str], config: ModelConfig) -> tuple[RopeKind, ...]:
    forced = config.dense_layers if whole(hf, _PREFIX_PATTERN, 1, least=1) == 1 else ()
    return tuple("global" if i in forced else kind for i, kind in enumerate(nope_of_full_layers(layers)))


def to_hf(config: ModelConfig) -> HfKeys:
    hf = cohere.to_hf(config) | {"mlp_layer_types": list(config.mlp_kinds)}
    if config.norm_type == "rms":
        hf["rms_norm_eps"] = config.rms_norm_eps
    if config.num_experts:
        multipliers = {factor: name for name, factor in _COMBINATIONS.items()}
        hf |= (
            experts.keys(config)
            | experts.shared_keys(config)
            | {
                "num_experts": config.num_experts,
                "norm_topk_prob": config.norm_topk_prob,
                "prefix_dense_intermediate_size": config.intermediate_size,
                "expert_selection_fn": config.router_scores,
                "shared_expert_combination_strategy": multipliers.get(config.mixture_multiplier, "average"),
            }
        )
    return hf


def window_keys(config: ModelConfig, pattern: AttentionPattern) -> HfKeys:
    """Dense layers have any type where all of them are rotated."""
    keys = window_keys_with_nope(config, pattern)
    forced = all(config.rope_kinds_by_layer[i] != "none" for i in config.dense_layers)
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
    windows_of(_types, cohere2.DEFAULT_WINDOW, cohere.DEFAULT_CONTEXT),
    window_keys,
    peculiarity="rotary embeddings in these layers alone",
    mlps_by_peft=False,
)
