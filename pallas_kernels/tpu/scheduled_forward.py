"""Attention forward on TPUs for any pattern: full causal, long windows, full rows, keys outside a window.

The grid walks over pairs of blocks (`tpu_walk`) with FlashAttention's running maximum and sum. The order of the program
is the software pipeline: the products q.k of one strip of queries stand before the exponentials of the strip before it.

`scheduled_forward` writes into `previous` when given, for the heads it is told to serve. `branches_forward` takes the
whole window of a block of queries first, writes that result, and goes on with the keys outside.

Where tiles have a mask, values that are not finite are taken as zero (a pair whose tokens decide has a copy of them for
all its strips). One sum over a pair's values says whether there are any; then `spoil` makes the rows that see them NaN.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.nonfinite import finite, is_finite, sees_non_finite
from pallas_kernels.spec import Coordinates
from pallas_kernels.tpu.tiles import (
    LANES,
    MASKED,
    NN,
    NT,
    Call,
    Heads,
    addend_at,
    batch_index,
    by_head,
    describe_tokens,
    dot,
    form_logits,
    head_at,
    launch,
    over_lanes,
    shape_like,
    sigmoid_values,
    sigmoid_weights,
    split,
    take,
    tile_mask,
    write_softmax,
)
from pallas_kernels.tpu.walk import Seen, default_mask, has_default_positions, seen_tiles, walk_over

_RESIDENT_BYTES = 32 * 2**20  # of keys and values in VMEM
_MAX_BRANCH_WINDOW = 2048  # that `branches_forward` takes in one go


def scheduled_forward(
    call: Call,
    q: jax.Array,  # [B, H, T, D], times call.query_factor
    k: jax.Array,  # [B, K, S, D]
    v: jax.Array,  # [B, K, S, D]
    head_bias: jax.Array,  # [2, H] f32: ALiBi slope and bias
    where: Coordinates,
    heads: Heads,
    previous: tuple[jax.Array, ...] = (),
    initial: tuple[jax.Array, ...] = (),
) -> tuple[jax.Array, ...]:
    """Returns out [B, H, T, D] and, for softmax, lse [B, H, 1, T] f32 (base 2, -inf where nothing is seen).

    Args:
      initial: out and lse over other keys of the same queries; the results are then those over all keys together.
    """
    return _forward(call, q, k, v, head_bias, where, heads, previous, initial, branches=False)


def serves_branches(call: Call, where: Coordinates, head_dim: int, dtype) -> bool:
    """Whether `branches_forward` can do the call: a window that it holds whole, and keys that VMEM does."""
    window = call.spec.window
    return (
        window is not None
        and window <= _MAX_BRANCH_WINDOW
        and has_default_positions(call, where)
        and fits_vmem(where.kv_order.shape[1], head_dim, dtype)
    )


def branches_forward(
    call: Call, q, k, v, head_bias, where: Coordinates, heads: Heads
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """The results of the window and those of all keys (each as `scheduled_forward`'s), from one pass over the keys."""
    outside = dataclasses.replace(call, outside=True)
    results = _forward(outside, q, k, v, head_bias, where, heads, (), (), branches=True)
    return results[: len(results) // 2], results[len(results) // 2 :]


def fits_vmem(length: int, head_dim: int, dtype) -> bool:
    """Whether VMEM holds all keys and values of a head, and those of the next one."""
    return 4 * length * max(head_dim, LANES) * jnp.dtype(dtype).itemsize <= _RESIDENT_BYTES


def _forward(call, q, k, v, head_bias, where, heads, previous, initial, branches):
    batch, num_heads, q_length, head_dim = q.shape
    kv_length, group = k.shape[2], num_heads // k.shape[1]
    q_block, kv_block = call.tiles.q_block, call.tiles.kv_block
    heads = heads.queries(group)
    walk = walk_over(call, where, resident=fits_vmem(kv_length, head_dim, k.dtype), only_plain=branches)

    def spec(block, index):
        """A block located by batch, query head and visit."""

        def index_map(b, h, *rest):
            indices, scalars, order = split(rest, len(walk.grid), len(walk.scalars))
            return index(b, head_at(h, order), walk.visit(indices, scalars))

        return pl.BlockSpec(block, index_map)

    queries = spec((None, None, q_block, head_dim), lambda b, h, visit: (b, h, visit.row, 0))
    held = kv_length if walk.resident else kv_block  # keys at hand

    def column(visit):
        return 0 if walk.resident else visit.column

    keys = spec((None, None, held, head_dim), lambda b, h, visit: (b, h // group, column(visit), 0))
    rows = spec((None, None, 1, q_block), lambda b, h, visit: (b, h, 0, visit.row))
    inputs = [q, k, v, *initial]
    in_specs = [queries, keys, keys, *[queries, rows][: len(initial)]]
    if call.has_slopes or call.has_bias:
        inputs.append(by_head(head_bias))
        in_specs.append(spec((None, 8, LANES), lambda b, h, visit: (h, 0, 0)))
    if walk.is_list:
        tokens = describe_tokens(where)
        inputs += tokens
        in_specs += [
            spec((None, 8, q_block), lambda b, h, visit: (batch_index(b, tokens.queries), 0, visit.row)),
            spec((None, 8, held), lambda b, h, visit: (batch_index(b, tokens.keys), 0, column(visit))),
        ]
    out_specs, out_shapes = [queries], [shape_like(q.shape, call.result_dtype(q), q)]
    scratch = [pltpu.VMEM((q_block, head_dim), jnp.float32)]
    if walk.is_list:
        scratch.append(pltpu.VMEM((kv_block, head_dim), v.dtype))
    if branches:
        scratch.append(pltpu.SMEM((1,), jnp.int32))
    if call.softmax:
        out_specs.append(rows)
        out_shapes.append(shape_like((batch, num_heads, 1, q_length), jnp.float32, q))
        scratch += [pltpu.VMEM((q_block, LANES), jnp.float32)] * 2
    return launch(
        call,
        functools.partial(
            _kernel,
            call,
            walk,
            where.q_seg is not None,
            where.full_rows is not None,
            branches,
            len(initial),
        ),
        "branches_forward" if branches else "scheduled_forward",
        grid=(batch, heads.count, *walk.grid),
        scalars=walk.scalars,
        heads=heads,
        inputs=inputs,
        in_specs=in_specs,
        outputs=out_shapes * (2 if branches else 1),
        out_specs=out_specs * (2 if branches else 1),
        scratch=scratch,
        previous=previous,
    )


class _Part(NamedTuple):
    """Keys that are attended to at once."""

    sources: "list[_Source]"
    fresh: bool = False  # nothing was attended to before
    results: Any = None  # where to write what there is then


class _Source(NamedTuple):
    """A block of keys, and how the queries see it."""

    call: Call
    seen: Seen
    column: Any
    k_ref: Any
    v_ref: Any
    kv_info: Any


def _kernel(call, walk, has_segments, has_full_rows, branches, num_initial, order, *refs):
    scalars, (q_ref, k_ref, v_ref), initial, rest = split(refs, len(walk.scalars), 3, num_initial)
    visit = walk.visit([pl.program_id(2 + i) for i in range(len(walk.grid))], scalars)
    has_head_bias = call.has_slopes or call.has_bias
    bias_ref, q_info, kv_info, rest = take(rest, has_head_bias, walk.is_list, walk.is_list)
    num_results = 2 if call.softmax else 1
    window_out, out, (acc_ref, *rest) = split(rest, num_results if branches else 0, num_results)
    finite_v, spoilt_ref, statistics = take(rest, walk.is_list, branches)
    slope_and_bias = None if bias_ref is None else (bias_ref[0:1, 0:1], bias_ref[1:2, 0:1])
    fresh = walk.fresh is not None and not initial and not branches
    may_be_empty = walk.is_list or not (fresh or initial or branches)  # a row of the results
    q_block, kv_block = call.tiles.q_block, call.tiles.kv_block
    strip, tile = math.gcd(call.tiles.strip, q_block), math.gcd(call.tiles.tile, kv_block)
    strips = [slice(start, start + strip) for start in range(0, q_block, strip)]
    sum_on_mxu = call.tiles.sum_on_mxu and v_ref.shape[1] % LANES == 0

    def describe(source, rows, keys):
        """The properties of the queries, as columns, and of the keys, as rows."""
        if walk.is_list:
            query = q_info[...].T  # [q_block, 8]
            return [query[rows, i : i + 1] for i in range(3)], [
                source.kv_info[i : i + 1, keys] for i in range(2)
            ]
        first = (visit.row - source.column) * q_block + rows.start - keys.start
        query = lax.broadcasted_iota(jnp.int32, (strip, 1), 0) + first
        return [query], [lax.broadcasted_iota(jnp.int32, (1, keys.stop - keys.start), 1)]

    def logits(sources, rows):
        tiles = []
        for source in sources:
            for keys, masked in seen_tiles(source.call, source.seen, rows, tile):
                s = dot(q_ref[rows, :], source.k_ref[keys, :], NT)  # [strip, keys]
                query, key = describe(source, rows, keys)
                s, _ = form_logits(call, s, functools.partial(addend_at, call, query, key, slope_and_bias))
                if masked and walk.is_list:
                    mask = tile_mask(call, has_segments, has_full_rows, query, key, s.shape)
                    s = jnp.where(mask, s, MASKED)
                elif masked:
                    relative = lax.broadcasted_iota(jnp.int32, s.shape, 0)
                    relative -= lax.broadcasted_iota(jnp.int32, s.shape, 1)
                    s = jnp.where(default_mask(source.call, source.seen, rows, keys, relative), s, MASKED)
                value_ref = finite_v if masked and walk.is_list else source.v_ref
                tiles.append((s, value_ref.at[keys, :], masked and not walk.is_list))
        top = None
        if call.softmax and tiles:
            top = over_lanes(jnp.maximum, [s for s, *_ in tiles]).max(axis=1, keepdims=True)
        return tiles, top

    def value_of(value_ref, clean):
        return finite(value_ref[...]) if clean else value_ref[...]

    def accumulate(rows, tiles, top, fresh):
        if not tiles:
            return
        if not call.softmax:
            more = sum(sigmoid_values(sigmoid_weights(s), value_of(*value)) for s, *value in tiles)
            acc_ref[rows, :] = more if fresh else acc_ref[rows, :] + more
            return
        top_ref, total_ref = statistics
        acc: Any = 0.0
        total: Any = 0.0
        new = jnp.broadcast_to(top, (strip, LANES))  # all lanes alike
        if not fresh:
            old = top_ref[rows, :]
            new = jnp.maximum(old, top)
            decay = jnp.exp2(old - new)
            acc, total = acc_ref[rows, :] * _as_wide(decay, acc_ref), total_ref[rows, :] * decay
        sums = []
        for s, *value_and_mask in tiles:
            weights, value = jnp.exp2(s - new[:, :1]), value_of(*value_and_mask)
            if sum_on_mxu:
                value = jnp.concatenate([value, jnp.ones((value.shape[0], LANES), value.dtype)], axis=1)
                product = dot(weights.astype(value.dtype), value, NN)
                acc, total = acc + product[:, :-LANES], total + product[:, -LANES:]
            else:
                acc += dot(weights.astype(value.dtype), value, NN)
                sums.append(weights)
        if sums:
            total += over_lanes(jnp.add, sums).sum(axis=1, keepdims=True)
        acc_ref[rows, :], top_ref[rows, :] = acc, new
        total_ref[rows, :] = jnp.broadcast_to(total, new.shape)

    def write(results, rows):
        if not call.softmax:
            results[0][rows, :] = acc_ref[rows, :].astype(results[0].dtype)
            return
        top, total = (_as_wide(ref[rows, :], acc_ref) for ref in statistics)
        out_ref, lse_ref = results
        write_softmax(out_ref, lse_ref, rows, acc_ref[rows, :], top, total, may_be_empty)

    def attend(*parts):
        """Adds the keys of each part in turn, in one pipeline, and writes what there is then."""
        strip_parts = [(rows, part) for part in parts for rows in strips]
        ahead = None
        for i, (rows, part) in enumerate(strip_parts):
            tiles, top = ahead or logits(part.sources, rows)
            if i + 1 < len(strip_parts):
                next_rows, next_part = strip_parts[i + 1]
                ahead = logits(next_part.sources, next_rows)
            accumulate(rows, tiles, top, part.fresh)
            if part.results is not None:
                write(part.results, rows)

    def source(seen, column, call=call):
        refs = k_ref, v_ref, kv_info
        if walk.resident:
            keys = pl.ds(pl.multiple_of(column * kv_block, kv_block), kv_block)
            refs = k_ref.at[keys, :], v_ref.at[keys, :], kv_info.at[:, keys] if walk.is_list else None
        return _Source(call, seen, column, *refs)

    def is_spoilt(source):
        """Whether a value is not finite (or their sum is not, which costs time only)."""
        ones = jnp.ones((8, kv_block), source.v_ref.dtype)
        return jnp.any(~is_finite(dot(ones, source.v_ref[...], NN)))

    def spoil(source, result_ref):
        """Writes NaN where a query sees a value that is not finite. Hardly ever run, so short and slow."""

        @pl.loop(0, q_block // strip * (kv_block // tile))
        def _(i):
            row, column = lax.rem(i, q_block // strip) * strip, lax.div(i, q_block // strip) * tile
            rows = pl.ds(pl.multiple_of(row, strip), strip)
            keys = pl.ds(pl.multiple_of(column, tile), tile)
            if walk.is_list:
                info = q_info[:, rows].T  # [strip, 8]
                query = [info[:, j : j + 1] for j in range(3)]
                key = [source.kv_info[j : j + 1, keys] for j in range(2)]
            else:
                first = (visit.row - source.column) * q_block + row - column
                query = [lax.broadcasted_iota(jnp.int32, (strip, 1), 0) + first] * 3
                key = [lax.broadcasted_iota(jnp.int32, (1, tile), 1)] * 2
            seen = tile_mask(source.call, has_segments, has_full_rows, query, key, (strip, tile))
            hit = sees_non_finite(seen, source.v_ref[keys, :])
            result_ref[rows, :] = jnp.where(hit, jnp.nan, result_ref[rows, :])

    def attend_branches(blocks, beyond):
        """The window's blocks, whose results are written, and those of their keys outside the window."""
        spoilt_ref[0] = functools.reduce(jnp.logical_or, map(is_spoilt, blocks)).astype(jnp.int32)
        attend(_Part(blocks, True, window_out), _Part(beyond))

    if branches:
        window = dataclasses.replace(call, outside=False)
        last = -(-(call.spec.window - 1) // kv_block)
        for farthest in range(last + 1):  # the first rows lack blocks before the sequence
            blocks = [source(back, visit.row - back, window) for back in range(farthest, -1, -1)]
            beyond = [source(back, visit.row - back) for back in walk.partly if back <= farthest]
            here = visit.row == farthest if farthest < last else visit.row >= farthest
            pl.when(here)(functools.partial(attend_branches, blocks, beyond))

        @pl.when(spoilt_ref[0] != 0)
        def _():
            everything = dataclasses.replace(window, spec=dataclasses.replace(call.spec, window=None))

            @pl.loop(0, jnp.minimum(visit.row, last) + 1)
            def _(back):
                spoil(source(None, visit.row - back, window), window_out[0])
                spoil(source(None, visit.row - back, everything), acc_ref)

    elif not fresh:

        @pl.when(visit.first)
        def _():
            if initial:
                acc_ref[...] = initial[0][...].astype(jnp.float32)
            else:
                acc_ref[...] = jnp.zeros_like(acc_ref)
            if call.softmax:
                top_ref, total_ref = statistics
                if initial:
                    lse = jnp.broadcast_to(initial[1][...], (LANES, q_block)).T
                    top_ref[...] = jnp.maximum(lse, MASKED)
                    total_ref[...] = jnp.where(lse > MASKED, 1.0, 0.0)
                else:
                    top_ref[...] = jnp.full_like(top_ref, MASKED)
                    total_ref[...] = jnp.zeros_like(total_ref)

    def attend_pair(seen, column):
        here = source(seen, column)
        spoilt = False if seen is None else is_spoilt(here)
        if seen == "tokens":
            finite_v[...] = finite(here.v_ref[...])
        attend(_Part([here], fresh and seen is not None and seen == walk.fresh))
        if seen is not None:
            pl.when(spoilt)(lambda: spoil(here, acc_ref))

    walk.run(visit, scalars, attend_pair)

    @pl.when(visit.last)
    def _():
        for rows in strips:
            write(out, rows)


def _as_wide(column, like):
    """A column that fills all lanes, as an operand of rows of `like`, which are as wide or need a broadcast."""
    return column if like.shape[1] == LANES else column[:, :1]
