"""One new token a sequence through the attention of one layer, over the two cache pools."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.pools import Pools, attend_over_pools
from pallas_kernels.spec import NEVER, PerHead
from swa_jax.model.attention import AttentionContext, LayerPlan, choose, full_spec
from swa_jax.model.cache import CacheLayout, KVCache
from swa_jax.model.layer_types import FULL, HYBRID, SWITCH


class LayerPlace(NamedTuple):
    """Where each layer's keys lie, as data scanned with the layers."""

    mode: jax.Array  # [L]
    whole: jax.Array  # [L, K] bool
    whole_slots: jax.Array  # [L, K]
    ring_slots: jax.Array  # [L, K]


def layer_places(layout: CacheLayout) -> LayerPlace:
    return LayerPlace(*map(jnp.asarray, (layout.mode, layout.whole, layout.whole_slots, layout.ring_slots)))


def decode_layer(
    heads: PerHead,
    q: jax.Array,
    gate: jax.Array,
    cache: KVCache,
    layout: CacheLayout,
    place: LayerPlace,
    plan: LayerPlan,
    context: AttentionContext,
    lengths: jax.Array,
    ring: jax.Array,
) -> jax.Array:
    """q [B, 1, H, D] -> [B, 1, H, D], after the new key and value are in the cache.

    `heads`, `place` and `plan` are one layer's; `gate` [B] is 1 where a routed layer sees everything; `lengths` [B]
    count the new token; `ring` [B, entries] are the positions of the ring's entries. Only one branch runs.
    """
    attend = functools.partial(
        attend_over_pools,
        lengths=lengths,
        implementation=context.implementation,
    )
    whole = Pools(cache.k_whole, cache.v_whole, place.whole_slots)
    rings = Pools(cache.k_ring, cache.v_ring, place.ring_slots, ring)

    def over_whole(kind: str) -> jax.Array:
        if kind == FULL:
            return attend(q, whole, full_spec(context.spec), heads)
        full_from = context.full_from
        full_heads = plan.full_heads if kind == HYBRID else None
        if kind == SWITCH:
            full_from = jnp.where(gate > 0.5, 0, NEVER if full_from is None else full_from)
        return attend(q, whole, context.spec, heads._replace(full_heads=full_heads), full_from=full_from)

    def over_rings() -> jax.Array:
        return attend(q, rings, context.spec, heads)

    def by_head() -> jax.Array:
        """Full heads read the whole pool, windowed heads the rings."""
        return attend(q, whole, full_spec(context.spec), heads, others=(rings, context.spec))

    def branch(where: str, kind: str) -> Any:
        return {"ring": over_rings, "mixed": by_head}.get(where, lambda: over_whole(kind))

    return choose(place.mode, [branch(where, kind) for where, kind in layout.modes])
