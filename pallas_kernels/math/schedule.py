"""The mask planner: for each tile (a block of queries by a block of keys), whether it is visited and how it is masked.

Every kernel goes by one `Kind` for each tile, which follows from `spec.visible` in one of three ways:

* from distances (`bounds_of`, `kind_at`), where tokens lie at their index: the tile's least and greatest query - key
  decide, and are known when tracing. The TPU kernels with default positions go by this;
* from tokens (`visited`, `fully_visible`), where positions, segments or full rows are data. The test is made on blocks,
  from the least and greatest position, order and segment id in each (O(blocks^2) work, no [T, S] array), so it may
  visit a block in which no pair is visible but never misses one that has a visible pair. For default positions it is
  exact. XLA's loops, the TPU kernels' lists and the GPU kernels' loop bounds are made from these tables;
* from every pair (`visited_in_decode`), where the queries are the few of a decoding step. It is exact where a ring of
  entries has wrapped round inside a block, whose least and greatest position say little.
"""

import enum
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.math.spec import AttentionSpec, Coordinates, dense_mask


class Kind(enum.Enum):
    """How the queries of a tile see its keys."""

    NONE = "none"  # not at all: the tile is not visited
    FULL = "full"  # all of them see all: no mask
    DIAGONAL = "diagonal"  # cut by causality: a key that comes later is not seen
    EDGE = "edge"  # cut by the window's far end
    BOTH = "diagonal and edge"
    BY_TOKEN = "by token"  # positions, segments and full rows say


class Bounds(NamedTuple):
    """The least and greatest distance (query - key) that is seen where tokens lie at their index and all is causal."""

    least: int
    greatest: int
    outside: bool


def bounds_of(spec: AttentionSpec, *, outside: bool = False) -> Bounds:
    """Sink tokens aside.

    Args:
      outside: of the keys that full attention sees and `spec` does not.
    """
    never = np.iinfo(np.int32).max // 2
    if outside:
        return Bounds(never if spec.window is None else spec.window, never, outside)
    return Bounds(0, never if spec.window is None else spec.window - 1, outside)


def kind_at(bounds: Bounds, near: int, far: int) -> Kind:
    """The kind of a tile whose distances (query - key) run from `near` to `far`."""
    least, greatest, outside = bounds
    if far < least or near > greatest:
        return Kind.NONE
    cut = (near < least, far > greatest)
    if outside:
        cut = cut[::-1]  # what is outside begins at the window's far end
    return {(False, False): Kind.FULL, (True, False): Kind.DIAGONAL, (False, True): Kind.EDGE}.get(cut, Kind.BOTH)


class Schedule(NamedTuple):
    """The visits of each query block, in increasing order of KV block."""

    blocks: jax.Array  # [nq, nk] int32; the first `counts` of a row are the blocks to visit
    counts: jax.Array  # [nq] int32


class _Extent(NamedTuple):
    """The span of a block's tokens, or of a subset of them; empty where least > greatest."""

    least: jax.Array  # [B, blocks] order
    greatest: jax.Array
    least_segment: jax.Array
    greatest_segment: jax.Array


def schedule_pairs(
    spec: AttentionSpec, where: Coordinates, q_block: int, kv_block: int, *, outside: bool = False
) -> Schedule:
    """Lists the KV blocks of every query block; a block that any row of the batch needs is visited for all of them.

    Args:
      where: coordinates whose lengths are multiples of the blocks.
      outside: list the keys that full attention sees and `spec` does not, instead of those that `spec` sees.
    """
    table = visited(spec, where, q_block, kv_block, outside=outside)
    blocks = jnp.argsort(~table, axis=1, stable=True).astype(jnp.int32)  # the True entries of each row in its front
    return Schedule(blocks, table.sum(axis=1, dtype=jnp.int32))


def visited(
    spec: AttentionSpec, where: Coordinates, q_block: int, kv_block: int, *, outside: bool = False
) -> jax.Array:
    """[nq, nk] bool: the pairs of blocks whose kind is not NONE in some row of the batch."""
    return visited_by_row(spec, where, q_block, kv_block, outside=outside).any(axis=0)


def visited_by_row(
    spec: AttentionSpec, where: Coordinates, q_block: int, kv_block: int, *, outside: bool = False
) -> jax.Array:
    """`visited`, for each row of the batch: [B or 1, nq, nk] bool."""
    q_real, kv_real = where.q_pos >= 0, where.kv_pos >= 0
    q_full = jnp.zeros_like(q_real) if where.full_rows is None else q_real & where.full_rows
    kv = _extent(where.kv_order, where.kv_segment_ids, kv_real, kv_block)
    if spec.window is None:
        table = _reachable(spec, _extent(where.q_order, where.q_segment_ids, q_real, q_block), kv)
        return jnp.zeros_like(table) if outside else table

    q = _extent(where.q_order, where.q_segment_ids, q_real & ~q_full, q_block)
    nearest, farthest = _distances(q, kv)
    if not spec.banded:
        nearest, farthest = _place_distances(spec, where, q_real & ~q_full, kv_real, q_block, kv_block)
    near, past = nearest < spec.reach, farthest >= spec.reach
    if not spec.causal:
        near, past = near & (-farthest < spec.reach), past | (-nearest >= spec.reach)
    if outside:
        return _reachable(spec, q, kv) & past
    table = _reachable(spec, q, kv) & near
    if spec.num_sink_tokens:
        is_sink = kv_real & (where.kv_pos < spec.num_sink_tokens)
        table |= _reachable(spec, q, _extent(where.kv_order, where.kv_segment_ids, is_sink, kv_block))
    if where.full_rows is not None:
        table |= _reachable(spec, _extent(where.q_order, where.q_segment_ids, q_full, q_block), kv)
    return table


def visited_in_decode(spec: AttentionSpec, where: Coordinates, kv_block: int) -> jax.Array:
    """[B, nk] bool: the blocks of which some query of the row sees some key."""
    seen = dense_mask(spec, where).any(axis=1)  # [B, S]
    return seen.reshape(seen.shape[0], -1, kv_block).any(axis=2)


def fully_visible(
    spec: AttentionSpec, where: Coordinates, q_block: int, kv_block: int, *, outside: bool = False
) -> jax.Array:
    """[nq, nk] bool: the pairs of blocks whose kind is FULL in all rows of the batch."""
    return fully_visible_by_row(spec, where, q_block, kv_block, outside=outside).all(axis=0)


def fully_visible_by_row(
    spec: AttentionSpec, where: Coordinates, q_block: int, kv_block: int, *, outside: bool = False
) -> jax.Array:
    """`fully_visible`, for each row of the batch: [B or 1, nq, nk] bool."""
    q, kv = (
        _extent(order, segments, jnp.ones_like(position, bool), block)
        for order, segments, position, block in (
            (where.q_order, where.q_segment_ids, where.q_pos, q_block),
            (where.kv_order, where.kv_segment_ids, where.kv_pos, kv_block),
        )
    )

    def every_query(member):
        return member.reshape(member.shape[0], -1, q_block).all(axis=-1)[:, :, None]

    def every_key(member):
        return member.reshape(member.shape[0], -1, kv_block).all(axis=-1)[:, None, :]

    seen = every_query(where.q_pos >= 0) & every_key(where.kv_pos >= 0)
    if where.q_segment_ids is not None:
        seen &= (q.least_segment == q.greatest_segment)[:, :, None]
        seen &= (kv.least_segment == kv.greatest_segment)[:, None]
        seen &= q.least_segment[:, :, None] == kv.least_segment[:, None, :]
    nearest, farthest = _distances(q, kv)
    if spec.causal:
        seen &= nearest >= 0
    if spec.window is None:
        return jnp.zeros_like(seen) if outside else seen
    if not spec.banded:
        nearest, farthest = _place_distances(spec, where, where.q_pos >= 0, where.kv_pos >= 0, q_block, kv_block)
    if outside:
        past = nearest >= spec.reach
        if not spec.causal:
            past |= -farthest >= spec.reach
        if spec.num_sink_tokens:
            past &= every_key(where.kv_pos >= spec.num_sink_tokens)
        if where.full_rows is not None:
            past &= every_query(~where.full_rows)
        return seen & past
    near = farthest < spec.reach
    if not spec.causal:
        near &= -nearest < spec.reach
    if spec.num_sink_tokens:
        near |= every_key(where.kv_pos < spec.num_sink_tokens)
    if where.full_rows is not None:
        near |= every_query(where.full_rows)
    return seen & near


class Visits(NamedTuple):
    """A schedule as one list of pairs of blocks, or of a sequence and a block of its cache (`tpu.decode`), for a kernel
    whose grid visits it.

    Pairs are packed in an int32 each (`unpack`), because a list lives in a core's small scalar memory. A row without
    any visit has one entry all the same, so that its (zero) result gets written.
    """

    pairs: jax.Array  # [rows * columns] int32
    used: jax.Array  # [] int32: how many entries are in use
    starts: jax.Array | None = None  # [rows + 1] int32: where each row's entries begin, and where the last one's end


class Visit(NamedTuple):
    row: jax.Array
    column: jax.Array
    first: jax.Array  # of its row
    last: jax.Array
    wanted: jax.Array  # False in the entry of a row without visits
    masked: jax.Array | bool
    flush: jax.Array | bool = False  # not a visit: behind the visits, every column once more


_INDEX_BITS = 13  # up to 8192 blocks on each side


def flat_visits(table: jax.Array, fully: jax.Array, *, flush: bool = False) -> Visits:
    """Lists the True entries of `table` [rows, columns] row by row; those in `fully` are marked as needing no mask.

    Args:
      flush: list every column once more at the end, for a kernel that writes results by column there.
    """
    rows, columns = table.shape
    if max(rows, columns) > 1 << _INDEX_BITS:
        raise ValueError(f"the schedule has {rows} x {columns} blocks; at most {1 << _INDEX_BITS} on a side fit.")
    column = jnp.arange(columns, dtype=jnp.int32)
    empty = ~table.any(axis=1, keepdims=True)
    listed = table | (empty & (column == 0))
    first = listed & (jnp.cumsum(listed, axis=1) == 1)
    last = listed & (jnp.cumsum(listed[:, ::-1], axis=1)[:, ::-1] == 1)
    packed = (jnp.arange(rows, dtype=jnp.int32)[:, None] << _INDEX_BITS) | column
    for bit, flag in enumerate((first, last, table, table & ~fully), start=2 * _INDEX_BITS):
        packed |= flag.astype(jnp.int32) << bit
    (order,) = jnp.nonzero(listed.reshape(-1), size=rows * columns, fill_value=0)
    pairs = packed.reshape(-1)[order]
    starts = jnp.pad(jnp.cumsum(listed.sum(axis=1, dtype=jnp.int32)), (1, 0))
    used = starts[-1]
    if flush:
        last = ((rows - 1) << _INDEX_BITS) | column | (1 << (2 * _INDEX_BITS + 4))
        pairs = lax.dynamic_update_slice(jnp.pad(pairs, (0, columns)), last, (used,))
        used += columns
    return Visits(pairs, used, starts)


def unpack(pair) -> Visit:
    mask = (1 << _INDEX_BITS) - 1
    flags = ((pair >> (2 * _INDEX_BITS + bit)) & 1 == 1 for bit in range(5))
    return Visit((pair >> _INDEX_BITS) & mask, pair & mask, *flags)


def _extent(order: jax.Array, segments: jax.Array | None, member: jax.Array, block: int) -> _Extent:
    big = jnp.iinfo(jnp.int32).max // 2  # differences of two of them do not overflow

    def blocks(array):
        array, _ = jnp.broadcast_arrays(array, member)
        return array.reshape(array.shape[0], -1, block)

    inside = blocks(member)

    def least(array):
        return jnp.where(inside, blocks(array), big).min(axis=-1)

    def greatest(array):
        return jnp.where(inside, blocks(array), -big).max(axis=-1)

    segments = jnp.ones((1, 1), jnp.int32) if segments is None else segments
    return _Extent(least(order), greatest(order), least(segments), greatest(segments))


def _distances(q: _Extent, kv: _Extent) -> tuple[jax.Array, jax.Array]:
    """The least and the greatest query - key of each pair of blocks: [B, nq, nk] each."""
    nearest = q.least[:, :, None] - kv.greatest[:, None, :]
    return nearest, q.greatest[:, :, None] - kv.least[:, None, :]


def _place_distances(spec: AttentionSpec, where: Coordinates, q_member, kv_member, q_block: int, kv_block: int):
    """`_distances` of the members by `spec.places`, which `spec.reach` counts."""
    q = _extent(spec.places(where.q_pos), None, q_member, q_block)
    return _distances(q, _extent(spec.places(where.kv_pos), None, kv_member, kv_block))


def _reachable(spec: AttentionSpec, q: _Extent, kv: _Extent) -> jax.Array:
    """Whether a token of each q block may see one of each KV block, window aside: [B, nq, nk] bool."""
    overlap = (q.least_segment[:, :, None] <= kv.greatest_segment[:, None, :]) & (
        kv.least_segment[:, None, :] <= q.greatest_segment[:, :, None]
    )
    if spec.causal:
        return overlap & (kv.least[:, None, :] <= q.greatest[:, :, None])
    return overlap
