"""One new token a sequence through the attention of one layer, over the two cache pools."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import AttentionSpec, decode_attention
from pallas_kernels.api import Implementation
from pallas_kernels.blocks import on_tpu
from pallas_kernels.decode import decode_pool
from pallas_kernels.spec import coordinates
from swa_jax.attention import (
    NEVER,
    AttentionContext,
    LayerPlan,
    choose,
    full_spec,
    model_sigmoid_bias,
    model_slopes,
)
from swa_jax.cache import CacheLayout, KVCache
from swa_jax.config import ModelConfig
from swa_jax.pattern import FULL, HYBRID, SWITCH


class LayerPlace(NamedTuple):
    """Where each layer's keys lie, as data scanned with the layers."""

    mode: jax.Array  # [L]
    whole: jax.Array  # [L, K] bool
    whole_slots: jax.Array  # [L, K]
    ring_slots: jax.Array  # [L, K]


def layer_places(layout: CacheLayout) -> LayerPlace:
    return LayerPlace(*map(jnp.asarray, (layout.mode, layout.whole, layout.whole_slots, layout.ring_slots)))


def decode_layer(
    config: ModelConfig,
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

    `place` and `plan` are one layer's rows; `gate` [B] is 1 where a routed layer sees everything; `lengths` [B] count
    the new token; `ring` [B, entries] are the positions of the ring's entries. Only one branch runs.
    """
    attend = functools.partial(
        attend_over_pools,
        lengths=lengths,
        alibi_slopes=model_slopes(config),
        sigmoid_bias=model_sigmoid_bias(config),
        implementation=context.implementation,
    )
    whole = Pools(cache.k_whole, cache.v_whole, place.whole_slots)
    rings = Pools(cache.k_ring, cache.v_ring, place.ring_slots, ring)

    def over_whole(kind: str) -> jax.Array:
        if kind == FULL:
            return attend(q, whole, full_spec(context.spec))
        full_from, full_heads = context.full_from, None
        if kind == HYBRID:
            full_heads = plan.full_heads
        if kind == SWITCH:
            full_from = jnp.where(gate > 0.5, 0, NEVER if full_from is None else full_from)
        return attend(q, whole, context.spec, full_from=full_from, full_heads=full_heads)

    def over_rings() -> jax.Array:
        return attend(q, rings, context.spec)

    def by_head() -> jax.Array:
        """Full heads read the whole pool, windowed heads the rings."""
        return attend(q, whole, full_spec(context.spec), others=(rings, context.spec))

    def branch(where: str, kind: str) -> Any:
        return {"ring": over_rings, "mixed": by_head}.get(where, lambda: over_whole(kind))

    return choose(place.mode, [branch(where, kind) for where, kind in layout.modes])


class Pools(NamedTuple):
    """Caches [rows, B, entries, D], the row of each KV head [K], and the positions [B, entries] if not the indices."""

    k: jax.Array
    v: jax.Array
    slots: jax.Array
    positions: jax.Array | None = None


def attend_over_pools(
    q: jax.Array,
    pools: Pools,
    spec: AttentionSpec,
    *,
    others: tuple[Pools, AttentionSpec] | None = None,
    lengths: jax.Array,
    alibi_slopes: jax.Array | None = None,
    sigmoid_bias: float | None = None,
    full_from: jax.Array | None = None,
    full_heads: jax.Array | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """`decode_attention` of q [B, T, H, D] over caches that stay where they are.

    Args:
      others: what the heads read whose slots are out of range in `pools`; without it every slot is in range, and those
        of the heads follow each other.
    """
    batch, length, heads, size = q.shape
    if implementation == "tpu" or (implementation is None and on_tpu()):
        bias = None if sigmoid_bias is None else jnp.full(heads, sigmoid_bias)

        def over(pools: Pools, spec: AttentionSpec) -> jax.Array:
            where = coordinates(
                length,
                pools.k.shape[2],
                q_positions=lengths[:, None] - length + jnp.arange(length),
                kv_positions=pools.positions,
                full_from=full_from,
            )
            return decode_pool(
                q, *pools[:3], spec, where, alibi_slopes=alibi_slopes, sigmoid_bias=bias, full_heads=full_heads,
                scattered=others is not None,
            )  # fmt: skip

        out = over(pools, spec)
        return out if others is None else out + over(*others)

    # One KV head after another: its row of a pool is a cache as it stands, where several would have to be transposed.
    def head(
        slots: list[jax.Array], q: jax.Array, slopes: jax.Array | None, full: jax.Array | None
    ) -> jax.Array:
        first_full = full_from
        if full is not None:
            first_full = jnp.where(full, 0, NEVER if full_from is None else full_from)
            first_full = jnp.broadcast_to(first_full, lengths.shape)

        def over(pools: Pools, spec: AttentionSpec, slot: jax.Array) -> jax.Array:
            k, v = (jax.lax.dynamic_index_in_dim(pool, slot, keepdims=False) for pool in (pools.k, pools.v))
            return decode_attention(
                q, k[:, :, None], v[:, :, None], spec, lengths=lengths, kv_positions=pools.positions,
                alibi_slopes=slopes, sigmoid_bias=sigmoid_bias, full_from=first_full, implementation=implementation,
            )  # fmt: skip

        first = functools.partial(over, pools, spec, slots[0])
        if others is None:
            return first()
        return jax.lax.cond(slots[0] < pools.k.shape[0], first, functools.partial(over, *others, slots[1]))

    kv_heads = pools.slots.shape[0]
    group = heads // kv_heads
    by_head = q.reshape(batch, length, kv_heads, group, size).transpose(2, 0, 1, 3, 4)  # [K, B, T, G, D]
    slopes = None if alibi_slopes is None else alibi_slopes.reshape(kv_heads, group)
    slots = [pools.slots] if others is None else [pools.slots, others[0].slots]
    out = jax.lax.map(lambda one: head(*one), (slots, by_head, slopes, full_heads))
    return out.transpose(1, 2, 0, 3, 4).reshape(q.shape)
