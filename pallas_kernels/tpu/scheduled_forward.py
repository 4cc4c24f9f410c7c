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
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.nonfinite import finite, is_finite, sees_non_finite
from pallas_kernels.schedule import Visit
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
from pallas_kernels.tpu.walk import Seen, Walk, default_mask, has_default_positions, seen_tiles, walk_over
from pallas_kernels.tpu.window import Ref, window_of

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
    static = _Static(call, walk, where.q_seg is not None, where.full_rows is not None, branches, len(initial))
    return launch(
        call,
        functools.partial(_kernel, static),
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


class _Refs(NamedTuple):
    """What a step reads and writes; None or empty where the call has no such thing."""

    q: Ref  # [q_block, D]
    k: Ref  # [keys at hand, D]
    v: Ref
    initial: list[Ref]  # out and lse over other keys
    head_bias: Ref  # [8, LANES]
    q_info: Ref  # `Tokens` of the blocks
    kv_info: Ref
    window_results: list[Ref]  # out and lse of the window (branches)
    results: list[Ref]
    acc: Ref  # [q_block, D] f32
    finite_v: Ref  # [kv_block, D] (lists)
    spoilt: Ref  # [1] int32 (branches)
    statistics: list[Ref]  # the running maximum and sum, [q_block, LANES] f32, all lanes alike


class _Static(NamedTuple):
    """What is known of a kernel when tracing."""

    call: Call
    walk: Walk
    has_segments: bool
    has_full_rows: bool
    branches: bool
    num_initial: int

    @property
    def fresh(self) -> bool:
        """Whether the first pair of a row is known, and has nothing to add to."""
        return self.walk.fresh is not None and not self.num_initial and not self.branches

    @property
    def may_be_empty(self) -> bool:
        """Whether a row may see no key."""
        return self.walk.is_list or not (self.fresh or self.num_initial or self.branches)

    def name_refs(self, refs) -> _Refs:
        call, is_list = self.call, self.walk.is_list
        (q, k, v), initial, rest = split(refs, 3, self.num_initial)
        head_bias, q_info, kv_info, rest = take(rest, call.has_slopes or call.has_bias, is_list, is_list)
        num_results = 2 if call.softmax else 1
        window, results, (acc, *rest) = split(rest, num_results if self.branches else 0, num_results)
        finite_v, spoilt, statistics = take(rest, is_list, self.branches)
        return _Refs(
            q, k, v, initial, head_bias, q_info, kv_info, window, results, acc, finite_v, spoilt, statistics
        )


class _Source(NamedTuple):
    """A block of keys, and how the queries see it."""

    call: Call
    seen: Seen
    column: Any
    k_ref: Ref
    v_ref: Ref
    kv_info: Ref


class _Stage(NamedTuple):
    """Keys that are attended to at once."""

    sources: list[_Source]
    fresh: bool = False  # nothing was attended to before
    results: Any = None  # where to write what there is then


class _Tile(NamedTuple):
    logits: jax.Array  # [strip, keys]
    value_ref: Ref  # [keys, D]
    unclean: bool  # of the values behind a mask, those that are not finite are still to be taken as zero

    def value(self) -> jax.Array:
        return finite(self.value_ref[...]) if self.unclean else self.value_ref[...]


def _kernel(static, order, *unnamed):
    walk = static.walk
    scalars, rest = split(unnamed, len(walk.scalars))
    visit = walk.visit([pl.program_id(2 + i) for i in range(len(walk.grid))], scalars)
    refs = static.name_refs(rest)
    slope_and_bias = None
    if refs.head_bias is not None:
        slope_and_bias = refs.head_bias[0:1, 0:1], refs.head_bias[1:2, 0:1]
    step = _Step(static, refs, visit, slope_and_bias)
    if static.branches:
        step.attend_window()
    elif not static.fresh:
        pl.when(visit.first)(step.begin)
    walk.run(visit, scalars, step.attend_pair)

    @pl.when(visit.last)
    def _():
        for rows in step.strips:
            step.write(refs.results, rows)


@dataclasses.dataclass(frozen=True, eq=False)
class _Step:
    """A step of the grid: a block of queries."""

    static: _Static
    refs: _Refs
    visit: Visit
    slope_and_bias: tuple[jax.Array, jax.Array] | None

    @property
    def call(self) -> Call:
        return self.static.call

    @property
    def strip(self) -> int:
        return math.gcd(self.call.tiles.strip, self.call.tiles.q_block)

    @property
    def tile(self) -> int:
        return math.gcd(self.call.tiles.tile, self.call.tiles.kv_block)

    @property
    def strips(self) -> list[slice]:
        return [slice(at, at + self.strip) for at in range(0, self.call.tiles.q_block, self.strip)]

    def begin(self) -> None:
        """Before a row's first pair: nothing is accumulated, or the initial results are."""
        refs = self.refs
        if refs.initial:
            refs.acc[...] = refs.initial[0][...].astype(jnp.float32)
        else:
            refs.acc[...] = jnp.zeros_like(refs.acc)
        if not self.call.softmax:
            return
        top_ref, total_ref = refs.statistics
        if refs.initial:
            lse = jnp.broadcast_to(refs.initial[1][...], (LANES, self.call.tiles.q_block)).T
            top_ref[...] = jnp.maximum(lse, MASKED)
            total_ref[...] = jnp.where(lse > MASKED, 1.0, 0.0)
        else:
            top_ref[...] = jnp.full_like(top_ref, MASKED)
            total_ref[...] = jnp.zeros_like(total_ref)

    def attend_window(self) -> None:
        """The window's blocks, whose results are written, and those of their keys outside the window."""
        call, refs, walk, row = self.call, self.refs, self.static.walk, self.visit.row
        window = dataclasses.replace(call, outside=False)
        last = -(-(window_of(call) - 1) // call.tiles.kv_block)

        def attend(blocks: list[_Source], beyond: list[_Source]) -> None:
            stages = _Stage(blocks, True, refs.window_results), _Stage(beyond)
            refs.spoilt[0] = self.attend(*stages, suspects=blocks).astype(jnp.int32)

        for farthest in range(last + 1):  # the first rows lack blocks before the sequence
            blocks = [self.source(back, row - back, window) for back in range(farthest, -1, -1)]
            beyond = [self.source(back, row - back, call) for back in walk.partly if back <= farthest]
            here = row == farthest if farthest < last else row >= farthest
            pl.when(here)(functools.partial(attend, blocks, beyond))

        @pl.when(refs.spoilt[0] != 0)
        def _():
            everything = dataclasses.replace(window, spec=dataclasses.replace(call.spec, window=None))

            @pl.loop(0, jnp.minimum(row, last) + 1)
            def _(back):
                self.spoil(self.source(None, row - back, window), refs.window_results[0])
                self.spoil(self.source(None, row - back, everything), refs.acc)

    def attend_pair(self, seen: Seen, column) -> None:
        """Adds the keys of a block."""
        static, refs = self.static, self.refs
        here = self.source(seen, column, self.call)
        if seen == "tokens":
            refs.finite_v[...] = finite(here.v_ref[...])
        stage = _Stage([here], static.fresh and seen is not None and seen == static.walk.fresh)
        spoilt = self.attend(stage, suspects=[] if seen is None else [here])
        if seen is not None:
            pl.when(spoilt)(lambda: self.spoil(here, refs.acc))

    def source(self, seen: Seen, column, call: Call) -> _Source:
        arrays = self.refs.k, self.refs.v, self.refs.kv_info
        if self.static.walk.resident:
            block = call.tiles.kv_block
            keys = pl.ds(pl.multiple_of(column * block, block), block)
            kv_info = arrays[2].at[:, keys] if self.static.walk.is_list else None
            arrays = arrays[0].at[keys, :], arrays[1].at[keys, :], kv_info
        return _Source(call, seen, column, *arrays)

    def attend(self, *stages: _Stage, suspects: Sequence[_Source] = ()) -> Any:
        """Adds the keys of each stage in turn, in one pipeline, and writes what there is then.

        Returns whether a value of the suspects is not finite: asked half way, for the answer to be there at the end.
        """
        turns = [(rows, stage) for stage in stages for rows in self.strips]
        ahead: Any = None
        spoilt: Any = False
        for i, (rows, stage) in enumerate(turns):
            tiles, top = ahead or self.score(stage.sources, rows)
            if i + 1 < len(turns):
                next_rows, next_stage = turns[i + 1]
                ahead = self.score(next_stage.sources, next_rows)
            if suspects and i == len(self.strips) // 2:
                spoilt = functools.reduce(jnp.logical_or, map(_is_spoilt, suspects))
            self.accumulate(rows, tiles, top, stage.fresh)
            if stage.results is not None:
                self.write(stage.results, rows)
        return spoilt

    def score(self, sources: list[_Source], rows: slice) -> tuple[list[_Tile], jax.Array | None]:
        """The tiles that a strip sees and, for softmax, the greatest logit of each row in them."""
        tiles = [
            self.score_tile(source, rows, keys, masked)
            for source in sources
            for keys, masked in seen_tiles(source.call, source.seen, rows, self.tile)
        ]
        top = None
        if self.call.softmax and tiles:
            top = over_lanes(jnp.maximum, [tile.logits for tile in tiles]).max(axis=1, keepdims=True)
        return tiles, top

    def score_tile(self, source: _Source, rows: slice, keys: slice, masked: bool) -> _Tile:
        call, is_list = self.call, self.static.walk.is_list
        s = dot(self.refs.q[rows, :], source.k_ref[keys, :], NT)  # [strip, keys]
        query, key = self.describe(source, rows, keys)
        s, _ = form_logits(call, s, functools.partial(addend_at, call, query, key, self.slope_and_bias))
        if masked and is_list:
            s = jnp.where(self.mask_by_token(call, query, key, s.shape), s, MASKED)
        elif masked:
            relative = lax.broadcasted_iota(jnp.int32, s.shape, 0)
            relative -= lax.broadcasted_iota(jnp.int32, s.shape, 1)
            assert isinstance(source.seen, int)  # a pair that is seen throughout has no mask
            s = jnp.where(default_mask(source.call, source.seen, rows, keys, relative), s, MASKED)
        value_ref = self.refs.finite_v if masked and is_list else source.v_ref
        return _Tile(s, value_ref.at[keys, :], masked and not is_list)

    def describe(self, source: _Source, rows: slice, keys: slice) -> tuple[list, list]:
        """The properties of the queries, as columns, and of the keys, as rows."""
        if self.static.walk.is_list:
            info = self.refs.q_info[...].T  # [q_block, 8]
            query = [info[rows, i : i + 1] for i in range(3)]
            return query, [source.kv_info[i : i + 1, keys] for i in range(2)]
        first = (self.visit.row - source.column) * self.call.tiles.q_block + rows.start - keys.start
        distance = lax.broadcasted_iota(jnp.int32, (self.strip, 1), 0) + first
        return [distance], [lax.broadcasted_iota(jnp.int32, (1, keys.stop - keys.start), 1)]

    def mask_by_token(self, call: Call, query: list, key: list, shape: tuple[int, ...]) -> jax.Array:
        return tile_mask(call, self.static.has_segments, self.static.has_full_rows, query, key, shape)

    def accumulate(self, rows: slice, tiles: list[_Tile], top, fresh: bool) -> None:
        """Adds a strip's tiles to what it has; if `fresh`, there is nothing yet."""
        if not tiles:
            return
        acc_ref = self.refs.acc
        if not self.call.softmax:
            more = sum(sigmoid_values(sigmoid_weights(tile.logits), tile.value()) for tile in tiles)
            acc_ref[rows, :] = more if fresh else acc_ref[rows, :] + more
            return
        top_ref, total_ref = self.refs.statistics
        acc: Any = 0.0
        total: Any = 0.0
        new = jnp.broadcast_to(top, (self.strip, LANES))  # all lanes alike
        if not fresh:
            old = top_ref[rows, :]
            new = jnp.maximum(old, top)
            decay = jnp.exp2(old - new)
            acc, total = acc_ref[rows, :] * _as_wide(decay, acc_ref), total_ref[rows, :] * decay
        sum_on_mxu = self.call.tiles.sum_on_mxu and acc_ref.shape[1] % LANES == 0
        sums = []
        for tile in tiles:
            weights, value = jnp.exp2(tile.logits - new[:, :1]), tile.value()
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

    def write(self, results: list[Ref], rows: slice) -> None:
        acc_ref = self.refs.acc
        if not self.call.softmax:
            results[0][rows, :] = acc_ref[rows, :].astype(results[0].dtype)
            return
        top, total = (_as_wide(ref[rows, :], acc_ref) for ref in self.refs.statistics)
        out_ref, lse_ref = results
        write_softmax(out_ref, lse_ref, rows, acc_ref[rows, :], top, total, self.static.may_be_empty)

    def spoil(self, source: _Source, result_ref: Ref) -> None:
        """Writes NaN where a query sees a value that is not finite. Hardly ever run, so short and slow."""
        strip, tile = self.strip, self.tile
        q_block, kv_block = self.call.tiles.q_block, self.call.tiles.kv_block

        @pl.loop(0, q_block // strip * (kv_block // tile))
        def _(i):
            row, column = lax.rem(i, q_block // strip) * strip, lax.div(i, q_block // strip) * tile
            rows = pl.ds(pl.multiple_of(row, strip), strip)
            keys = pl.ds(pl.multiple_of(column, tile), tile)
            if self.static.walk.is_list:
                info = self.refs.q_info[:, rows].T  # [strip, 8]
                query = [info[:, j : j + 1] for j in range(3)]
                key = [source.kv_info[j : j + 1, keys] for j in range(2)]
            else:
                first = (self.visit.row - source.column) * q_block + row - column
                query = [lax.broadcasted_iota(jnp.int32, (strip, 1), 0) + first] * 3
                key = [lax.broadcasted_iota(jnp.int32, (1, tile), 1)] * 2
            seen = self.mask_by_token(source.call, query, key, (strip, tile))
            hit = sees_non_finite(seen, source.v_ref[keys, :])
            result_ref[rows, :] = jnp.where(hit, jnp.nan, result_ref[rows, :])


def _is_spoilt(source: _Source) -> jax.Array:
    """Whether a value is not finite (or their sum is not, which costs time only)."""
    ones = jnp.ones((8, source.call.tiles.kv_block), source.v_ref.dtype)
    return jnp.any(~is_finite(dot(ones, source.v_ref[...], NN)))


def _as_wide(column, like):
    """A column that fills all lanes, as an operand of rows of `like`, which are as wide or need a broadcast."""
    return column if like.shape[1] == LANES else column[:, :1]
