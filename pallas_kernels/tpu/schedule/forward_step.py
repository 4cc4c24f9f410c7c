"""A step of the scheduled TPU kernels' forward pass: a block of queries, and the keys that it attends to.

The order of the program is the software pipeline: the products q.k of one strip of queries stand before the
exponentials of the strip before it. A pair of blocks that the edge of a document crosses is taken in small blocks, each
a step of its own over parts of the same arrays.

Where tiles have a mask, values that are not finite are taken as zero (a pair whose tokens decide has a copy of them for
all its strips). One sum over a pair's values says whether there are any; then `mark_nan` makes NaN of the rows
that see them.
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

from pallas_kernels.math.nonfinite import finite, is_finite, sees_non_finite
from pallas_kernels.math.schedule import Visit
from pallas_kernels.tpu.schedule.pair_schedule import PairSchedule, Seen, default_mask, seen_tiles
from pallas_kernels.tpu.tile.tiles import (
    LANES,
    MASKED,
    NN,
    NT,
    Call,
    Ref,
    addend_at,
    beside_ones,
    dot,
    form_logits,
    over_lanes,
    own_columns,
    sees_nothing,
    sigmoid_values,
    sigmoid_weights,
    split,
    stored,
    take,
    tile_mask,
    window_of,
)

AHEAD = 2  # strips whose logits are on their way in VMEM before the weights of one are taken


class ForwardRefs(NamedTuple):
    """What a step reads and writes; None or empty where the call has no such thing."""

    q: Ref  # [q_block, D]
    k: Ref  # [keys at hand, D]
    v: Ref  # [keys at hand, `read_width`]
    initial: list[Ref]  # out and lse over other keys
    head_bias: Ref  # [8, LANES]
    q_info: Ref  # `describe_tokens` of the blocks
    kv_info: Ref
    first_keys: Ref  # [1, q_block]: `RowDocuments.first_keys` (packed)
    cos: Ref  # [q_block, D], of queries that are to be rotated
    sin: Ref
    window_results: list[Ref]  # out and lse of the window (branches)
    results: list[Ref]
    acc: Ref  # [q_block, `read_width`] f32
    finite_v: Ref  # [kv_block, `read_width`] (lists)
    nonfinite: Ref  # [1] int32 (branches)
    rotated_q: Ref  # [q_block, D]
    logits: Ref  # [AHEAD + 1, strip, keys attended to at once] f32 (`ForwardStatic.stores_logits`)
    statistics: list[Ref]  # the running maximum and sum, [q_block, LANES] f32, all lanes alike


class ForwardStatic(NamedTuple):
    """What is known of a kernel when tracing."""

    call: Call
    schedule: PairSchedule
    has_segments: bool
    has_full_rows: bool
    branches: bool
    num_initial: int

    @property
    def fresh(self) -> bool:
        """Whether the first pair of a row is known, and has nothing to add to."""
        return self.schedule.fresh is not None and not self.num_initial and not self.branches

    @property
    def may_be_empty(self) -> bool:
        """Whether a row may see no key."""
        known = self.fresh or self.num_initial or self.branches
        return self.schedule.is_list or self.schedule.packed is not None or not known

    @property
    def stores_logits(self) -> bool:
        """Whether logits are `stored`. Where the matrix unit is 128 wide, that costs more than it saves (v5e: 1 %)."""
        return self.call.sums_on_mxu

    def name_refs(self, refs) -> ForwardRefs:
        call, is_list, packed = self.call, self.schedule.is_list, self.schedule.packed is not None
        (q, k, v), initial, rest = split(refs, 3, self.num_initial)
        rotated = call.rotated_by > 0
        head_bias, q_info, kv_info, first, cos, sin, rest = take(
            rest, call.has_head_bias, is_list, is_list, packed, rotated, rotated
        )
        num_results = 2 if call.softmax else 1
        window, results, (acc, *rest) = split(rest, num_results if self.branches else 0, num_results)
        finite_v, nonfinite, rotated_q, logits, statistics = take(
            rest, is_list, self.branches, rotated, self.stores_logits
        )
        inputs = q, k, v, initial, head_bias, q_info, kv_info, first, cos, sin
        return ForwardRefs(*inputs, window, results, acc, finite_v, nonfinite, rotated_q, logits, statistics)


class _Source(NamedTuple):
    """A block of keys, and how the queries see it."""

    call: Call
    seen: Seen
    column: Any
    k_ref: Ref
    v_ref: Ref
    kv_info: Ref
    crossed: bool = False  # the edge of a document may lie between queries and keys


class _Stage(NamedTuple):
    """Keys that are attended to at once."""

    sources: list[_Source]
    fresh: bool = False  # nothing was attended to before
    results: Any = None  # where to write what there is then


class _StripTile(NamedTuple):
    logits: Any  # [strip, keys], or where they are stored
    value_ref: Ref  # [keys, D]
    head_dim: int
    unclean: bool  # of the values behind a mask, those that are not finite are still to be taken as zero

    def value(self) -> jax.Array:
        return own_columns(finite(self.value_ref[...]) if self.unclean else self.value_ref[...], self.head_dim)


@dataclasses.dataclass(frozen=True, eq=False)
class ForwardStep:
    """A step of the grid: a block of queries."""

    static: ForwardStatic
    refs: ForwardRefs
    visit: Visit
    slope_and_bias: tuple[jax.Array, jax.Array] | None
    whole: Visit | None = None  # that of the step whose small block this is

    @property
    def call(self) -> Call:
        return self.static.call

    @property
    def head_dim(self) -> int:
        return self.refs.q.shape[1]

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
            refs.acc[:, : self.head_dim] = refs.initial[0][...].astype(jnp.float32)
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

    def attend_window(self, clean) -> None:
        """The window's blocks, whose results are written, and those of their keys outside the window.

        Args:
          clean: `Bounds.clean` of the row.
        """
        packed, last = self.static.schedule.packed, self.blocks_back
        for farthest in range(last + 1):  # the first rows lack blocks before the sequence
            here = self.visit.row == farthest if farthest < last else self.visit.row >= farthest
            here = here if packed is None else here & ~packed.crosses_window(clean, self.visit.row)
            pl.when(here)(functools.partial(self.attend_branches, farthest, self.static.schedule.partly))
        if packed is None:
            return

        @pl.when(packed.crosses_window(clean, self.visit.row))
        def _():
            @pl.loop(0, packed.documents.per_row)
            def _(i):
                step = self.small(self.visit.row * packed.documents.per_row + i)
                step.attend_branches(step.blocks_back, packed.reach.partly, crossed=True)

    @property
    def blocks_back(self) -> int:
        return -(-(window_of(self.call) - 1) // self.call.tiles.kv_block)

    def attend_branches(self, farthest: int, partly: Sequence[int], crossed: bool = False) -> None:
        """The blocks of the window as far back as `farthest`, then the keys outside of pairs seen in part."""
        call, refs, row = self.call, self.refs, self.visit.row
        window = dataclasses.replace(call, outside=False)
        blocks = [self.source(back, row - back, window, crossed) for back in range(farthest, -1, -1)]
        past = [self.source(back, row - back, call, crossed) for back in partly if back <= farthest]
        stages = _Stage(blocks, True, refs.window_results), _Stage(past)
        refs.nonfinite[0] = self.attend(*stages, suspects=blocks).astype(jnp.int32)

        @pl.when(refs.nonfinite[0] != 0)
        def _():
            everything = dataclasses.replace(window, spec=call.spec.full)

            @pl.loop(0, jnp.minimum(row, farthest) + 1)
            def _(back):
                self.mark_nan(self.source(None, row - back, window, crossed), refs.window_results[0])
                self.mark_nan(self.source(None, row - back, everything, crossed), refs.acc)

    def attend_pair(self, seen: Seen, column, crossed: bool = False) -> None:
        """Adds the keys of a block."""
        static, refs = self.static, self.refs
        here = self.source(seen, column, self.call, crossed)
        if seen == "tokens":
            refs.finite_v[...] = finite(here.v_ref[...])
        fresh = static.fresh and not crossed and seen is not None and seen == static.schedule.fresh
        masked = seen is not None or crossed
        nonfinite = self.attend(_Stage([here], fresh), suspects=[here] if masked else [])
        if masked:
            pl.when(nonfinite)(lambda: self.mark_nan(here, refs.acc))

    def attend_small(self, seen: Seen, row, column, crossed: bool) -> None:
        """Adds the keys of a small block for those queries of another."""
        self.small(row).attend_pair(seen, column, crossed)

    def small(self, row) -> "ForwardStep":
        """The step for a small block of its queries."""
        packed = self.static.schedule.packed
        assert packed is not None
        size, refs = packed.call.tiles.q_block, self.refs
        at = pl.ds(pl.multiple_of((row - self.visit.row * packed.documents.per_row) * size, size), size)

        def part(results: list[Ref]) -> list[Ref]:
            return [ref.at[at, :] if i == 0 else ref.at[:, at] for i, ref in enumerate(results)]

        refs = refs._replace(
            q=refs.q.at[at, :],
            first_keys=refs.first_keys.at[:, at],
            window_results=part(refs.window_results),
            results=part(refs.results),
            acc=refs.acc.at[at, :],
            statistics=[ref.at[at, :] for ref in refs.statistics or []],
        )
        static, visit = self.static._replace(call=packed.call), self.visit._replace(row=row)
        return dataclasses.replace(self, static=static, refs=refs, visit=visit, whole=self.visit)

    def source(self, seen: Seen, column, call: Call, crossed: bool = False) -> _Source:
        """The keys of a block; in a crossed pair it may lie before the sequence, where no query sees a key."""
        arrays = self.refs.k, self.refs.v, self.refs.kv_info
        schedule, block = self.static.schedule, call.tiles.kv_block
        if schedule.resident or self.whole is not None:
            at = self.held_at(jnp.maximum(column, 0) if crossed else column) * block
            if not schedule.resident:
                assert self.whole is not None
                assert schedule.packed is not None
                at -= self.whole.column * schedule.packed.documents.per_row * block
            keys = pl.ds(pl.multiple_of(at, block), block)
            kv_info = arrays[2].at[:, keys] if self.static.schedule.is_list else None
            arrays = arrays[0].at[keys, :], arrays[1].at[keys, :], kv_info
        return _Source(call, seen, column, *arrays, crossed)

    def held_at(self, column):
        """Where the keys of a block, or of a small one, of the row lie among those at hand, in such blocks."""
        schedule = self.static.schedule
        if self.whole is None or schedule.shared is None:
            return schedule.held_at(column)
        assert schedule.packed is not None
        per_row = schedule.packed.documents.per_row
        block = lax.div(column, per_row)
        return schedule.held_at(block) * per_row + column - block * per_row

    def attend(self, *stages: _Stage, suspects: Sequence[_Source] = ()) -> Any:
        """Adds the keys of each stage in turn, in one pipeline, and writes what there is then.

        Returns whether a value of the suspects is not finite: asked half way, for the answer to be there at the end.
        """
        pieces = [(rows, stage) for stage in stages for rows in self.strips]
        nonfinite: Any = False
        num_ahead = AHEAD if self.static.stores_logits else 1
        ahead = [self.score(stage.sources, rows, i) for i, (rows, stage) in enumerate(pieces[:num_ahead])]
        for i, (rows, stage) in enumerate(pieces):
            if (later := i + num_ahead) < len(pieces):
                next_rows, next_stage = pieces[later]
                ahead.append(self.score(next_stage.sources, next_rows, later))
            tiles, top = ahead.pop(0)
            if suspects and i == len(self.strips) // 2:
                nonfinite = functools.reduce(jnp.logical_or, map(_has_nonfinite, suspects))
            self.accumulate(rows, tiles, top, stage.fresh)
            if stage.results is not None:
                self.write(stage.results, rows)
        return nonfinite

    def score(self, sources: list[_Source], rows: slice, number: int) -> tuple[list[_StripTile], jax.Array | None]:
        """The tiles that a strip sees and, for softmax, the greatest logit of each row in them."""
        tiles = [
            self.score_tile(source, rows, keys, masked)
            for source in sources
            for keys, masked in seen_tiles(source.call, source.seen, rows, self.tile)
        ]
        top = None
        if self.call.softmax and tiles:
            top = over_lanes(jnp.maximum, [tile.logits for tile in tiles]).max(axis=1, keepdims=True)
            if self.static.stores_logits:
                tiles = stored(self.refs.logits.at[number % (AHEAD + 1)], tiles)
        return tiles, top

    def score_tile(self, source: _Source, rows: slice, keys: slice, masked: bool) -> _StripTile:
        call, is_list = self.call, self.static.schedule.is_list
        s = dot(self.refs.q[rows, :], source.k_ref[keys, :], NT)  # [strip, keys]
        query, key = self.describe(source, rows, keys)
        s, _ = form_logits(call, s, functools.partial(addend_at, call, query, key, self.slope_and_bias))
        if masked and is_list:
            s = jnp.where(self.mask_by_token(call, query, key, s.shape), s, MASKED)
            return _StripTile(s, self.refs.finite_v.at[keys, :], self.head_dim, False)
        masks = []
        if masked:
            relative = lax.broadcasted_iota(jnp.int32, s.shape, 0)
            relative -= lax.broadcasted_iota(jnp.int32, s.shape, 1)
            assert isinstance(source.seen, int)  # a pair that is seen throughout has no mask
            masks.append(default_mask(source.call, source.seen, rows, keys, relative))
        if source.crossed:
            masks.append(self.in_document(source, rows, keys))
        for mask in masks:
            s = jnp.where(mask, s, MASKED)
        return _StripTile(s, source.v_ref.at[keys, :], self.head_dim, bool(masks))

    def in_document(self, source: _Source, rows: slice, keys: slice) -> jax.Array:
        """Which keys of a tile do not lie before the document of each query: [strip, keys] bool."""
        first = jnp.broadcast_to(self.refs.first_keys[:, rows], (8, self.strip)).T[:, :1]
        at = source.column * self.call.tiles.kv_block + keys.start
        return lax.broadcasted_iota(jnp.int32, (self.strip, keys.stop - keys.start), 1) >= first - at

    def describe(self, source: _Source, rows: slice, keys: slice) -> tuple[list, list]:
        """The properties of the queries, as columns, and of the keys, as rows."""
        if self.static.schedule.is_list:
            info = self.refs.q_info[...].T  # [q_block, 8]
            query = [info[rows, i : i + 1] for i in range(3)]
            return query, [source.kv_info[i : i + 1, keys] for i in range(2)]
        first = (self.visit.row - source.column) * self.call.tiles.q_block + rows.start - keys.start
        distance = lax.broadcasted_iota(jnp.int32, (self.strip, 1), 0) + first
        return [distance], [lax.broadcasted_iota(jnp.int32, (1, keys.stop - keys.start), 1)]

    def mask_by_token(self, call: Call, query: list, key: list, shape: tuple[int, ...]) -> jax.Array:
        return tile_mask(call, self.static.has_segments, self.static.has_full_rows, query, key, shape)

    def accumulate(self, rows: slice, tiles: list[_StripTile], top, fresh: bool) -> None:
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
        sums = []
        for tile in tiles:
            weights, value = jnp.exp2(tile.logits[...] - new[:, :1]), tile.value()
            if self.call.tiles.sum_on_mxu:
                product = dot(weights.astype(value.dtype), beside_ones(value), NN)
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
        out_ref, lse_ref = results
        top, total = (_as_wide(ref[rows, :], acc_ref) for ref in self.refs.statistics)
        out = acc_ref[rows, :] * (1 / total)
        if self.static.may_be_empty:
            out = jnp.where(sees_nothing(top), 0, out)
        out_ref[rows, :] = out[:, : self.head_dim].astype(out_ref.dtype)
        if rows == self.strips[-1]:
            self.write_lse(lse_ref)

    def write_lse(self, lse_ref: Ref) -> None:
        """Writes the lse of all strips, in base 2: one logarithm and one transpose, with a lane for each strip."""
        lane = lax.broadcasted_iota(jnp.int32, (self.strip, LANES), 1)

        def by_lane(ref: Ref) -> jax.Array:
            column = ref[self.strips[0], :]
            for i, rows in enumerate(self.strips):
                column = jnp.where(lane == i, ref[rows, :], column)
            return column

        top, total = map(by_lane, self.refs.statistics)
        lse = top + jnp.log2(total)
        if self.static.may_be_empty:
            lse = jnp.where(sees_nothing(top), -jnp.inf, lse)
        lse = lse.T  # [strips, strip]
        for i, rows in enumerate(self.strips):
            lse_ref[:, rows] = lse[i : i + 1]

    def mark_nan(self, source: _Source, result_ref: Ref) -> None:
        """Writes NaN where a query sees a value that is not finite. Hardly ever run, so short and slow."""
        strip, tile = self.strip, self.tile
        q_block, kv_block = self.call.tiles.q_block, self.call.tiles.kv_block

        @pl.loop(0, q_block // strip * (kv_block // tile))
        def _(i):
            row, column = lax.rem(i, q_block // strip) * strip, lax.div(i, q_block // strip) * tile
            rows = pl.ds(pl.multiple_of(row, strip), strip)
            keys = pl.ds(pl.multiple_of(column, tile), tile)
            if self.static.schedule.is_list:
                info = self.refs.q_info[:, rows].T  # [strip, 8]
                query = [info[:, j : j + 1] for j in range(3)]
                key = [source.kv_info[j : j + 1, keys] for j in range(2)]
            else:
                first = (self.visit.row - source.column) * q_block + row - column
                query = [lax.broadcasted_iota(jnp.int32, (strip, 1), 0) + first] * 3
                key = [lax.broadcasted_iota(jnp.int32, (1, tile), 1)] * 2
            seen = self.mask_by_token(source.call, query, key, (strip, tile))
            if source.crossed:
                first = jnp.broadcast_to(self.refs.first_keys[:, rows], (8, strip)).T[:, :1]
                seen &= key[0] >= first - (source.column * kv_block + column)
            hit = sees_non_finite(seen, source.v_ref[keys, :])
            result = result_ref[rows, :]
            result_ref[rows, :] = jnp.where(hit[:, : result.shape[1]], jnp.nan, result)


def _has_nonfinite(source: _Source) -> jax.Array:
    """Whether a value is not finite (or their sum is not, which costs time only)."""
    ones = jnp.ones((8, source.call.tiles.kv_block), source.v_ref.dtype)
    return jnp.any(~is_finite(dot(ones, own_columns(source.v_ref[...], source.k_ref.shape[1]), NN)))


def _as_wide(column, like):
    """A column that fills all lanes, as an operand of rows of `like`."""
    times, rest = divmod(like.shape[1], LANES)
    return column[:, :1] if rest else jnp.concatenate([column] * times, axis=1)
