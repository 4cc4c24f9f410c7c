"""In which order a scheduled TPU kernel visits pairs of query and KV blocks, and what hides in each pair.

With default positions the pairs follow from the indices of blocks: a causal triangle, a band, or a triangle off the
diagonal, nearest keys first; and which tiles of a pair are visible is known when tracing. So it is where the queries
are the chunks of a row that one of several devices has: a list says which blocks of the row these are, and
`PairSchedule.held_at` where the keys of a block lie. In packed rows, a table says from which column on that holds, and
where a row's document begins (`documents`). Otherwise (given positions, full rows) the pairs are a list in scalar
memory, made at run time; a pair that is not visible throughout is masked by the positions and segments of its tokens.
Where most query blocks see no key, the list names those that do (`list_rows`).

Where VMEM holds all keys of a head, the grid has a step for each query block, and the kernel itself visits the pairs.
Where it does not, the grid has a step for each pair, which costs a few hundred cycles each. The triangle is then
folded: a long row of it shares a row of the grid with a short one, so that hardly a step is empty.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.math.ring import RowOrder
from pallas_kernels.math.schedule import (
    Kind,
    Visit,
    Visits,
    bounds_of,
    flat_visits,
    fully_visible,
    kind_at,
    unpack,
    visited,
)
from pallas_kernels.math.spec import Coordinates
from pallas_kernels.tpu.schedule.documents import (
    DocumentBounds,
    RowDocuments,
    documents_of,
    in_small_blocks,
    read_bounds,
    small_block,
)
from pallas_kernels.tpu.schedule.row_list import RowList, list_rows
from pallas_kernels.tpu.tile.rotation import table_blocks
from pallas_kernels.tpu.tile.tiles import Blocked, Call, TpuOperands, batch_index, describe_tokens

# How a pair of blocks is seen: throughout; as its tokens say; or as its distance in blocks says (default positions).
Seen = None | Literal["tokens"] | int


class PairSchedule(NamedTuple):
    """The order in which a kernel visits pairs of blocks.

    Attributes:
      grid: the dimensions of the grid that belong to it.
      scalars: arrays for scalar memory.
      visit: from the indices of these dimensions and references to the scalars to where the step is. Of a resident
        schedule only the row counts, and the column of a flush.
      run: given the visit and the scalars, calls `attend(seen, column)` for the step's pairs, and for the small blocks
        of those that the edge of a document crosses `attend_small(seen, row, column, crossed)`.
      resident: whether the step has all keys of the head at hand, instead of those of the visit's column.
      is_list: whether pairs are seen as their tokens say.
      fresh: the case of every row's first pair, where that is known.
      partly: the distances in blocks of pairs seen in part that `run` leaves to the kernel.
      packed: of packed rows with default positions.
      shared: the order of a row that devices share, and its blocks of keys.
      listed: the blocks of queries that there are steps for, where these are not all.
    """

    grid: tuple[Any, ...]
    scalars: tuple[jax.Array, ...]
    visit: Callable[[Any, Any], Visit]
    run: Callable[..., None]
    resident: bool
    is_list: bool
    fresh: Seen = None
    partly: tuple[int, ...] = ()
    packed: "PackedSchedule | None" = None
    shared: "Shared | None" = None
    listed: RowList | None = None

    def in_row(self, visit: Visit, batch, scalars) -> Visit:
        """The visit, its row being that block of the row of keys."""
        if self.listed is not None:
            return self.listed.at(visit, batch, scalars)
        return visit if self.shared is None else visit._replace(row=scalars[-1][visit.row])

    def held_at(self, column):
        """Where the keys of a block of the row lie among those at hand."""
        return column if self.shared is None else self.shared.held_at(column)

    def keys_at_hand(self, call: Call, k: jax.Array) -> int:
        """How many of the keys [B, K, S, D] a step has."""
        return k.shape[2] if self.resident else call.tiles.kv_block

    def column(self, visit: Visit):
        """Which block of so many keys these are."""
        return 0 if self.resident else visit.column

    def fetched(self, visit: Visit, batch, scalars) -> Visit:
        """The visit, its row being that of the queries to fetch and its column that of the keys: none anew before those
        that these queries see.
        """
        if self.listed is not None:
            return self.listed.at(visit, batch, scalars)
        if self.packed is None or self.resident:
            return visit
        first = self.packed.bounds(scalars, batch, visit.row).first
        return visit._replace(column=jnp.maximum(visit.column, jnp.minimum(first, visit.row)))


def order_pairs(
    call: Call,
    where: Coordinates,
    *,
    resident: bool,
    flush: bool = False,
    num_active: jax.Array | None = None,
    only_plain: bool = False,
    listed: bool = False,
) -> PairSchedule:
    """The schedule of a call over its visible pairs, and with `flush` over every KV block once more behind them.

    Args:
      num_active: [] int32: query blocks behind so many are not of interest, and a schedule may leave them out.
      only_plain: leave pairs that are seen in part to the kernel; of resident schedules with default positions.
      listed: take only the query blocks that see a key, by a list; of resident schedules.
    """
    num_rows, num_columns = (where.q_pos.shape[1] // call.tiles.q_block, where.kv_pos.shape[1] // call.tiles.kv_block)
    if listed:
        some = list_rows(call, where)
        schedule = _by_row(some.most[0], num_columns, some.scalars, some.run, flush)
        return schedule._replace(is_list=True, listed=some)
    if has_default_positions(call, where) and (resident or call.order is None):
        shared = None if call.order is None else Shared(call.order, num_columns)
        reach = reach_of(call, num_columns)
        fresh = 0 if reach.partly[:1] == [0] else None
        packed = None if where.q_segment_ids is None else _packed(call, where, only_plain, shared)
        if not resident:
            schedule = _folded(reach, num_rows, flush, packed)
            return schedule._replace(fresh=fresh, packed=packed)
        left = tuple(reach.partly) if only_plain else ()
        run_reach = functools.partial(_run_reach, reach._replace(partly=[]) if only_plain else reach, packed)
        table = () if packed is None else (packed.documents.table,)
        blocks = () if shared is None else (shared.blocks_of(where, num_rows),)
        schedule = _by_row(num_rows, num_columns, (*table, *blocks), run_reach, flush)
        return schedule._replace(fresh=fresh, partly=left, packed=packed, shared=shared)
    visits = _list_pairs(call, where, flush=flush and not resident)
    if resident:
        lists = visits.pairs, visits.starts
        if num_active is None:
            return _by_row(num_rows, num_columns, lists, _run_list, flush)._replace(is_list=True)
        rows = jnp.minimum(num_active, num_rows).astype(jnp.int32)
        scalars = (*lists, rows.reshape(1))
        return _by_row(rows, num_columns, scalars, _run_list, flush)._replace(is_list=True)

    def visit(indices, scalars):
        return unpack(scalars[0][indices[0]])

    def run(visit, scalars, attend, attend_small=None):
        _run_pair(visit, attend)

    return PairSchedule((visits.used,), (visits.pairs,), visit, run, resident=False, is_list=True)


class Shared(NamedTuple):
    """A row that devices share; one of them has the queries."""

    order: RowOrder
    num_blocks: int  # of keys

    def held_at(self, block):
        return self.order.held_at(block, self.num_blocks)

    def blocks_of(self, where: Coordinates, num_rows: int) -> jax.Array:
        """Which blocks of the row the device's blocks of queries are: [num_rows] int32."""
        first = jnp.asarray(where.q_order)[0].reshape(num_rows, -1)[:, 0]
        return first // (where.kv_pos.shape[1] // self.num_blocks)


def _list_pairs(call: Call, where: Coordinates, *, flush: bool) -> Visits:
    blocks = call.tiles.q_block, call.tiles.kv_block
    table = visited(call.spec, where, *blocks, outside=call.outside)
    fully = fully_visible(call.spec, where, *blocks, outside=call.outside)
    return flat_visits(table, fully, flush=flush)


def _run_pair(visit: Visit, attend) -> None:
    """A pair of a list."""
    pl.when(visit.wanted & visit.masked)(lambda: attend("tokens", visit.column))
    pl.when(visit.wanted & ~visit.masked)(lambda: attend(None, visit.column))


def _by_row(num_rows: int | jax.Array, num_columns: int, scalars, run, flush: bool) -> PairSchedule:
    """A resident schedule: steps for query blocks and, to flush, KV blocks. A traced `num_rows` is a scalar too."""

    def visit(indices, scalars):
        (step,) = indices
        rows = num_rows if isinstance(num_rows, int) else scalars[-1][0]
        here = step < rows
        column = jnp.maximum(step - rows, 0)
        row = jnp.maximum(jnp.minimum(step, rows - 1), 0)
        return Visit(row, column, first=here, last=here, wanted=here, masked=False, flush=~here)

    def run_row(visit, scalars, attend, attend_small=None):
        batch = pl.program_id(0)
        pl.when(visit.wanted)(lambda: run(batch, visit, scalars, attend, attend_small))

    grid = (num_rows + num_columns if flush else num_rows,)
    return PairSchedule(grid, scalars, visit, run_row, resident=True, is_list=False)


def _run_list(batch, visit: Visit, scalars, attend, attend_small) -> None:
    pairs, starts = scalars[:2]

    @pl.loop(starts[visit.row], starts[visit.row + 1])
    def _(index):
        _run_pair(unpack(pairs[index]), attend)


def _run_reach(
    reach: "Reach", packed: "PackedSchedule | None", batch, visit: Visit, scalars, attend, attend_small
) -> None:
    row = visit.row
    if packed is None:
        clean: Any = 0
    else:
        first, clean = packed.bounds(scalars, batch, row)
    for seen in reach.partly:
        pl.when(row - seen >= clean)(functools.partial(attend, seen, row - seen))
    if reach.plain:

        @pl.loop(reach.plain[0], jnp.minimum(reach.plain[-1], row - clean) + 1)
        def _(blocks):
            attend(None, row - blocks)

    if packed is None:
        return
    # Where the kernel has left pairs seen in part to this, it has done none of a crossed row.
    nearest = jnp.maximum(reach.nearest, row - clean + 1)
    if packed.only_plain and reach.plain:
        nearest = jnp.where(packed.crosses_window(clean, row), reach.nearest, jnp.maximum(reach.plain[0], nearest))

    @pl.loop(nearest, jnp.minimum(reach.farthest, row - first) + 1)
    def _(blocks):
        packed.run(scalars, batch, row, row - blocks, attend_small)


class PackedSchedule(NamedTuple):
    """The side of a schedule that knows of documents.

    Attributes:
      call: that of small blocks.
      reach: the distances of small blocks.
      only_plain: small blocks that are seen in part are left to the kernel.
      window_blocks: the blocks back that a query block's window reaches, where they are.
      shared: as in `PairSchedule`.
    """

    call: Call
    documents: RowDocuments
    num_rows: int
    reach: "Reach"
    only_plain: bool
    window_blocks: int
    shared: Shared | None

    def bounds(self, scalars, batch, row) -> DocumentBounds:
        return read_bounds(scalars[0], batch, self.held_at(row), self.num_rows, self.documents.per_row)

    def held_at(self, row):
        return row if self.shared is None else self.shared.held_at(row)

    def crosses_window(self, clean, row):
        """Whether a document's edge crosses the pairs of a block of queries with the blocks of its window."""
        return clean > jnp.maximum(row - self.window_blocks, 0)

    def run(self, scalars, batch, row, column, attend_small) -> None:
        """The small blocks of a pair of blocks."""
        partly = [] if self.only_plain else self.reach.partly
        per_row = self.documents.per_row
        bounds = functools.partial(read_bounds, scalars[0], batch, self.held_at(row), self.num_rows, per_row)
        in_small_blocks(bounds, row, column, per_row, partly, self.reach.plain, attend_small)


def _packed(call: Call, where: Coordinates, only_plain: bool, shared: Shared | None) -> PackedSchedule:
    block = call.tiles.q_block
    small, num_rows = small_block(block), where.kv_pos.shape[1] // block
    tiles = dataclasses.replace(call.tiles, q_block=small, kv_block=small)
    fine = dataclasses.replace(call, tiles=tiles)
    reach = reach_of(fine, num_rows * block // small)
    back = 0 if call.spec.window is None else -(-(call.spec.window - 1) // block)
    return PackedSchedule(fine, documents_of(where, block), num_rows, reach, only_plain, back, shared)


def has_default_positions(call: Call, where: Coordinates) -> bool:
    """Whether the visible pairs follow from indices alone, but for the edges of documents."""
    return (
        call.spec.causal
        and call.spec.banded
        and (call.indexed or call.order is not None)
        and where.full_rows is None
        and call.tiles.q_block == call.tiles.kv_block
        # Sink tokens belong to the window for some rows of a block and lie outside for others.
        and call.spec.num_sink_tokens == 0
    )


def _folded(reach: "Reach", num_blocks: int, flush: bool, packed: PackedSchedule | None) -> PairSchedule:
    """A schedule with default positions and a step for each pair."""
    nearest, farthest = reach.nearest, reach.farthest
    folded = farthest == num_blocks - 1

    def length(row):  # pairs of a row
        return jnp.minimum(row, farthest) - nearest + 1

    def steps(row):  # a row without pairs has one step all the same, so that its result gets written
        return jnp.maximum(length(row), 1)

    if folded:
        whole = [max(row - nearest + 1, 1) for row in range(num_blocks)]
        half = math.ceil(num_blocks / 2)
        pairs = zip(whole[:half], whole[::-1], strict=False)
        grid = (half, max(a + b if num_blocks > 1 else a for a, b in pairs))
    else:
        grid = (num_blocks, farthest - nearest + 1)
    rows, width = grid
    last_row = rows - 1  # of a folded schedule too, which ends with the longest of its short rows
    if flush:
        grid = (rows + math.ceil(num_blocks / width), width)

    def visit(indices, scalars):
        step, index = indices
        flushed = (step - rows) * width + index
        row, idle = jnp.minimum(step, rows - 1), False
        if folded:
            long, short = num_blocks - 1 - row, row
            rest = index - steps(long)
            in_short = (rest >= 0) & (short != long)
            # An idle step behind the short row fetches what the next long row begins with.
            idle = in_short & (rest >= steps(short))
            index = jnp.where(idle, 0, jnp.where(in_short, rest, index))
            row = jnp.where(idle, long - 1, jnp.where(in_short, short, long))
        column = jnp.maximum(row - nearest - index, 0)
        visiting = step < rows
        busy = visiting & jnp.logical_not(idle)
        return Visit(
            jnp.where(visiting, row, last_row),
            jnp.where(visiting, column, jnp.clip(flushed, 0, num_blocks - 1)),
            first=busy & (index == 0),
            last=busy & (index == steps(row) - 1),
            wanted=busy & (index < length(row)),
            masked=False,
            flush=jnp.logical_not(visiting) & (flushed < num_blocks),
        )

    table = () if packed is None else (packed.documents.table,)
    run = functools.partial(_run_folded, reach, packed)
    return PairSchedule(grid, table, visit, run, resident=False, is_list=False)


def _run_folded(reach: "Reach", packed: PackedSchedule | None, visit, scalars, attend, attend_small=None) -> None:
    distance, plain = visit.row - visit.column, visit.wanted
    if packed is not None:
        batch = pl.program_id(0)
        first, clean = packed.bounds(scalars, batch, visit.row)
        plain = visit.wanted & (visit.column >= clean)
        crossed = visit.wanted & (visit.column < clean) & (visit.column >= first)
        pl.when(crossed)(lambda: packed.run(scalars, batch, visit.row, visit.column, attend_small))
    for seen in reach.partly:
        pl.when(plain & (distance == seen))(functools.partial(attend, seen, visit.column))
        plain = plain & (distance != seen)
    if reach.plain:
        pl.when(plain)(lambda: attend(None, visit.column))


class Reach(NamedTuple):
    """The distances, in blocks, of the pairs that are seen with default positions."""

    nearest: int
    farthest: int
    partly: list[int]  # seen in part
    plain: list[int]  # seen throughout: one run


def reach_of(call: Call, num_blocks: int) -> Reach:
    square = slice(0, call.tiles.q_block), slice(0, call.tiles.kv_block)
    kinds = {d: kind_of_tile(call, d, *square) for d in range(num_blocks)}
    seen = [d for d, kind in kinds.items() if kind is not Kind.NONE]
    # Where no pair is seen, a schedule still has a row of the first ones that would be.
    nearest = seen[0] if seen else num_blocks
    farthest = seen[-1] if seen else num_blocks - 1
    plain = [d for d in seen if kinds[d] is Kind.FULL]
    return Reach(nearest, farthest, [d for d in seen if d not in plain], plain)


def kind_of_tile(call: Call, distance: int, queries: slice, keys: slice) -> Kind:
    """The kind of a tile: slices of two blocks which are `distance` blocks apart."""
    return kind_at(bounds_of(call.spec, outside=call.outside), *_span(call, distance, queries, keys))


def _span(call: Call, distance: int, queries: slice, keys: slice) -> tuple[int, int]:
    """The least and greatest (query - key) of such a tile."""
    offset = distance * call.tiles.q_block
    return offset + queries.start - (keys.stop - 1), offset + queries.stop - 1 - keys.start


def seen_tiles(
    call: Call, seen: Seen, queries: slice, tile: int, keys: slice | None = None
) -> list[tuple[slice, bool]]:
    """The keys of a block that some of its pair's queries see: slices, and whether each needs a mask.

    Args:
      tile: the keys are taken so many at a time; whole ones in a row that need no mask are one slice.
      keys: of these keys of the block; all if None.
    """
    keys = keys or slice(0, call.tiles.kv_block)
    if not isinstance(seen, int):
        return [(keys, seen == "tokens")]
    found: list[tuple[slice, bool]] = []
    for start in range(keys.start, keys.stop, tile):
        here = slice(start, min(start + tile, keys.stop))
        kind = kind_of_tile(call, seen, queries, here)
        if kind is Kind.NONE:
            continue
        masked = kind is not Kind.FULL
        if found and not masked and not found[-1][1] and found[-1][0].stop == start:
            here = slice(found.pop()[0].start, here.stop)
        found.append((here, masked))
    return found


def default_mask(call: Call, seen: int, queries: slice, keys: slice, relative: jax.Array) -> jax.Array:
    """The mask of a tile with default positions.

    Args:
      relative: the tile's index of a query less that of a key, each counted from the first of its slice.
    """
    distance = seen * call.tiles.q_block + queries.start - keys.start
    least, greatest, _ = bounds_of(call.spec, outside=call.outside)
    near, far = _span(call, seen, queries, keys)
    mask = []
    if near < least:
        mask.append(relative >= least - distance)
    if far > greatest:
        mask.append(relative <= greatest - distance)
    return mask[0] if len(mask) == 1 else mask[0] & mask[1]


def token_blocks(call: Call, schedule: PairSchedule, x: TpuOperands, located: Callable) -> list[Blocked]:
    """What a launch reads of its tokens: for the masks of a list, for documents, and to rotate queries.

    Args:
      located: from a block's shape and a function of batch and visit, which says where it lies, to its spec.
    """
    tiles, blocks = call.tiles, list[Blocked]()
    if schedule.is_list:
        tokens = describe_tokens(x.where)
        by_query, by_key = (functools.partial(batch_index, info=info) for info in tokens)
        queries = located((None, 8, tiles.q_block), lambda b, visit: (by_query(b), 0, visit.row))
        keys = located(
            (None, 8, schedule.keys_at_hand(call, x.k)), lambda b, visit: (by_key(b), 0, schedule.column(visit))
        )
        blocks += [Blocked(info, at) for info, at in zip(tokens, (queries, keys), strict=True)]
    if schedule.packed is not None:
        first = located((None, 1, tiles.q_block), lambda b, visit: (b, 0, visit.row))
        blocks.append(Blocked(schedule.packed.documents.first_keys, first))
    table = (None, tiles.q_block, x.q.shape[3])
    return blocks + table_blocks(x.where, lambda row: located(table, lambda b, visit: (row(b), visit.row, 0)))
