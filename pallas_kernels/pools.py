"""Decode attention over cache pools that stay where they are, on every device."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import AttentionSpec, xla
from pallas_kernels.blocks import on_tpu
from pallas_kernels.dispatch import Implementation, choose, current_device
from pallas_kernels.math import reference
from pallas_kernels.math.parts import scale_queries
from pallas_kernels.math.spec import NEVER, Coordinates, PerHead, Pools, coordinates
from pallas_kernels.request import Request
from pallas_kernels.tpu.decode.cache_write import write_pool
from pallas_kernels.tpu.decode.decode import Visited, decode_pool, pool_visits


def attend_over_pools(
    q: jax.Array,
    pools: Pools,
    spec: AttentionSpec,
    per_head: PerHead,
    *,
    others: tuple[Pools, AttentionSpec] | None = None,
    lengths: jax.Array,
    full_from: jax.Array | None = None,
    visited: tuple[Visited, ...] | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """`decode_attention` of q [B, T, H, D] over caches that stay where they are.

    Args:
      per_head: options as arrays, the bias too.
      others: what the heads read whose slots are out of range in `pools`; without it every slot is in range, and those
        of the heads follow each other.
      visited: what `pools_visited` returns for the call; None has it made here.
    """
    length, reads = q.shape[1], _reads(pools, spec, others)
    chosen = _chosen(q, pools, spec, implementation)
    if chosen == "triton":
        from pallas_kernels import gpu  # late, for JAX may have dropped its lowering

        q, per_head = scale_queries(q, per_head)
        return gpu.decode_pools(q, reads, per_head, lengths=lengths, full_from=full_from).astype(q.dtype)
    if chosen == "tpu":
        q, per_head = scale_queries(q, per_head)
        outs = [
            decode_pool(
                q,
                *one[:3],
                its_spec,
                _places(length, one, lengths, full_from),
                per_head,
                scattered=others is not None,
                visited=made,
            )
            for (one, its_spec), made in zip(reads, visited or (None,) * len(reads), strict=True)
        ]
        return functools.reduce(jnp.add, outs)

    if chosen == "reference":
        return _head_by_head(q, reads, per_head, lengths, full_from, reference.decode_attention).astype(q.dtype)
    q, per_head = scale_queries(q, per_head)

    def attend(marked: bool) -> jax.Array:
        one = functools.partial(xla.at_once, marked=marked)
        return _head_by_head(q, reads, per_head, lengths, full_from, one)

    return xla.again_with_marks(attend).astype(q.dtype)


def _head_by_head(q, reads, per_head: PerHead, lengths, full_from, attend) -> jax.Array:
    """One KV head after another: its row of a pool is a cache as it stands, where several would have to be transposed.

    `attend`: what a backend's `decode_attention` is, of one head.
    """

    def head(slots: list[jax.Array], q: jax.Array, options: PerHead) -> jax.Array:
        first_full = full_from
        if options.full_heads is not None:
            first_full = jnp.where(options.full_heads, 0, NEVER if full_from is None else full_from)
            first_full = jnp.broadcast_to(first_full, lengths.shape)
        options = options._replace(full_heads=None)

        def over(read: tuple[Pools, AttentionSpec], slot: jax.Array) -> jax.Array:
            pools, spec = read
            k, v = (jax.lax.dynamic_index_in_dim(pool, slot, keepdims=False)[:, :, None] for pool in pools[:2])
            return attend(q, k, v, spec, _places(q.shape[1], pools, lengths, first_full), options)

        first, *others = (functools.partial(over, *one) for one in zip(reads, slots, strict=True))
        return jax.lax.cond(slots[0] < reads[0][0].k.shape[0], first, others[0]) if others else first()

    batch, length, heads, size = q.shape
    slots = [pools.slots for pools, _ in reads]
    kv_heads = slots[0].shape[0]
    group = heads // kv_heads
    by_head = q.reshape(batch, length, kv_heads, group, size).transpose(2, 0, 1, 3, 4)  # [K, B, T, G, D]
    options = jax.tree.map(lambda x: x.reshape(kv_heads, group), per_head._replace(full_heads=None))
    out = jax.lax.map(lambda one: head(*one), (slots, by_head, options._replace(full_heads=per_head.full_heads)))
    return out.transpose(1, 2, 0, 3, 4).reshape(q.shape)


def pools_visited(
    q: jax.Array | jax.ShapeDtypeStruct,
    pools: Pools,
    spec: AttentionSpec,
    *,
    others: tuple[Pools, AttentionSpec] | None = None,
    lengths: jax.Array,
    full_from: jax.Array | None = None,
    some_full_heads: bool = False,
    implementation: Implementation | None = None,
) -> tuple[Visited, ...] | None:
    """What the launches of `attend_over_pools` on a TPU visit, for many calls alike; None elsewhere.

    Of q and the pools the shapes are read, of the slots how many they are. `some_full_heads` says that the call is
    given `full_heads`.
    """
    if _chosen(q, pools, spec, implementation) != "tpu":
        return None
    return tuple(
        pool_visits(
            one.k,
            one.slots.shape[0],
            its_spec,
            _places(q.shape[1], one, lengths, full_from),
            some_full_heads=some_full_heads,
            scattered=others is not None,
        )
        for one, its_spec in _reads(pools, spec, others)
    )


def _reads(
    pools: Pools, spec: AttentionSpec, others: tuple[Pools, AttentionSpec] | None
) -> tuple[tuple[Pools, AttentionSpec], ...]:
    return ((pools, spec),) if others is None else ((pools, spec), others)


def _places(length: int, pools: Pools, lengths: jax.Array, full_from: jax.Array | None) -> Coordinates:
    return coordinates(
        length,
        pools.k.shape[2],
        q_positions=lengths[:, None] - length + jnp.arange(length),
        kv_positions=pools.positions,
        full_from=full_from,
    )


def heads_in_one_launch(q: jax.Array, pools: Pools, spec: AttentionSpec, implementation: Implementation | None) -> bool:
    """Whether a launch is for all KV heads, wherever their keys are, as on a GPU; what a head does not see is free."""
    return _chosen(q, pools, spec, implementation) == "triton"


def _chosen(
    q: jax.Array | jax.ShapeDtypeStruct, pools: Pools, spec: AttentionSpec, implementation: Implementation | None
) -> str:
    batch, length, heads, size = q.shape
    request = Request(
        "decode_attention",
        *(spec, batch, length, pools.k.shape[2], heads, pools.slots.shape[0], size, q.dtype.name),
        device=current_device(implementation),
        given=frozenset({"pools"}),
        implementation=implementation,
    )
    return choose(request)[0]


def write_token(pool: jax.Array, slots: jax.Array, values: jax.Array, entries: jax.Array) -> jax.Array:
    """Put one token's keys (or values) [B, 1, K, D] at `entries` [B] of rows `slots` [K]; as above, may be dropped."""
    if pool.shape[0] == 0:
        return pool
    if on_tpu():
        return write_pool(pool, slots, values[:, 0], entries)
    batch = jnp.arange(values.shape[0])
    rows = values[:, 0].transpose(1, 0, 2).astype(pool.dtype)  # [K, B, D]
    return pool.at[slots[:, None], batch[None], entries[None]].set(rows, mode="drop")
