"""Geometry of the TPU window kernels: which tiles of keys a strip of queries needs, all of it known when tracing.

A step of the grid has a block of queries, the same block of keys and the `blocks_back` blocks before it. Keys are
counted from the step's first query, so those of earlier blocks are negative.
"""

import enum
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.math.schedule import Kind, bounds_of, kind_at
from pallas_kernels.math.spec import Coordinates
from pallas_kernels.tpu.tile.tiles import LANES, Call, largest_divisor, window_of


class WindowTile(NamedTuple):
    block: int  # among the step's blocks of keys, the oldest first
    offset: int  # in the block
    size: int
    key: int  # its first key
    kind: Kind  # how the strip's queries see it, segments aside


def window_kernel_serves(call: Call, where: Coordinates) -> bool:
    """Whether positions are indexes and all rows have a causal band of moderate length; full rows see more, which
    another pass adds."""
    spec = call.spec
    return (
        spec.window is not None
        and spec.window <= call.max_window
        and spec.causal
        and spec.banded
        and not call.outside
        and call.indexed
        and call.tiles.q_block == call.tiles.kv_block
        and sink_rows(call, where.q_segment_ids is not None) <= call.tiles.q_block
    )


def blocks_back(call: Call) -> int:
    """Blocks of keys that a step needs besides its own."""
    return -(-(window_of(call) - 1) // call.tiles.q_block)


def oldest_rows(call: Call) -> int:
    """Rows of the oldest block of keys that a step reads: of a window shorter than a block, no more than it needs."""
    block, rows = call.tiles.q_block, LANES
    if blocks_back(call) != 1 or block % LANES:
        return block
    while rows < window_of(call) - 1 or block % rows:
        rows += LANES
    return rows


def heads_a_step(call: Call, group: int, head_dim: int, dtype: Any) -> int:
    """Of the `group` query heads that read the same keys, how many a step of the grid serves, one after another.

    A step costs a few hundred cycles whatever it does. Vector memory holds a few blocks of so many heads, twice.
    """
    room = 2 * 2**20 // (call.tiles.q_block * max(head_dim, LANES) * jnp.dtype(dtype).itemsize)
    return largest_divisor(group, room)


def sink_slots(call: Call, packed: bool) -> int:
    """How many documents may have sink tokens that lie outside the window of some query of a step.

    The document of the step's first query may; each other one has to begin in the step, a window before such a query.
    """
    return 1 + (call.tiles.q_block - 1) // (window_of(call) + 1) if packed else 1


def sink_rows(call: Call, packed: bool = False) -> int:
    """Rows of the block that holds a step's sink tokens, those of each document in turn: whole tiles."""
    unit = min(LANES, call.tiles.q_block)
    return -(-call.spec.num_sink_tokens * sink_slots(call, packed) // unit) * unit


def window_tiles(call: Call, start: int, present: int) -> list[WindowTile]:
    """The tiles that the strip of queries from `start` sees, in the step's last `present` blocks."""
    block, back = call.tiles.q_block, blocks_back(call)
    tile = min(call.tiles.tile, block)
    unit = min(LANES, tile)
    key = (start - window_of(call) + 1) // unit * unit
    key = max(key, -(present - 1) * block)
    end = start + math.gcd(call.tiles.strip, block)
    bounds = bounds_of(call.spec)
    tiles = []
    while key < end:
        size = min(tile - key % block % tile, block - key % block, end - key)
        kind = kind_at(bounds, start - (key + size - 1), end - 1 - key)
        offset = key % oldest_rows(call) if key < 0 and back == 1 else key % block
        tiles.append(WindowTile(back + key // block, offset, size, key, kind))
        key += size
    return tiles


def window_steps(call: Call, num_steps: int) -> list[tuple[int, str | None]]:
    """For the steps of the grid, the last entry standing for all that follow: the blocks of keys that exist, and which
    sink tokens lie outside the window of its queries (None, "some", differing by query, or "all")."""
    block, window, num_sinks = call.tiles.q_block, window_of(call), call.spec.num_sink_tokens

    def sinks(i):
        if num_sinks == 0 or (i + 1) * block <= window:
            return None
        return "all" if i * block - window + 1 >= num_sinks else "some"

    back = blocks_back(call)
    last = max(back, -(-(window - 1 + num_sinks) // block) if num_sinks else 0)
    return [(min(i, back) + 1, sinks(i)) for i in range(min(last + 1, num_steps))]


class Segments(NamedTuple):
    """What the window kernels know of packed rows.

    A step is *cut* where some query's keys are not those that it would see if its row held one document, or, behind the
    first steps, if the whole window and all sink tokens of the step's one document were there.
    """

    # [B, 8, T] int32, of each query: the index of the first key in its window (T if it sees nothing); the first and
    # the last + 1 of the step's rows of sink tokens that it sees outside the window; its position + that first row.
    queries: jax.Array
    cuts: jax.Array  # [B * steps] int32: a `Cut`
    # [B, steps, slots] int32: where the sink tokens of the step's documents start. There are as many rows behind each.
    sinks: jax.Array | None


class Cut(enum.IntEnum):
    """What the edges of documents do to a step."""

    NO = 0
    WITHOUT_SINKS = 1  # sink tokens outside the window are seen by no query
    WITH_SINKS = 2


def packed_segments(call: Call, where: Coordinates) -> Segments:
    order, position, block = jnp.asarray(where.q_order), jnp.asarray(where.q_pos), call.tiles.q_block
    window, num_sinks, length = window_of(call), call.spec.num_sink_tokens, order.shape[1]
    first = order - jnp.minimum(position, window - 1)
    first = jnp.where(position < 0, length, first)  # [B, T]
    seen = jnp.clip(position - window + 1, 0, num_sinks)  # sink tokens outside the window
    cut = (first > jnp.maximum(order - window + 1, 0)) | (seen != jnp.clip(order - window + 1, 0, num_sinks))
    cuts = jnp.where(cut.reshape(-1, block).any(axis=1), Cut.WITHOUT_SINKS, Cut.NO)
    if num_sinks == 0:
        rows = jnp.broadcast_to(first[:, None], (first.shape[0], 8, length))
        return Segments(rows, cuts.astype(jnp.int32), None)
    cuts += jnp.where((cuts > 0) & (seen.reshape(-1, block) > 0).any(axis=1), 1, 0)
    slot, starts = _sink_documents(call, order - position, seen > 0)
    last = length - num_sinks  # where rows can start; a document that starts later has no more sink tokens
    begin = slot * num_sinks + jnp.maximum(order - position - last, 0)
    rows = jnp.stack([first, begin, begin + seen, position + begin], axis=1)
    rows = jnp.pad(rows, [(0, 0), (0, 4), (0, 0)])
    return Segments(rows, cuts.astype(jnp.int32), jnp.minimum(starts, last))


def _sink_documents(call: Call, start: jax.Array, sees: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Which of its step's documents a query's is, [B, T], and where each of those starts, [B, steps, slots].

    Args:
      start: the index of the first token of each query's document, [B, T].
      sees: whether it sees sink tokens outside its window, [B, T]; the results mean nothing for the others.
    """
    block, slots = call.tiles.q_block, sink_slots(call, True)
    start, sees = start.reshape(len(start), -1, block), sees.reshape(len(start), -1, block)
    slot = jnp.zeros_like(start)
    if slots > 1:
        # Whether it is the first of its document that sees any in this step.
        earlier = jnp.pad(jnp.where(sees, start, -1), [(0, 0), (0, 0), (1, 0)], constant_values=-1)
        new = sees & (start > jax.lax.cummax(earlier, axis=2)[:, :, :-1])
        slot = jnp.maximum(jnp.cumsum(new, axis=2, dtype=jnp.int32) - 1, 0)
    here = sees & (slot == jnp.arange(slots)[:, None, None, None])  # [slots, B, steps, block]
    starts = jnp.moveaxis(jnp.where(here, start, 0).max(axis=3), 0, 2)  # [B, steps, slots]
    # Slots that no document needs have that before them once more: the slots of a document follow one another.
    starts = jax.lax.cummax(starts.reshape(len(start), -1), axis=1).reshape(starts.shape)
    return slot.reshape(len(start), -1), starts


def scalars_of(call: Call, segments: Segments | None, documents: int = 1) -> tuple[jax.Array, ...]:
    """What goes into scalar memory: how each step is cut, and where its first documents start."""
    if segments is None:
        return ()
    cuts = segments.cuts - call.zero_cut
    return (cuts,) if segments.sinks is None else (cuts, segments.sinks[:, :, :documents].reshape(-1))
