"""Key/value caches: two pools, whole sequences and rings, indexed by layer and KV head.

A ring keeps the first `num_sink_tokens` positions and the last `window` others; the entry of a position is computed,
never stored. Entries a (layer, KV head): T_max whole, or min(window + num_sink_tokens, T_max).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from swa_jax.model.config import ModelConfig
from swa_jax.model.pattern import AttentionPattern


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Post-rotary keys and values. `lengths` [B] int32 counts the tokens of each sequence so far."""

    k_whole: jax.Array  # [whole heads, B, T_max, D]
    v_whole: jax.Array
    k_ring: jax.Array  # [ring heads, B, window + num_sink_tokens, D]
    v_ring: jax.Array
    lengths: jax.Array  # [B]

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, as held in memory."""
        return self.k_whole.nbytes + self.v_whole.nbytes + self.k_ring.nbytes + self.v_ring.nbytes


@dataclasses.dataclass(frozen=True)
class CacheLayout:
    """Where each (layer, KV head) lives."""

    whole: np.ndarray  # [L, K] bool: whole sequence (else ring)
    whole_slots: (
        np.ndarray
    )  # [L, K] int32: row of the whole pool; out of range (writes are dropped) if in a ring
    ring_slots: np.ndarray  # [L, K] int32: row of the ring pool; out of range if whole
    modes: tuple[
        tuple[str, str], ...
    ]  # the (place, layer type) pairs that occur; place: whole, ring or mixed
    mode: np.ndarray  # [L] int32: index into `modes`
    max_length: int  # T_max
    window: int
    num_sink_tokens: int

    @property
    def ring_entries(self) -> int:
        return min(self.window + self.num_sink_tokens, self.max_length)


def cache_layout(pattern: AttentionPattern, num_kv_heads: int, max_length: int) -> CacheLayout:
    window = pattern.sliding_window or max_length
    whole = pattern.full_cache_heads(num_kv_heads)
    if window + pattern.num_sink_tokens >= max_length:
        whole = np.ones_like(whole)  # a ring would never turn
    places = ["whole" if row.all() else "mixed" if row.any() else "ring" for row in whole]
    pairs = list(zip(places, pattern.layer_types, strict=True))
    modes = tuple(sorted(set(pairs)))
    mode = np.array([modes.index(pair) for pair in pairs], np.int32)
    return CacheLayout(
        whole, _slots(whole), _slots(~whole), modes, mode, max_length, window, pattern.num_sink_tokens
    )


def _slots(member: np.ndarray) -> np.ndarray:
    """Rows of a pool for its members [L, K] in order; the pool's size, which is out of range, for the others."""
    rank = np.cumsum(member.ravel()).reshape(member.shape)
    return np.where(member, rank - 1, member.sum()).astype(np.int32)


def allocate(layout: CacheLayout, batch: int, head_dim: int, dtype: jnp.dtype) -> KVCache:
    def pool(heads: int, entries: int) -> jax.Array:
        return jnp.zeros((heads, batch, entries, head_dim), dtype)

    whole, ring = int(layout.whole.sum()), int((~layout.whole).sum())
    return KVCache(
        pool(whole, layout.max_length),
        pool(whole, layout.max_length),
        pool(ring, layout.ring_entries),
        pool(ring, layout.ring_entries),
        jnp.zeros(batch, jnp.int32),
    )


def cache_bytes(
    config: ModelConfig, pattern: AttentionPattern, batch: int, max_length: int, itemsize: int
) -> int:
    """Bytes of the cache by the formula: sum over (layer, KV head) of B * entries * 2 * D * itemsize."""
    window = pattern.sliding_window or max_length
    ring = min(window + pattern.num_sink_tokens, max_length)
    entries = np.where(pattern.full_cache_heads(config.num_key_value_heads), max_length, ring)
    return int(entries.sum()) * batch * 2 * config.head_dim * itemsize


def ring_positions(layout: CacheLayout, lengths: jax.Array) -> jax.Array:
    """The position each ring entry holds once `lengths` [B] tokens are in, -1 where empty: [B, entries] int32."""
    sink, window = layout.num_sink_tokens, layout.window
    entry = jnp.arange(layout.ring_entries)[None]  # [1, R]
    last = lengths[:, None] - 1 - sink  # the newest position, counted from the first that is no sink token
    turning = last - (last - (entry - sink)) % window
    position = jnp.where(entry < sink, entry, turning + sink)
    empty = jnp.where(entry < sink, entry >= lengths[:, None], turning < 0)
    return jnp.where(empty, -1, position)


def ring_entry(layout: CacheLayout, position: jax.Array) -> jax.Array:
    """The entry that holds `position`."""
    sink = layout.num_sink_tokens
    return jnp.where(position < sink, position, sink + (position - sink) % layout.window)


def write_prompt(
    pool: jax.Array, slots: jax.Array, values: jax.Array, positions: jax.Array | None
) -> jax.Array:
    """Put a prompt's keys (or values) [B, T, K, D] into rows `slots` [K] of a pool; rows out of range are dropped.

    `positions` [B, R] says which token each ring entry takes (-1: none); None writes tokens 0..T-1 of a whole cache.
    """
    if pool.shape[0] == 0:
        return pool
    if positions is not None:
        index = jnp.maximum(positions, 0)[:, :, None, None]
        values = jnp.where(positions[:, :, None, None] >= 0, jnp.take_along_axis(values, index, axis=1), 0)
    rows = values.transpose(2, 0, 1, 3).astype(pool.dtype)  # [K, B, entries, D]
    return pool.at[slots, :, : rows.shape[2]].set(rows, mode="drop")


def write_chunk(
    pool: jax.Array, slots: jax.Array, values: jax.Array, row: jax.Array, first: jax.Array, source: jax.Array
) -> jax.Array:
    """Put a chunk's keys (or values) [C, K, D] of sequence `row` into rows `slots` [K] of a pool.

    `source` [N] says which of the chunk's tokens each of the N entries from `first` on takes; where there is no such
    token, the entry stays as it is. Rows out of range are dropped.
    """
    if pool.shape[0] == 0:
        return pool
    taken = (source >= 0) & (source < values.shape[0])
    values = values[jnp.clip(source, 0, values.shape[0] - 1)].astype(pool.dtype)  # [N, K, D]

    # Slices, not a scatter, for which XLA would lay the whole pool out in another order and back.
    def one(head: jax.Array, pool: jax.Array) -> jax.Array:
        start = (slots[head], row, first, 0)
        old = jax.lax.dynamic_slice(pool, start, (1, 1, source.shape[0], pool.shape[3]))
        here = (taken & (slots[head] < pool.shape[0]))[:, None]
        return jax.lax.dynamic_update_slice(pool, jnp.where(here, values[:, head], old), start)

    return jax.lax.fori_loop(0, slots.shape[0], one, pool)
