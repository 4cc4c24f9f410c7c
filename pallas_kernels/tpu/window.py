"""Geometry of the TPU window kernels: which tiles of keys a strip of queries needs, all of it known when tracing.

A step of the grid has a block of queries, the same block of keys and the `blocks_back` blocks before it. Keys are
counted from the step's first query, so those of earlier blocks are negative.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.schedule import Kind, bounds_of, kind_at
from pallas_kernels.spec import Coordinates
from pallas_kernels.tpu.tiles import LANES, Call

Ref = Any  # Pallas references have no useful static types


class WindowTile(NamedTuple):
    block: int  # among the step's blocks of keys, the oldest first
    offset: int  # in the block
    size: int
    key: int  # its first key
    kind: Kind  # how the strip's queries see it, segments aside


def window_kernel_serves(call: Call, where: Coordinates) -> bool:
    """Whether positions are indexes and a causal window of moderate length is all there is."""
    spec = call.spec
    return (
        spec.window is not None
        and spec.window <= call.max_window
        and spec.causal
        and not call.outside
        and call.indexed
        and where.full_rows is None
        and call.tiles.q_block == call.tiles.kv_block
        and (spec.num_sink_tokens == 0 or (where.q_seg is None and sink_rows(call) <= call.tiles.q_block))
    )


def window_of(call: Call) -> int:
    """The window of a call that the window kernels serve."""
    assert call.spec.window is not None
    return call.spec.window


def blocks_back(call: Call) -> int:
    """Blocks of keys that a step needs besides its own."""
    return -(-(window_of(call) - 1) // call.tiles.q_block)


def sink_rows(call: Call) -> int:
    """Rows of the block that holds the sink tokens: whole tiles."""
    unit = min(LANES, call.tiles.q_block)
    return -(-call.spec.num_sink_tokens // unit) * unit


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
        tiles.append(WindowTile(back + key // block, key % block, size, key, kind))
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
    """What the window kernels know of packed rows."""

    first_keys: (
        jax.Array
    )  # [B, 8, T] int32, all rows alike: the index of the first key that a query sees; T if none
    crossed: (
        jax.Array
    )  # [B * steps] int32: whether any query of the step sees less than its window, or nothing


def packed_segments(call: Call, where: Coordinates) -> Segments:
    order, reach = jnp.asarray(where.q_order), window_of(call) - 1
    first = order - jnp.minimum(where.q_pos, reach)
    first = jnp.where(where.q_pos < 0, order.shape[1], first)  # [B, T]
    cut = first > jnp.maximum(order - reach, 0)
    crossed = cut.reshape(-1, call.tiles.q_block).any(axis=1).astype(jnp.int32)
    return Segments(jnp.broadcast_to(first[:, None], (first.shape[0], 8, first.shape[1])), crossed)


def is_crossed(crossed: Ref, batch, step, num_steps: int) -> jax.Array:
    """Reads `Segments.crossed`."""
    return crossed[batch * num_steps + step] != 0
