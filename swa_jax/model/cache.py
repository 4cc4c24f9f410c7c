"""Key/value caches: two pools, whole sequences and rings, indexed by layer and KV head.

A ring keeps the first `num_sink_tokens` positions and the last `window` others; the entry of a position is computed,
never stored. Entries a (layer, KV head): T_max whole, or min(window + num_sink_tokens, T_max). A layer that reads the
keys of another has no entries. Layers whose KV heads have another shape (`head_groups`) have two pools of their own.
Linear layers have no keys: of all tokens together they keep a `LinearState`.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from swa_jax.model.config import ModelConfig
from swa_jax.model.gated_delta import LinearState, empty_state
from swa_jax.model.layer_stacks import HeadGroup, head_groups
from swa_jax.model.pattern import AttentionPattern
from swa_jax.model.sharding import Partition, constrain

POOL = ("kv_heads", "batch", None, None)  # the dimensions of a pool


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CachePools:
    """Post-rotary keys and values of the layers of one `HeadGroup`."""

    k_whole: jax.Array  # [whole heads, B, T_max, D]
    v_whole: jax.Array
    k_ring: jax.Array  # [ring heads, B, window + num_sink_tokens, D]
    v_ring: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """The keys and values of a model: pools for each of its `head_groups`, and how many tokens they hold."""

    pools: tuple[CachePools, ...]
    lengths: jax.Array  # [B] int32: the tokens of each sequence so far
    states: LinearState | None = None  # of the linear layers, [layers, B, ...]; None where there are none

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and states, as held in memory."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves((self.pools, self.states)))


@dataclasses.dataclass(frozen=True)
class CacheLayout:
    """Where each (layer, KV head) of one `HeadGroup` lives; rows of other layers mean nothing."""

    head_dim: int
    whole: np.ndarray  # [L, K] bool: whole sequence (else ring)
    # [L, K] int32: its row in the whole pool, counted in the shard of its KV head; out of range (writes are dropped)
    # if in a ring. And the same of the ring pool. A layer that reads another's keys has that one's rows.
    whole_slots: np.ndarray
    ring_slots: np.ndarray
    whole_rows: int  # of the pools, in each shard
    ring_rows: int
    shards: int  # that the KV heads, and with them the rows of the pools, are split into
    modes: tuple[tuple[str, str], ...]  # the (place, layer type) pairs that occur; place: whole, ring or mixed
    mode: np.ndarray  # [L] int32: index into `modes`
    max_length: int  # T_max
    window: int
    num_sink_tokens: int
    source: int | None = None  # the layer whose keys others read

    @property
    def ring_entries(self) -> int:
        return min(self.window + self.num_sink_tokens, self.max_length)


def cache_layouts(
    config: ModelConfig, pattern: AttentionPattern, max_length: int, shards: int = 1
) -> tuple[CacheLayout, ...]:
    """For each of the model's `head_groups`, where the keys of its layers go, if each cache holds `max_length` tokens.

    `shards` of consecutive KV heads have pools of their own, all of one size, which lie behind each other.
    """
    window = pattern.sliding_window or max_length
    whole = kept_whole(config, pattern)
    if window + pattern.num_sink_tokens >= max_length:
        whole = np.ones_like(whole)  # no entry of a ring would be written twice
    return tuple(
        _layout(config, group, pattern, whole[:, : group.num_key_value_heads], max_length, window, shards)
        for group in head_groups(config)
    )


def _layout(
    config: ModelConfig,
    group: HeadGroup,
    pattern: AttentionPattern,
    whole: np.ndarray,
    max_length: int,
    window: int,
    shards: int,
) -> CacheLayout:
    places = ["whole" if row.all() else "mixed" if row.any() else "ring" for row in whole]
    pairs = list(zip(places, pattern.layer_types, strict=True))
    modes = tuple(sorted({pairs[layer] for layer in group.layers}))
    mode = np.array([modes.index(pair) if pair in modes else 0 for pair in pairs], np.int32)
    sources = np.array(config.kv_sources)
    owns = np.isin(np.arange(len(sources)), group.layers) & (sources == np.arange(len(sources)))  # [L]
    (whole_slots, whole_rows), (ring_slots, ring_rows) = (
        _slots(member & owns[:, None], shards) for member in (whole, ~whole)
    )
    read = (config.kv_sources[layer] for layer in group.layers if config.kv_sources[layer] != layer)
    slots = whole_slots[sources], ring_slots[sources], whole_rows, ring_rows, shards
    sinks = pattern.num_sink_tokens
    return CacheLayout(group.head_dim, whole, *slots, modes, mode, max_length, window, sinks, next(read, None))


def kept_whole(config: ModelConfig, pattern: AttentionPattern) -> np.ndarray:
    """Which (layer, KV head) has the whole sequence in its cache: bool [L, K], K being the most that a layer has.

    What several layers read is whole unless all of them need the same of it; each of them has the row of its source.
    """
    needed = pattern.full_cache_heads(config.most_kv_heads)
    sources = np.array(config.kv_sources)
    for source in {*config.kv_sources}:
        readers = needed[sources == source]
        needed[sources == source] = readers[0] if (readers == readers[0]).all() else True
    return needed


def _slots(member: np.ndarray, shards: int) -> tuple[np.ndarray, int]:
    """Rows of a pool for its members [L, K] in order, in each shard of K, and how many rows a shard has; the others get
    a row that is not there."""
    layers, kv_heads = member.shape
    by_shard = member.reshape(layers, shards, -1).transpose(1, 0, 2)  # [shards, L, K / shards]
    rank = np.cumsum(by_shard.reshape(shards, -1), axis=1).reshape(by_shard.shape)
    rows = int(rank[:, -1, -1].max())
    slots = np.where(by_shard, rank - 1, rows).astype(np.int32)
    return slots.transpose(1, 0, 2).reshape(layers, kv_heads), rows


def allocate(
    config: ModelConfig,
    layouts: tuple[CacheLayout, ...],
    batch: int,
    dtype: jax.typing.DTypeLike,
    partition: Partition | None = None,
) -> KVCache:
    """Empty caches of `batch` sequences, on a mesh split by KV heads and by sequences."""

    def pool(layout: CacheLayout, rows: int, entries: int) -> jax.Array:
        zeros = jnp.zeros((layout.shards * rows, batch, entries, layout.head_dim), dtype)
        return constrain(zeros, partition, *POOL)

    def pools(layout: CacheLayout) -> CachePools:
        whole, ring = (layout.whole_rows, layout.max_length), (layout.ring_rows, layout.ring_entries)
        return CachePools(*(pool(layout, *shape) for shape in (whole, whole, ring, ring)))

    def of_all(x: jax.Array) -> jax.Array:
        return constrain(jnp.stack([x] * len(config.linear_layers)), partition, None, "batch", *[None] * (x.ndim - 1))

    states = jax.tree.map(of_all, empty_state(config, batch, dtype)) if config.linear_layers else None
    return KVCache(tuple(map(pools, layouts)), constrain(jnp.zeros(batch, jnp.int32), partition, "batch"), states)


def cache_bytes(config: ModelConfig, pattern: AttentionPattern, batch: int, max_length: int, itemsize: int) -> int:
    """Bytes of the cache by the formula: sum over (layer, KV head) of B * entries * 2 * D * itemsize; and the states of
    linear layers."""
    window = pattern.sliding_window or max_length
    ring = min(window + pattern.num_sink_tokens, max_length)
    numbers = 0
    for layer, whole in enumerate(kept_whole(config, pattern)):
        kv_heads, head_dim = config.head_shapes[layer]
        if config.kv_sources[layer] == layer:  # a cache of its own
            numbers += int(np.where(whole[:kv_heads], max_length, ring).sum()) * head_dim
    state = jax.eval_shape(lambda: empty_state(config, 1, jnp.bfloat16))
    states = len(config.linear_layers) * (state.heads.size * 4 + state.inputs.size * itemsize)
    return batch * (numbers * 2 * itemsize + states)


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


def write_prompt(pool: jax.Array, slots: jax.Array, values: jax.Array, positions: jax.Array | None) -> jax.Array:
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
