"""Attention backward on TPUs for any pattern: dq, dk and dv from one sweep over the queries.

The grid visits the forward's pairs of blocks (`pair_schedule`), all those of a query block together. dq of that block,
and dk and dv of *all* keys, are accumulated in VMEM; a few more steps at the end write the latter out. Keys that VMEM
does not hold are taken in chunks. So weights are recomputed from lse once, each pair takes five matmuls, and nothing of
the size [T, S], or a stack of dq, is stored.

With w the weights, dw = dout v^T and delta = rowsum(dout * out) - dlse:

    softmax: ds = w (dw - delta)     sigmoid: ds = w (1 - w) dw
    dv = w^T dout,  dk = ds^T q,  dq = ds k      (times the softcap's derivative and the scale)

Logits are transposed, [keys, queries]: what belongs to a query is a row, and the weights are the stationary side of
every product, so that 128 rows of q, dout or k stream past a matrix unit that they fill. Gradients are transposed too.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.math.nonfinite import finite
from pallas_kernels.math.schedule import Kind, Visit
from pallas_kernels.tpu.schedule.pair_schedule import (
    PairSchedule,
    Seen,
    default_mask,
    kind_of_tile,
    order_pairs,
    seen_tiles,
    token_blocks,
)
from pallas_kernels.tpu.schedule.row_list import leave_out, sees
from pallas_kernels.tpu.tile.gradients import pipelined, weights_and_slopes
from pallas_kernels.tpu.tile.rotation import rotate_tile, rotate_tile_back
from pallas_kernels.tpu.tile.tiles import (
    LANES,
    NN,
    NT,
    Blocked,
    Call,
    LaunchGrid,
    LaunchHeads,
    OutGradients,
    Ref,
    TpuOperands,
    addend_at,
    by_head,
    cost_of,
    dot,
    form_logits,
    head_at,
    launch,
    shape_like,
    slope_and_bias,
    split,
    take,
    tile_mask,
)

_UNIT = 256  # queries of a unit of work, as wide as the widest matrix unit
_VMEM_BYTES = 36 * 2**20  # of dk and dv, and of keys and values if they fit too
_STEP_BYTES = 7 * 2**20  # of the blocks of a step, for which that leaves room; wider ones take from it


def scheduled_backward(
    call: Call,
    x: TpuOperands,
    heads: LaunchHeads,
    gradients: OutGradients,
    previous: tuple[jax.Array, ...] = (),
    num_active: jax.Array | None = None,
    added: tuple[jax.Array, ...] = (),
    listed_results: tuple[jax.Array, ...] = (),
) -> tuple[jax.Array, ...]:
    """Returns the gradients of q (as given), k and v, and with a bias also its rows' [B, H, 1, T] f32.

    Args:
      num_active: [] int32: query blocks behind so many have no cotangents; their own gradients are left undefined.
      added: gradients of k and v, to be added to these.
      listed_results: gradients by query (q's, and with a bias the rows'), where most blocks of queries see no key.
        Those are left out, and the results are these arrays, changed in place; VMEM must hold all keys.
    """
    chunks, keys_too = key_chunks(call, x.k.shape[2], x.k.shape[3], x.k.dtype.itemsize)
    if len(chunks) == 1:
        schedule = order_pairs(
            call, x.where, resident=keys_too, flush=True, num_active=num_active, listed=bool(listed_results)
        )
        return _sweep(call, x, heads, gradients, schedule, previous, added, listed_results)

    parts = []
    for keys in chunks:
        ids = x.where.kv_segment_ids
        where = x.where._replace(
            kv_pos=x.where.kv_pos[:, keys],
            kv_order=x.where.kv_order[:, keys],
            kv_segment_ids=None if ids is None else ids[:, keys],
        )
        schedule = order_pairs(dataclasses.replace(call, indexed=False, order=None), where, resident=False, flush=True)
        # Of what is there already, the gradients by query are in the first part of the sum.
        by_query, by_key = (previous[:1], previous[3:]), (y[:, :, keys] for y in previous[1:3])
        dq, dbias = by_query if keys.start == 0 else jax.tree.map(jnp.zeros_like, by_query)
        of_chunk = tuple(y[:, :, keys] for y in added)
        here = x._replace(k=x.k[:, :, keys], v=x.v[:, :, keys], where=where)
        parts.append(_sweep(call, here, heads, gradients, schedule, (*dq, *by_key, *dbias), of_chunk, ()))
    dq, dk, dv, *dbias = zip(*parts, strict=True)
    return _sum(dq), *(jnp.concatenate(y, axis=2) for y in (dk, dv)), *map(_sum, dbias)


def key_chunks(call: Call, length: int, head_dim: int, itemsize: int) -> tuple[list[slice], bool]:
    """The chunks in which the keys are taken, each in a launch of its own, and whether VMEM holds them all."""
    chunk, resident = keys_at_once(call, length, head_dim, itemsize)
    return [slice(start, min(start + chunk, length)) for start in range(0, length, chunk)], resident


def keys_at_once(call: Call, length: int, head_dim: int, itemsize: int) -> tuple[int, bool]:
    """The keys whose dk and dv VMEM holds, and whether it holds the keys and values of all `length` too."""
    block, head_dim = call.tiles.kv_block, max(head_dim, LANES)
    room = _VMEM_BYTES - max(0, _step_bytes(call, head_dim, itemsize) - _STEP_BYTES)
    chunk = room // (2 * 4 * head_dim * block) * block
    return chunk, length <= chunk and length * head_dim * (2 * 4 + 4 * itemsize) <= room


def _step_bytes(call: Call, head_dim: int, itemsize: int) -> int:
    """VMEM of q, dout, dq, dk and dv of a pair of blocks, two buffers each, and of what `_sweep` keeps by query."""
    by_query = 3 * 2 * itemsize + 4 + 2 * itemsize + (2 * 2 * 4 if call.rotated_by else 0)
    by_key = (4 if call.outside else 2) * 2 * itemsize  # of keys outside, other gradients may be added
    return head_dim * (call.tiles.q_block * by_query + call.tiles.kv_block * by_key)


def _sum(arrays):
    return functools.reduce(jnp.add, arrays)


def _sweep(
    call: Call,
    x: TpuOperands,
    heads: LaunchHeads,
    gradients: OutGradients,
    schedule: PairSchedule,
    previous,
    added,
    listed_results,
) -> tuple[jax.Array, ...]:
    (batch, num_heads, length, head_dim), kv_block = x.q.shape, call.tiles.kv_block
    group, q_block = num_heads // x.k.shape[1], call.tiles.q_block

    def spec(block, index):
        """A block located by batch, query head, KV head, visit, and the KV block whose gradients are written."""

        def index_map(b, h, g, *rest):
            indices, scalars, order = split(rest, len(schedule.grid), len(schedule.scalars))
            h, visit = head_at(h, order), schedule.visit(indices, scalars)
            written = jnp.where(visit.flush & (g == group - 1), visit.column, 0)
            return index(b, h * group + g, h, schedule.fetched(visit, b, scalars), written)

        return pl.BlockSpec(block, index_map)

    def of_queries(rows):
        return spec((None, None, rows, q_block), lambda b, h, kv, visit, _: (b, h, 0, visit.row))

    def keys(b, h, kv, visit, _):
        return b, kv, schedule.column(visit), 0

    queries = spec((None, None, q_block, head_dim), lambda b, h, kv, visit, _: (b, h, visit.row, 0))
    of_keys = spec((None, None, schedule.keys_at_hand(call, x.k), head_dim), keys)
    written = spec((None, None, kv_block, head_dim), lambda b, h, kv, visit, written: (b, kv, written, 0))
    inputs = [Blocked(x.q, queries), Blocked(x.k, of_keys), Blocked(x.v, of_keys), Blocked(gradients.dout, queries)]
    inputs += [Blocked(y, written) for y in added]
    if call.softmax:
        inputs.append(Blocked(gradients.statistics, of_queries(8)))
    if call.has_head_bias:
        inputs.append(Blocked(by_head(x.head_bias), spec((None, 8, LANES), lambda b, h, *_: (h, 0, 0))))
    inputs += token_blocks(call, schedule, x, lambda block, at: spec(block, lambda b, h, kv, visit, _: at(b, visit)))
    specs = queries, written, written
    outputs = [Blocked(shape_like(y.shape, y.dtype, x.q), at) for y, at in zip(x[:3], specs, strict=True)]
    outputs += [Blocked(shape_like((batch, num_heads, 1, length), jnp.float32, x.q), of_queries(1))] * call.has_bias
    inputs += [Blocked(y, outputs[i].spec, becomes=i) for y, i in zip(listed_results, (0, 3), strict=False)]
    has_segments = x.where.q_segment_ids is not None and schedule.is_list
    has_full_rows, counts = x.where.full_rows is not None, (len(added), len(listed_results))
    static = _BackwardStatic(call, schedule, has_segments, has_full_rows, *counts, group)
    return launch(
        call,
        functools.partial(_kernel, static),
        "scheduled_backward",
        grid=LaunchGrid((batch, heads.count, group, *schedule.grid), heads, schedule.scalars),
        inputs=inputs,
        outputs=outputs,
        scratch=_scratch(call, x.k, x.q.dtype, listed=schedule.listed is not None),
        previous=previous,
        cost=cost_of(call, x.q, x.k, backward=True),
    )


class _BackwardStatic(NamedTuple):
    """What is known of a kernel when tracing."""

    call: Call
    schedule: PairSchedule
    has_segments: bool
    has_full_rows: bool
    num_added: int
    num_listed_results: int
    group: int


def _scratch(call: Call, k: jax.Array, dtype, *, listed: bool) -> list[Any]:
    """Scratch memory, in the order of `_BackwardRefs` from `dk_acc` on."""
    (length, head_dim), tiles = k.shape[2:], call.tiles
    by_key = pltpu.VMEM((length // tiles.kv_block, head_dim, tiles.kv_block), jnp.float32)
    by_query = [pltpu.VMEM((head_dim, tiles.q_block), kind) for kind in (jnp.float32, dtype, dtype)]
    scratch = [by_key, by_key, *by_query]
    if listed:
        scratch.append(pltpu.VMEM((tiles.q_block, head_dim), dtype))
        scratch += [pltpu.VMEM((8, tiles.q_block), jnp.float32)] * call.softmax
    return scratch


class _Unit(NamedTuple):
    """A tile of keys and some queries of a pair of blocks."""

    keys: slice
    queries: slice
    masked: bool


def _units(call: Call, seen, crossed: bool) -> list[_Unit]:
    """The units that a pair of blocks needs, keys outermost; all with a mask where a document's edge crosses it."""
    q_block, kv_block = call.tiles.q_block, call.tiles.kv_block
    tile, width = math.gcd(call.tiles.tile, kv_block), math.gcd(_UNIT, q_block)
    return [
        _Unit(keys, slice(start, start + width), masked or crossed)
        for key in range(0, kv_block, tile)
        for start in range(0, q_block, width)
        for keys, masked in seen_tiles(call, seen, slice(start, start + width), tile, slice(key, key + tile))
    ]


class _BackwardRefs(NamedTuple):
    """What a step reads and writes; None where the call has no such thing."""

    q: Ref  # [q_block, D]
    k: Ref  # [keys at hand, D]
    v: Ref
    dout: Ref
    added: list[Ref]  # gradients of a block of keys and of its values, or none
    statistics: Ref  # [8, q_block]
    head_bias: Ref  # [8, LANES]
    q_info: Ref  # `describe_tokens` of the blocks
    kv_info: Ref
    first_keys: Ref  # [1, q_block]: `RowDocuments.first_keys` (packed)
    cos: Ref  # [q_block, D], of queries that are to be rotated
    sin: Ref
    listed_results: list[Ref]  # dq and dbias of other keys, or none
    dq: Ref
    dk: Ref
    dv: Ref
    dbias: Ref
    dk_acc: Ref  # [blocks of keys, D, kv_block] f32
    dv_acc: Ref
    dq_acc: Ref  # [D, q_block] f32
    q_t: Ref  # [D, q_block]
    dout_t: Ref
    seeing: list[Ref]  # dout and statistics of queries that see anything (listed)


def _name_refs(static: _BackwardStatic, refs) -> _BackwardRefs:
    call, schedule = static.call, static.schedule
    arrays, added, rest = split(refs, 4, static.num_added)
    packed = schedule.packed is not None
    rotated = call.rotated_by > 0
    *optional, rest = take(
        rest, call.softmax, call.has_head_bias, schedule.is_list, schedule.is_list, packed, rotated, rotated
    )
    listed_results, gradients, rest = split(rest, static.num_listed_results, 3)
    dbias, (*scratch,) = take(rest, call.has_bias)
    named: list[Any] = [*arrays, added, *optional, listed_results, *gradients, dbias, *scratch[:5], scratch[5:]]
    return _BackwardRefs(*named)


def _kernel(static: _BackwardStatic, order, *unnamed: Ref) -> None:
    call, schedule = static.call, static.schedule
    scalars, rest = split(unnamed, len(schedule.scalars))
    indices = [pl.program_id(3 + i) for i in range(len(schedule.grid))]
    visit = schedule.in_row(schedule.visit(indices, scalars), pl.program_id(0), scalars)
    refs, member = _name_refs(static, rest), pl.program_id(2)
    head_bias = slope_and_bias(refs.head_bias)

    @pl.when((member == 0) & functools.reduce(jnp.logical_and, [i == 0 for i in indices]))
    def _():
        refs.dk_acc[...] = jnp.zeros_like(refs.dk_acc)
        refs.dv_acc[...] = jnp.zeros_like(refs.dv_acc)

    pl.when(visit.first)(functools.partial(_begin_queries, call, refs))
    here = refs
    if refs.seeing:
        here = refs._replace(dout=refs.seeing[0], statistics=refs.seeing[1] if call.softmax else None)
    mask_by_token = functools.partial(tile_mask, call, static.has_segments, static.has_full_rows)

    def attend(seen, column):
        held = schedule.held_at(column)
        start = pl.multiple_of(held * call.tiles.kv_block, call.tiles.kv_block) if schedule.resident else 0
        keys = pl.ds(start, call.tiles.kv_block)
        part = here._replace(
            k=here.k.at[keys, :], v=here.v.at[keys, :], dk_acc=here.dk_acc.at[held], dv_acc=here.dv_acc.at[held]
        )
        k_t, key_info = part.k[...].T, here.kv_info[:, keys].T if schedule.is_list else None
        _Pair(call, part, visit.row, column, seen, head_bias, mask_by_token, k_t, key_info).run()

    def attend_small(seen, row, column, crossed):
        assert schedule.packed is not None
        part = _small_refs(schedule, here, visit, row, column)
        k_t = part.k[...].T
        _Pair(schedule.packed.call, part, row, column, seen, head_bias, mask_by_token, k_t, None, crossed).run()

    schedule.run(visit, scalars, attend, attend_small)
    pl.when(visit.last)(functools.partial(_write_queries, call, refs))

    @pl.when(visit.flush & (member == static.group - 1))
    def _():
        dk, dv = (refs.dk_acc[visit.column] * call.product_factor).T, refs.dv_acc[visit.column].T
        if refs.added:
            dk, dv = (x + ref[...].astype(jnp.float32) for x, ref in zip((dk, dv), refs.added, strict=True))
        refs.dk[...], refs.dv[...] = dk.astype(refs.dk.dtype), dv.astype(refs.dv.dtype)


def _begin_queries(call: Call, refs: _BackwardRefs) -> None:
    """Before a row's first pair."""
    refs.dq_acc[...] = jnp.zeros_like(refs.dq_acc)
    q = rotate_tile(call, refs.q[...], refs.cos[...], refs.sin[...]) if call.rotated_by else refs.q[...]
    dout, seeing = refs.dout[...], refs.seeing
    if seeing:
        statistics = refs.statistics[...] if call.softmax else None
        q, dout, statistics = leave_out(refs.q_info[0:1, :], q, dout, statistics)
        seeing[0][...] = dout
        if call.softmax:
            seeing[1][...] = statistics
    refs.q_t[...], refs.dout_t[...] = q.T, dout.T
    if call.has_bias:
        refs.dbias[...] = refs.listed_results[1][...] if refs.listed_results else jnp.zeros_like(refs.dbias)


def _write_queries(call: Call, refs: _BackwardRefs) -> None:
    """After a row's last pair."""
    if call.rotated_by:
        dq = rotate_tile_back(call, refs.dq_acc[...], refs.cos[...], refs.sin[...])
    else:
        dq = (refs.dq_acc[...] * call.product_factor).T
    if refs.listed_results:
        row = refs.q_info[0:1, :]
        dq = jnp.where(sees(row, dq.shape), dq, 0) + refs.listed_results[0][...].astype(jnp.float32)
        if call.has_bias:
            refs.dbias[...] = jnp.where(row >= 0, refs.dbias[...], refs.listed_results[1][...])
    refs.dq[...] = dq.astype(refs.dq.dtype)


def _small_refs(schedule: PairSchedule, refs: _BackwardRefs, visit: Visit, row, column) -> _BackwardRefs:
    """The references of a small block of queries and one of keys."""
    assert schedule.packed is not None
    size, per_row = schedule.packed.call.tiles.q_block, schedule.packed.documents.per_row

    def at(index):
        return pl.ds(pl.multiple_of(index * size, size), size)

    block = lax.div(column, per_row)
    queries, in_block = at(row - visit.row * per_row), at(column - block * per_row)
    block, column = schedule.held_at(block), schedule.held_at(block) * per_row + column - block * per_row
    keys = at(column) if schedule.resident else in_block
    by_token = {name: getattr(refs, name).at[queries, :] for name in ("q", "dout")}
    by_lane = ("statistics", "first_keys", "dbias", "dq_acc", "q_t", "dout_t")
    by_token |= {name: getattr(refs, name).at[:, queries] for name in by_lane if getattr(refs, name) is not None}
    return refs._replace(
        k=refs.k.at[keys, :],
        v=refs.v.at[keys, :],
        dk_acc=refs.dk_acc.at[block, :, in_block],
        dv_acc=refs.dv_acc.at[block, :, in_block],
        **by_token,
    )


@dataclasses.dataclass(frozen=True, eq=False)
class _Pair:
    """A block of queries and one of keys."""

    call: Call
    refs: _BackwardRefs  # k, v, dk_acc and dv_acc being those of the block of keys
    row: jax.Array
    column: Any
    seen: Seen
    slope_and_bias: tuple[jax.Array, jax.Array] | None
    mask_by_token: Callable  # of queries and keys, as `describe` has them, and the tile's shape
    k_t: jax.Array  # [D, kv_block]
    key_info: jax.Array | None  # [kv_block, 8], of a list
    crossed: bool = False  # the edge of a document may lie between queries and keys

    def run(self) -> None:
        """Adds the pair's share to the gradients."""
        pipelined(_units(self.call, self.seen, self.crossed), self.products, self.finish)

    def products(self, unit: _Unit) -> tuple[jax.Array, jax.Array]:
        return (
            dot(self.refs.k[unit.keys, :], self.refs.q_t[:, unit.queries], NN),  # [keys, queries]
            dot(self.refs.v[unit.keys, :], self.refs.dout[unit.queries, :], NT),
        )

    def finish(self, unit: _Unit, s: jax.Array, dw: jax.Array) -> None:
        """Adds a unit's share to the gradients, given its products."""
        call, refs, keys, queries = self.call, self.refs, unit.keys, unit.queries
        query, key = self.describe(keys, queries)
        s, derivative = form_logits(call, s, functools.partial(addend_at, call, query, key, self.slope_and_bias))
        mask = self.mask(unit, query, key, s.shape) if unit.masked else None
        lse, delta = (refs.statistics[i : i + 1, queries] if call.softmax else None for i in range(2))
        w, dlogits, ds = weights_and_slopes(call, s, derivative, dw, lse, delta, mask)
        clean = finite if unit.masked else lambda x: x
        if call.has_bias:
            refs.dbias[:, queries] += dlogits.sum(axis=0, keepdims=True)
        w, ds = w.astype(refs.q.dtype), ds.astype(refs.q.dtype)
        refs.dv_acc[:, keys] += dot(clean(refs.dout_t[:, queries]), w, NT)  # [D, keys]
        refs.dk_acc[:, keys] += dot(clean(refs.q_t[:, queries]), ds, NT)
        refs.dq_acc[:, queries] += dot(clean(self.k_t[:, keys]), ds, NN)  # [D, queries]

    def mask(self, unit: _Unit, query, key, shape: tuple[int, ...]) -> jax.Array:
        if self.seen == "tokens":
            return self.mask_by_token(query, key, shape)
        mask, block = None, self.call.tiles.kv_block
        if self.crossed:
            first = self.refs.first_keys[:, unit.queries] - (self.column * block + unit.keys.start)
            mask = lax.broadcasted_iota(jnp.int32, shape, 0) >= first
        # Whether causality or the window hides some of its keys.
        if isinstance(self.seen, int) and kind_of_tile(self.call, self.seen, unit.queries, unit.keys) is not Kind.FULL:
            relative = lax.broadcasted_iota(jnp.int32, shape, 1) - lax.broadcasted_iota(jnp.int32, shape, 0)
            cut = default_mask(self.call, self.seen, unit.queries, unit.keys, relative)
            mask = cut if mask is None else mask & cut
        assert mask is not None  # a pair that is seen throughout has no mask
        return mask

    def describe(self, keys: slice, queries: slice) -> tuple[list[jax.Array], list[jax.Array]]:
        """The properties of the queries, as rows, and of the keys, as columns."""
        if self.key_info is not None:
            query = [self.refs.q_info[i : i + 1, queries] for i in range(3)]
            return query, [self.key_info[keys, i : i + 1] for i in range(2)]
        first = (self.row - self.column) * self.call.tiles.q_block + queries.start - keys.start
        query = lax.broadcasted_iota(jnp.int32, (1, queries.stop - queries.start), 1) + first
        return [query], [lax.broadcasted_iota(jnp.int32, (keys.stop - keys.start, 1), 0)]
