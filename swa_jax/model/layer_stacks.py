"""Which layers of a model are alike: those are stacked and scanned, and the keys of some lie in one cache."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

from swa_jax.model.config import GLOBAL_FIELDS, ROPE_KINDS, ModelConfig, RopeKind
from swa_jax.model.layer_types import FULL


class LayerStack(NamedTuple):
    """Layers that are alike but for the values of their weights."""

    name: str  # in the decoder's tree, as in "layers.NAME.mlp.up_proj"; "" where all layers are one stack
    layers: tuple[int, ...]  # their numbers
    group: int  # the number of their `HeadGroup`; of linear layers, which have none, 0
    config: ModelConfig  # a model of such layers alone, which are one stack there


class HeadGroup(NamedTuple):
    """Layers whose heads have one shape, so that their keys and values lie in one cache."""

    layers: tuple[int, ...]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int


@functools.lru_cache(maxsize=256)
def layer_stacks(config: ModelConfig) -> tuple[LayerStack, ...]:
    """The stacks of a model, in the order of their first layers."""
    mixed, sources, linear = len({*config.mlp_kinds}) > 1, config.kv_sources, config.linear_layers
    names = []
    for layer, rope in enumerate(config.rope_kinds_by_layer):
        words = ["global" if rope == "global" else "local"] * config.heads_differ
        words += ["linear"] if layer in linear else ["shared"] * (sources[layer] != layer)
        names.append("_".join(words + [config.mlp_kinds[layer]] * mixed) or "attending" * bool(linear))
    found = []
    for name in dict.fromkeys(names):
        layers = tuple(layer for layer, other in enumerate(names) if other == name)
        group = next((i for i, group in enumerate(head_groups(config)) if layers[0] in group.layers), 0)
        found.append(LayerStack(name, layers, group, _alone(config, layers)))
    return tuple(found) if len(found) > 1 else (found[0]._replace(name="", config=config),)


def are_alike(config: ModelConfig) -> bool:
    """Whether all layers compute the same of the residual stream alone, but for the values of their weights."""
    return len(layer_stacks(config)) == 1 and not config.hidden_size_per_layer_input


@functools.lru_cache(maxsize=256)
def head_groups(config: ModelConfig) -> tuple[HeadGroup, ...]:
    """The groups of a model, in the order of their first layers."""
    kinds = [rope == "global" and config.heads_differ for rope in config.rope_kinds_by_layer]
    found = []
    for kind in dict.fromkeys(kinds[layer] for layer in config.attention_layers):
        layers = tuple(layer for layer in config.attention_layers if kinds[layer] == kind)
        found.append(HeadGroup(layers, config.query_heads[layers[0]], *config.head_shapes[layers[0]]))
    return tuple(found)


def nope_of_full_layers(types: Sequence[str], ropes: Sequence[RopeKind] = ()) -> tuple[RopeKind, ...]:
    """`ModelConfig.rope_layers` of a model that rotates no full layer, the others as `ropes` says (all "global")."""
    every: tuple[RopeKind, ...] = ("global",)
    others = ropes or every * len(types)
    return tuple("none" if kind == FULL else rope for kind, rope in zip(types, others, strict=True))


def rope_groups(config: ModelConfig, nope: bool = False) -> dict[int, tuple[RopeKind, ...]]:
    """The rotary embeddings that occur, in the order of `ROPE_KINDS`, by the head_dim of the layers that have them.

    `nope`: a pattern may take them away from layers (`nope_full_layers`), whichever those are.
    """
    pairs = {*zip((size for _, size in config.head_shapes), config.rope_kinds_by_layer, strict=True)}
    if nope:
        pairs |= {(size, "none") for size, _ in pairs}
    sizes = sorted({size for size, _ in pairs})
    return {size: tuple(kind for kind in ROPE_KINDS if (size, kind) in pairs) for size in sizes}


def _alone(config: ModelConfig, layers: tuple[int, ...]) -> ModelConfig:
    """A model of some layers that are alike."""
    kv_heads, head_dim = config.head_shapes[layers[0]]
    is_linear = layers[0] in config.linear_layers
    reads_others = not is_linear and config.kv_sources[layers[0]] != layers[0]
    is_global = config.heads_differ and config.rope_kinds_by_layer[layers[0]] == "global"
    changes: dict = {
        "num_hidden_layers": len(layers),
        "num_attention_heads": config.query_heads[layers[0]],
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        **dict.fromkeys(GLOBAL_FIELDS),
        "rope_layers": config.rope_layers and tuple(config.rope_layers[layer] for layer in layers),
        "mlp_layer_types": (),
        "linear_layers": tuple(range(len(layers))) if is_linear else (),
        "attention_k_eq_v": config.attention_k_eq_v and config.rope_kinds_by_layer[layers[0]] == "global",
        "num_kv_shared_layers": len(layers) * reads_others,
    }
    if is_global and config.global_partial_rotary_factor is not None:
        changes["partial_rotary_factor"] = config.global_partial_rotary_factor
    if is_global and config.global_sink_logits is not None:
        changes["sink_logits"] = config.global_sink_logits
    if reads_others and config.use_double_wide_mlp:
        changes["intermediate_size"] = 2 * config.intermediate_size
    if config.mlp_kinds[layers[0]] == "dense":
        changes |= dict.fromkeys(("num_experts", "shared_expert_intermediate_size"), 0)
        changes |= dict.fromkeys(("expert_groups", "expert_groups_per_tok"), 1)
    return dataclasses.replace(config, **changes)
