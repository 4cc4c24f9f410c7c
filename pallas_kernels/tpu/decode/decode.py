"""Decoding on TPUs: a few queries a sequence over a cache, bound by reading the cache once.

A grid step reads one block of cache entries of one sequence for several KV heads. Which (sequence, block) pairs there
are comes as a list in scalar memory, made from each sequence's own positions, so that a sequence costs what *it* sees.
The kernel fetches the blocks itself, one step ahead, from wherever the heads lie (`slots`): the caches are neither
gathered nor transposed. The query heads of a KV head, times the tokens, are the rows of one small tile.

Cache arrays have their entries either along the sublanes, [.., entries, head_dim], or along the lanes,
[.., head_dim, entries]. XLA's own layout puts the axis last that leaves no lanes empty, so the second form is free
where head_dim is no multiple of 128, and the kernel follows.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.blocks import Tiles, device_kind, on_tpu, vmem_limit
from pallas_kernels.math.parts import vary_alike
from pallas_kernels.math.schedule import Visits, visited_in_decode
from pallas_kernels.math.spec import AttentionSpec, Coordinates, PerHead
from pallas_kernels.tpu.decode.decode_kernel import DecodeStatic, Form, decode_kernel, round_up, unpack
from pallas_kernels.tpu.tile.tiles import LANES, Call, largest_divisor, shape_like

_MAX_HEADS = 8  # KV heads of a grid step


class Visited(NamedTuple):
    """What a launch visits, and where queries and entries stand. It follows from lengths and positions, and so it is
    the same for all layers that read alike.
    """

    visits: Visits
    kv_pos: jax.Array  # [B, whole blocks] int32
    q_start: jax.Array  # [B] int32: the first query's position
    first_full: jax.Array  # [B] int32: the first query that sees everything; queries are consecutive


def decode_attention(
    q: jax.Array,  # [B, T, H, D]
    k_cache: jax.Array,  # [B, S, K, D]
    v_cache: jax.Array,  # [B, S, K, D]
    spec: AttentionSpec,
    where: Coordinates,
    per_head: PerHead,
) -> jax.Array:
    """Attention of a few queries over caches, [B, T, H, D] in q's dtype; not differentiable."""
    by_lanes = q.shape[3] % LANES != 0
    axes = (0, 2, 3, 1) if by_lanes else (0, 2, 1, 3)
    slots = jnp.arange(k_cache.shape[2], dtype=jnp.int32)
    form = Form(by_lanes=by_lanes, batch_first=True)
    caches = k_cache.transpose(axes), v_cache.transpose(axes)
    return _decode(form, q, *caches, slots, spec, where, per_head)


def decode_pool(
    q: jax.Array,  # [B, T, H, D]
    k_pool: jax.Array,  # [rows, B, S, D]
    v_pool: jax.Array,  # [rows, B, S, D]
    slots: jax.Array,  # [K]
    spec: AttentionSpec,
    where: Coordinates,
    per_head: PerHead,
    *,
    scattered: bool = False,
    visited: Visited | None = None,
) -> jax.Array:
    """`decode_attention` over pools of caches, KV head h being row `slots[h]` of them. They are read in place.

    Args:
      scattered: slots may come in any order, and heads whose slot is out of range are not in these pools (their output
        is zero). Otherwise they are consecutive rows, which are fetched together.
      visited: what `pool_visits` returns for the call; None has it made here.
    """
    by_lanes = q.shape[3] % LANES != 0
    if by_lanes:
        k_pool, v_pool = k_pool.swapaxes(2, 3), v_pool.swapaxes(2, 3)
    form = Form(by_lanes=by_lanes, scattered=scattered)
    return _decode(form, q, k_pool, v_pool, slots, spec, where, per_head, visited)


def pool_visits(
    pool: jax.Array,  # [rows, B, S, D]
    kv_heads: int,
    spec: AttentionSpec,
    where: Coordinates,
    *,
    some_full_heads: bool = False,
    scattered: bool = False,
) -> Visited:
    """What `decode_pool` visits; of the pool the shape is read."""
    _, batch, entries, head_dim = pool.shape
    entry_bytes = 2 * head_dim * pool.dtype.itemsize
    _, block = choose_steps(spec, entries, kv_heads, entry_bytes, device_kind(), scattered)
    return _visited(spec, where, batch, entries, block, some_full_heads)


def list_visits(spec: AttentionSpec, where: Coordinates, block: int, *, some_full_heads: bool = False) -> Visits:
    """Lists, sequence by sequence, the blocks in which some query sees some entry; `unpack` says what is in a pair.

    A sequence that sees nothing has one all the same, so that its (zero) result gets written.

    Args:
      where: with `kv_pos` [B, whole blocks].
      some_full_heads: list what full heads see.
    """
    windowed = visited_in_decode(spec, where, block)  # [B, blocks]
    wanted = windowed
    if some_full_heads:
        wanted = visited_in_decode(spec.full, where, block)
    column = jnp.arange(wanted.shape[1], dtype=jnp.int32)
    listed = wanted | (~wanted.any(axis=1, keepdims=True) & (column == 0))
    first = column == jnp.where(listed, column, column.size).min(axis=1, keepdims=True)
    last = column == jnp.where(listed, column, -1).max(axis=1, keepdims=True)
    packed = jnp.arange(wanted.size, dtype=jnp.int32).reshape(wanted.shape) << 4
    for bit, flag in enumerate((first, last, wanted, windowed)):
        packed |= flag.astype(jnp.int32) << bit
    # The i-th listed entry, by comparing all with all: no sort, no scatter, and small beside what a visit costs.
    listed, packed = listed.reshape(-1), packed.reshape(-1)
    rank = jnp.where(listed, jnp.cumsum(listed, dtype=jnp.int32), 0)
    index = jnp.arange(1, rank.size + 1, dtype=jnp.int32)
    entries = jnp.where(index[:, None] == rank, packed, 0).sum(axis=1, dtype=jnp.int32)
    return Visits(entries, listed.sum(dtype=jnp.int32))


def choose_steps(
    spec: AttentionSpec, entries: int, kv_heads: int, entry_bytes: int, kind: str, scattered: bool
) -> tuple[int, int]:
    """The KV heads and the cache entries of a grid step; the latter are a multiple of 128.

    Args:
      entry_bytes: of a key and a value of one head.
      kind: of device.
      scattered: as in `decode_pool`.
    """
    # The two cores of a v4 or v5p chip share the heads.
    cores = 2 if kind in ("TPU v4", "TPU v5", "TPU v5p") else 1
    heads = largest_divisor(kv_heads, min(_MAX_HEADS, kv_heads // cores))
    step_bytes = (4 if "7" in kind else 2) * 2**20  # long enough a read to hide everything else in a step
    if scattered or (spec.window is not None and entries < 2 * (spec.window + spec.num_sink_tokens)):
        # Some of the heads are elsewhere; or all of the cache will be seen, being hardly longer than the window.
        step_bytes = 8 * 2**20
    block = min(2048, max(256, step_bytes // (heads * entry_bytes)))
    return heads, round_up(pl.cdiv(entries, pl.cdiv(entries, block)), LANES)


def _visited(
    spec: AttentionSpec, where: Coordinates, batch: int, entries: int, block: int, some_full_heads: bool
) -> Visited:
    def by_batch(x):  # [1 or B, n] -> [B, n]
        return jnp.broadcast_to(x, (batch, x.shape[1]))

    unused = pl.cdiv(entries, block) * block - entries
    q_pos, kv_pos = (by_batch(where.q_pos), jnp.pad(by_batch(where.kv_pos), ((0, 0), (0, unused)), constant_values=-1))
    full_rows = None if where.full_rows is None else by_batch(where.full_rows)
    visits = list_visits(
        spec, Coordinates(q_pos, kv_pos, q_pos, kv_pos, full_rows=full_rows), block, some_full_heads=some_full_heads
    )
    length = q_pos.shape[1]
    # Queries are consecutive, and the full ones the last of them.
    first_full = jnp.full(batch, length) if full_rows is None else length - full_rows.sum(axis=1)
    return Visited(visits, kv_pos, q_pos[:, 0], first_full)


def _static(form: Form, q, k, kv_heads: int, spec: AttentionSpec, per_head: PerHead) -> DecodeStatic:
    _, length, num_heads, head_dim = q.shape
    call = Call(
        dataclasses.replace(spec, scale=spec.scale_for(head_dim)),
        Tiles(),
        has_slopes=per_head.alibi_slopes is not None,
        has_bias=per_head.sigmoid_bias is not None,
        interpret=not on_tpu(),
    )
    entries = k.shape[3 if form.by_lanes else 2]
    entry_bytes = 2 * head_dim * k.dtype.itemsize
    heads, block = choose_steps(spec, entries, kv_heads, entry_bytes, device_kind(), form.scattered)
    return DecodeStatic(
        call,
        form,
        has_sinks=per_head.sink_logits is not None,
        has_full_heads=per_head.full_heads is not None,
        kv_heads=kv_heads,
        heads=heads,
        rows=round_up(length * num_heads // kv_heads, 8),
        entries=entries,
        block=block,
        num_blocks=pl.cdiv(entries, block),
    )


def _decode(
    form: Form,
    q,
    k,
    v,
    slots,
    spec: AttentionSpec,
    where: Coordinates,
    per_head: PerHead,
    visited: Visited | None = None,
) -> jax.Array:
    batch, length, num_heads, head_dim = q.shape
    kv_heads, group = slots.shape[0], num_heads // slots.shape[0]
    static, full_heads = _static(form, q, k, kv_heads, spec, per_head), per_head.full_heads

    def fold(x):  # [.., T, H, ..] -> [B, K * rows, ..], a row being (token, head of the group)
        x = x.reshape(x.shape[0], length, kv_heads, group, *x.shape[3:]).swapaxes(1, 2)
        x = x.reshape(x.shape[0], kv_heads, length * group, *x.shape[4:])
        x = jnp.pad(x, [(0, static.rows - length * group if axis == 2 else 0) for axis in range(x.ndim)])
        return x.reshape(x.shape[0], kv_heads * static.rows, *x.shape[3:])

    if visited is None:
        visited = _visited(spec, where, batch, static.entries, static.block, full_heads is not None)
    visits, kv_pos, q_start, first_full = visited
    scalars = [visits.pairs, slots, q_start, first_full]
    if full_heads is not None:
        scalars.append(full_heads)
    info = [jnp.broadcast_to(jnp.arange(length)[:, None], (length, num_heads))]
    info += [jnp.zeros(num_heads) if x is None else x for x in per_head[:3]]  # slopes, biases, sink logits
    info = [jnp.broadcast_to(x.astype(jnp.float32), (length, num_heads)) for x in info]
    row_info = fold(jnp.stack(info, axis=-1)[None])[0]  # [K * rows, 4]: token, slope, bias, sink logit
    row_info = jnp.pad(row_info, ((0, 0), (0, LANES - 4)))
    # In float32 a tile may have 8 rows; bfloat16 would fill twice as many with padding.
    rows = fold(q * jnp.asarray(static.call.query_factor, q.dtype)).astype(jnp.float32)
    arguments = vary_alike(
        ([x.astype(jnp.int32) for x in scalars], visits.used.reshape(()), rows, row_info, kv_pos[:, None], k, v)
    )
    out = _launch(static, *arguments)  # [B, K * rows, D]
    out = out.reshape(batch, kv_heads, static.rows, head_dim)[:, :, : length * group]
    out = out.reshape(batch, kv_heads, length, group, head_dim).swapaxes(1, 2)
    return out.reshape(batch, length, num_heads, head_dim)


def _launch(static: DecodeStatic, scalars, used, q, row_info, kv_pos, k, v) -> jax.Array:
    heads, rows, block = static.heads, static.rows, static.block
    head_dim = q.shape[2]

    def at(index):
        def index_map(g, p, entries, *_):
            return index(g, unpack(entries[p], static.num_blocks))

        return index_map

    queries = pl.BlockSpec((None, heads * rows, head_dim), at(lambda g, visit: (visit.sequence, g, 0)))
    tile = (head_dim, block) if static.form.by_lanes else (block, head_dim)
    buffer = pltpu.VMEM((2, heads, *tile), k.dtype)
    state = pltpu.VMEM((heads * rows, LANES), jnp.float32)
    return pl.pallas_call(
        functools.partial(decode_kernel, static),
        out_shape=shape_like(q.shape, k.dtype, q),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(static.kv_heads // heads, used),
            in_specs=[
                queries,
                pl.BlockSpec((heads * rows, LANES), at(lambda g, visit: (g, 0))),
                pl.BlockSpec((None, 1, block), at(lambda g, visit: (visit.sequence, 0, visit.block))),
                pl.BlockSpec(memory_space=pl.ANY),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=queries,
            scratch_shapes=[
                buffer,
                buffer,
                *[pltpu.VMEM((heads * rows, head_dim), jnp.float32)] * 2,
                *[state] * (2 if static.call.softmax else 0),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=vmem_limit()
        ),
        interpret=static.call.interpret,
        name="decode",
    )(*scalars, q, row_info, kv_pos, k, v)
