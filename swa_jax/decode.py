"""One new token a sequence through the attention of one layer, over the two cache pools."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import AttentionSpec, decode_attention
from swa_jax.attention import (
    NEVER,
    AttentionContext,
    LayerPlan,
    choose,
    full_spec,
    model_sigmoid_bias,
    model_slopes,
)
from swa_jax.cache import CacheLayout, KVCache, read
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
    slopes, bias = model_slopes(config), model_sigmoid_bias(config)

    def attend(
        q: jax.Array, k: jax.Array, v: jax.Array, spec: AttentionSpec, slopes: Any, **options: Any
    ) -> jax.Array:
        return decode_attention(
            q, k, v, spec, lengths=lengths, alibi_slopes=slopes, sigmoid_bias=bias,
            implementation=context.implementation, **options,
        )  # fmt: skip

    def over_whole(kind: str) -> jax.Array:
        k, v = read(cache.k_whole, place.whole_slots), read(cache.v_whole, place.whole_slots)
        if kind == FULL:
            return attend(q, k, v, full_spec(context.spec), slopes)
        options: dict[str, Any] = {"full_from": context.full_from}
        if kind == HYBRID:
            options["full_heads"] = plan.full_heads
        if kind == SWITCH:
            options["full_from"] = jnp.where(
                gate > 0.5, 0, NEVER if context.full_from is None else context.full_from
            )
        return attend(q, k, v, context.spec, slopes, **options)

    def over_ring() -> jax.Array:
        k, v = read(cache.k_ring, place.ring_slots), read(cache.v_ring, place.ring_slots)
        return attend(q, k, v, context.spec, slopes, kv_positions=ring)

    def by_head() -> jax.Array:
        """Full heads read the whole pool, windowed heads the ring; K steps of one KV head and its query heads."""
        batch, _, heads, size = q.shape
        kv_heads = place.whole.shape[0]
        grouped = q.reshape(batch, 1, kv_heads, heads // kv_heads, size).transpose(
            2, 0, 1, 3, 4
        )  # [K, B, 1, G, D]
        head_slopes = jnp.zeros((kv_heads, 0)) if slopes is None else slopes.reshape(kv_heads, -1)

        def head(one: tuple) -> jax.Array:
            q, whole, whole_slot, ring_slot, row = one
            row = None if slopes is None else row

            def full() -> jax.Array:
                k, v = read(cache.k_whole, whole_slot[None]), read(cache.v_whole, whole_slot[None])
                return attend(q, k, v, full_spec(context.spec), row)

            def window() -> jax.Array:
                k, v = read(cache.k_ring, ring_slot[None]), read(cache.v_ring, ring_slot[None])
                return attend(q, k, v, context.spec, row, kv_positions=ring)

            return jax.lax.cond(whole, full, window)

        mixed = jax.lax.map(head, (grouped, place.whole, place.whole_slots, place.ring_slots, head_slopes))
        return mixed.transpose(1, 2, 0, 3, 4).reshape(q.shape)

    def branch(where: str, kind: str) -> Any:
        return {"ring": over_ring, "mixed": by_head}.get(where, lambda: over_whole(kind))

    return choose(place.mode, [branch(where, kind) for where, kind in layout.modes])
