"""The keys of `config.json` that describe experts, as several families spell them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from swa_jax.errors import ConfigError
from swa_jax.model.config import ModelConfig

# transformers 5 writes the second name for what most checkpoints call by the first; Mixtral and gpt-oss always have it.
COUNT_KEYS = ("num_experts", "num_local_experts")


def without_experts(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that a dense model has too."""
    return {key: value for key, value in hf.items() if key not in COUNT_KEYS}


def read_experts(
    hf: Mapping[str, Any], *, count: int, per_token: int, width: tuple[str, int], normalized: bool
) -> dict[str, Any]:
    """Fields of `ModelConfig`; `count`, `per_token`, `width` (with the name of its key) and `normalized` are what the
    family assumes where a key is absent.

    Raises `ConfigError` for a value of the wrong type, naming the key.
    """
    count_key = next((key for key in COUNT_KEYS if hf.get(key) is not None), COUNT_KEYS[0])
    fields = {}
    for key, field, default in (
        (count_key, "num_experts", count),
        ("num_experts_per_tok", "num_experts_per_tok", per_token),
        (width[0], "moe_intermediate_size", width[1]),
    ):
        fields[field] = value = default if hf.get(key) is None else hf[key]
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ConfigError(f"config.json: {key} must be a whole number, got {value!r}")
    return fields | {"norm_topk_prob": bool(hf.get("norm_topk_prob", normalized))}


def with_mlp_types(fields: Mapping[str, Any], types: Sequence[str]) -> dict[str, Any]:
    """The fields with "dense" or "sparse" for each layer; a model whose layers are all dense has no experts."""
    if fields["num_experts"] == 0 or all(kind == "dense" for kind in types):
        return {}
    return {**fields, "mlp_layer_types": list(types)}


def expert_keys(config: ModelConfig) -> dict[str, Any]:
    """The keys of families that have no dense MLPs beside their experts."""
    return {
        "num_local_experts": config.num_experts,
        "num_experts_per_tok": config.num_experts_per_tok,
        "intermediate_size": config.moe_intermediate_size,
    }


def expert_keys_beside_dense(config: ModelConfig) -> dict[str, Any]:
    """The keys of families that do, with both names of the number of experts."""
    return {
        **dict.fromkeys(COUNT_KEYS, config.num_experts),
        "num_experts_per_tok": config.num_experts_per_tok,
        "moe_intermediate_size": config.moe_intermediate_size,
        "norm_topk_prob": config.norm_topk_prob,
    }
