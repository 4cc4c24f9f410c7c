"""Decoding on GPUs: kernels whose queries are one block of rows, and whose keys are shared out (flash decoding).

* decode: over caches [B, S, K, D] whose entries hold any positions; what is visited comes from a table.
* pool_decode: over the pools of a model's cache, where they lie. Each head says which pool has its keys and in which
  row, so that one launch serves whole sequences and rings side by side; what is visited follows from the length.

A program is for a KV head, a row of the batch and a share of the visits. Whoever calls merges the shares.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.gpu import triton
from pallas_kernels.gpu.operands import GpuStatic, Operands, Side, Tile
from pallas_kernels.gpu.triton import GpuProgram, channels, normalise
from pallas_kernels.math.spec import AttentionSpec, PerHead, Pools


class PoolOperands(NamedTuple):
    """The arguments of `pool_decode`, or their block specs, or references to them."""

    q: jax.Array  # [B, rows, K, D]: row t * G + g is query head g of the group at token t
    pools: tuple[Pools, ...]  # of the slots of a head one at most is in range
    heads: PerHead  # slopes and bias [K * rows] float32, full_heads [K] int32
    lengths: jax.Array  # [B] int32, with the new tokens
    full_from: jax.Array | None  # [B] int32


def decode(static: GpuStatic, tile: Tile, x: Operands, shares: int) -> tuple[jax.Array, jax.Array | None]:
    """Out [B, K, shares, rows, D] float32 and lse without the last axis, base 2 (None for sigmoid).

    `x.q` is [B, rows, K, D]: the queries of a KV head, of any head and token, are rows. Slopes and bias are
    [K * rows].
    """
    grid = shares, x.q.shape[2], x.q.shape[0]
    out, *lse = triton.call(_decode_kernel, static, tile, x, grid, _results(static, x.q, shares))
    return out, lse[0] if lse else None


def pool_decode(
    specs: tuple[AttentionSpec, ...],
    static: GpuStatic,
    tile: Tile,
    tokens: int,
    group: int,
    x: PoolOperands,
    shares: int,
) -> tuple[jax.Array, jax.Array | None]:
    """As `decode`, for `tokens` new tokens and `group` query heads of each KV head; `specs` are those of the pools."""
    batch, rows, kv_heads, head_dim = x.q.shape
    width = channels(head_dim)

    def queries(y):
        return pl.BlockSpec((None, y.shape[1], None, width), lambda i, h, b: (b, 0, h, 0))

    def pool(y):
        return pl.BlockSpec((y.shape[0], None, y.shape[2], width), lambda i, h, b: (0, b, 0, 0))

    def of_head(y):
        return pl.BlockSpec((y.shape[0] // kv_heads,), lambda i, h, b: (h,))

    def of_row(y):
        return pl.BlockSpec((1,), lambda i, h, b: (b,))

    def positions(y):
        return pl.BlockSpec((None, y.shape[1]), lambda i, h, b: (b, 0))

    blocks = PoolOperands(
        queries(x.q),
        tuple(
            Pools(pool(y.k), pool(y.v), of_head(y.slots), None if y.positions is None else positions(y.positions))
            for y in x.pools
        ),
        jax.tree.map(of_head, x.heads),
        of_row(x.lengths),
        None if x.full_from is None else of_row(x.full_from),
    )
    programs = tuple(
        GpuProgram(dataclasses.replace(static, spec=spec), tile, rows, y.k.shape[2], head_dim, x.q.dtype, per_kv_head=1)
        for spec, y in zip(specs, x.pools, strict=True)
    )

    def pool_decode_kernel(program: GpuProgram, x: PoolOperands, *results):
        _pool_decode_kernel(programs, tokens, group, x, *results)

    grid = shares, kv_heads, batch
    out, *lse = triton.launch(pool_decode_kernel, programs[0], x, blocks, grid, _results(static, x.q, shares))
    return out, lse[0] if lse else None


def _results(static: GpuStatic, q: jax.Array, shares: int):
    batch, rows, kv_heads, head_dim = q.shape
    shape = (batch, kv_heads, shares, rows)
    block = (None, None, None, rows)
    yield (
        jax.ShapeDtypeStruct((*shape, head_dim), jnp.float32),
        pl.BlockSpec((*block, channels(head_dim)), lambda i, h, b: (b, h, i, 0, 0)),
    )
    if static.spec.activation == "softmax":
        yield jax.ShapeDtypeStruct(shape, jnp.float32), pl.BlockSpec(block, lambda i, h, b: (b, h, i, 0))


# Inside the kernels. All visits are taken as masked: time goes into reading the cache.


def _decode_kernel(program: GpuProgram, x: Operands, out_ref, lse_ref=None):
    q = program.load_queries(x.q, 0, lax.rem(pl.program_id(1), x.q.shape[1]))
    bounds, full_head = program.bounds(x, 0)
    visit, carry = program.attend(
        q,
        program.queries(x.queries, 0, 1),
        program.keys_of(x),
        _by_row(x.heads.alibi_slopes),
        _by_row(x.heads.sigmoid_bias),
        full_head,
    )
    first, last = bounds.whole
    inner = last - first

    def block(i):
        return jnp.where(i < inner, first + i, bounds.block(i - inner))

    carry = lax.fori_loop(*_share(bounds.num_masked + inner), lambda i, c: visit(block(i), c, True), carry)
    _store(program, carry, out_ref, lse_ref)


def _pool_decode_kernel(
    programs: tuple[GpuProgram, ...], tokens: int, group: int, x: PoolOperands, out_ref, lse_ref=None
):
    length = x.lengths[0]
    row = jnp.arange(x.q.shape[0])
    pos = jnp.where(row < tokens * group, length - tokens + lax.div(row, group), -1)
    some_full, full, full_head = jnp.bool_(False), None, None
    if x.full_from is not None:
        full = (pos >= x.full_from[0]).astype(jnp.int32)[:, None]
        some_full = x.full_from[0] < length
    if x.heads.full_heads is not None:
        full_head = x.heads.full_heads[0] != 0
        some_full = some_full | full_head
    queries = Side(pos[:, None], None, full)
    slopes, bias = _by_row(x.heads.alibi_slopes), _by_row(x.heads.sigmoid_bias)
    q = programs[0].load_queries(x.q, 0)

    carry = None
    for program, pools in zip(programs, x.pools, strict=True):
        slot = pools.slots[0]
        visit, empty = program.attend(q, queries, _entries(program, pools, slot, length), slopes, bias, full_head)
        visits, block = _visits(program, pools, length, tokens, some_full)
        visits = jnp.where(slot < pools.k.shape[0], visits, 0)
        carry = lax.fori_loop(
            *_share(visits),
            lambda i, c, visit=visit, block=block: visit(block(i), c, True),
            empty if carry is None else carry,
        )
    _store(programs[0], carry, out_ref, lse_ref)


def _entries(program: GpuProgram, pools: Pools, slot, length):
    """`load(j, masked)` for `GpuProgram.attend`."""
    block = program.tile.kv_block

    def load(j, masked):
        if pools.positions is None:
            pos = (j * block + jnp.arange(block))[None]
        else:
            pos = program.load_positions(pools.positions, j)
        keys = Side(jnp.where(pos < length, pos, -1), None)
        return keys, *(program.load_entries(pool, slot, j) for pool in (pools.k, pools.v))

    return load


def _visits(program: GpuProgram, pools: Pools, length, tokens: int, some_full) -> tuple[Any, Any]:
    """How many blocks of a cache queries may see, and `block(i)`, the number of the i-th."""
    spec, block = program.static.spec, program.tile.kv_block
    stop = lax.div(jnp.minimum(length, program.kv_length) + block - 1, block)
    if pools.positions is not None or spec.window is None:
        return stop, lambda i: i
    start = lax.div(jnp.maximum(length - tokens - spec.window + 1, 0), block)
    start = jnp.where(some_full, 0, start)
    first = jnp.minimum(start, pl.cdiv(spec.num_sink_tokens, block))  # of the sink tokens
    return first + stop - start, lambda i: jnp.where(i < first, i, start + i - first)


def _share(visits) -> tuple[Any, Any]:
    """The first visit of this program and the one after its last."""
    share = lax.div(visits + pl.num_programs(0) - 1, pl.num_programs(0))
    start = pl.program_id(0) * share
    return start, jnp.minimum(start + share, visits)


def _by_row(ref):
    return None if ref is None else ref[...][:, None]


def _store(program: GpuProgram, carry, out_ref, lse_ref):
    out = carry
    if lse_ref is not None:
        out, lse_ref[...] = normalise(carry)
    program.store_queries(out_ref, 0, out)
