"""The keys of `config.json` that describe experts, as several families spell them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from swa_jax.base.errors import ConfigError
from swa_jax.checkpoint.families.grammar import HfConfig, HfKeys, layers_of, whole
from swa_jax.model.config import ModelConfig

# transformers 5 writes the second name for what most checkpoints call by the first; Mixtral and gpt-oss always have it.
COUNT_KEYS = ("num_experts", "num_local_experts")


def without(hf: HfConfig) -> HfKeys:
    """The keys that a dense model has too."""
    return {key: value for key, value in hf.items() if key not in COUNT_KEYS}


def read(
    hf: HfConfig, *, count: int, per_token: int, width: tuple[str, int], normalized: bool = True
) -> dict[str, Any]:
    """Fields of `ModelConfig`; `count`, `per_token`, `width` (with the name of its key) and `normalized` are what the
    family assumes where a key is absent.

    Raises `ConfigError` for a value of the wrong type, naming the key.
    """
    count_key = next((key for key in COUNT_KEYS if hf.get(key) is not None), COUNT_KEYS[0])
    return {
        "num_experts": whole(hf, count_key, count),
        "num_experts_per_tok": whole(hf, "num_experts_per_tok", per_token),
        "moe_intermediate_size": whole(hf, *width),
        "norm_topk_prob": bool(hf.get("norm_topk_prob", normalized)),
    }


def sigmoid_routing(hf: HfConfig, factor_key: str, factor: float) -> dict[str, Any]:
    """Fields of a router whose scores are sigmoids, with a bias for the choice and, where the key says so, a factor."""
    value = factor if hf.get(factor_key) is None else hf[factor_key]
    return {"router_scores": "sigmoid", "router_choice_bias": True, "expert_multiplier": float(value)}


def shared(hf: HfConfig, by_default: int, width: int) -> dict[str, int]:
    """`num_shared_experts` of one width each are one expert, as wide as all of them together."""
    return {"shared_expert_intermediate_size": whole(hf, "num_shared_experts", by_default) * width}


def shared_keys(config: ModelConfig) -> dict[str, int]:
    return {"num_shared_experts": config.shared_expert_intermediate_size // config.moe_intermediate_size}


def groups(hf: HfConfig) -> dict[str, int]:
    return {"expert_groups": whole(hf, "n_group", 1), "expert_groups_per_tok": whole(hf, "topk_group", 1)}


def group_keys(config: ModelConfig) -> dict[str, int]:
    return {"n_group": config.expert_groups, "topk_group": config.expert_groups_per_tok}


def mlp_types(hf: HfConfig, dense: int = 0) -> list[str]:
    """The key `mlp_layer_types`, or else experts in all layers but the first `dense`."""
    types, layers = hf.get("mlp_layer_types"), layers_of(hf)
    if types is None:
        return ["dense" if i < dense else "sparse" for i in range(layers)]
    if not isinstance(types, list):
        raise ConfigError(f"config.json: mlp_layer_types must be a list with one type a layer, got {types!r}")
    if layers and len(types) != layers:
        raise ConfigError(f"config.json: mlp_layer_types has {len(types)} entries for {layers} layers")
    return types


def with_mlp_types(fields: Mapping[str, Any], types: Sequence[str]) -> dict[str, Any]:
    """The fields with "dense" or "sparse" for each layer; a model whose layers are all dense has no experts."""
    if fields["num_experts"] == 0 or all(kind == "dense" for kind in types):
        return {}
    return {**fields, "mlp_layer_types": list(types)}


def keys(config: ModelConfig) -> HfKeys:
    """The keys of families that have no dense MLPs beside their experts."""
    return {
        "num_local_experts": config.num_experts,
        "num_experts_per_tok": config.num_experts_per_tok,
        "intermediate_size": config.moe_intermediate_size,
    }


def keys_beside_dense(config: ModelConfig) -> HfKeys:
    """The keys of families that do, with both names of the number of experts."""
    return {
        **dict.fromkeys(COUNT_KEYS, config.num_experts),
        "num_experts_per_tok": config.num_experts_per_tok,
        "moe_intermediate_size": config.moe_intermediate_size,
        "norm_topk_prob": config.norm_topk_prob,
    }
