"""Which tokens of a row a device of the mesh holds when the sequence is split: neighbours, or the zig-zag order.

Under a causal mask late tokens see more than early ones, so that of n devices with T / n consecutive tokens each, the
last has almost twice the mean of a full layer's work. In zig-zag order the row is cut into 2n chunks, and device r
holds chunks r and 2n - 1 - r: all have the same work.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.math.ring import RowOrder
from swa_jax.model.layer_types import WINDOW
from swa_jax.model.pattern import AttentionPattern

SequenceOrder = Literal["auto", "contiguous", "zigzag"]


def in_zigzag(order: SequenceOrder, patterns: Sequence[AttentionPattern], length: int, pieces: int) -> bool:
    """Whether rows of `length` tokens, split in `pieces`, are to lie in zig-zag order.

    "auto" takes it where some layer's queries see the whole row, under one of the patterns that are computed, and the
    chunks come out even; windows are in balance as they are.
    """
    if pieces == 1 or order == "contiguous":
        return False
    whole_row = any(one.full_attention_decode or set(one.layer_types) != {WINDOW} for one in patterns)
    return order == "zigzag" or (whole_row and length % (2 * pieces) == 0)


def zigzag(x: jax.Array, pieces: int) -> jax.Array:
    """x [B, T, ...] of rows in their own order, as `pieces` devices hold them; T is a multiple of 2 * pieces."""
    chunks = x.reshape(x.shape[0], 2 * pieces, -1, *x.shape[2:])
    return chunks[:, RowOrder(pieces, True).chunks_as_held()].reshape(x.shape)


@dataclasses.dataclass(frozen=True)
class RowShare:
    """What one device holds, inside shard_map; a row is split in `pieces` along the mesh axis `axis`."""

    axis: str
    pieces: int
    zigzag: bool = False

    @property
    def rank(self) -> jax.Array:
        return lax.axis_index(self.axis)

    @property
    def order(self) -> RowOrder:
        return RowOrder(self.pieces, self.zigzag)

    @property
    def chunks(self) -> int:
        """Runs of consecutive tokens on a device."""
        return self.order.chunks

    @property
    def chunk_numbers(self) -> jax.Array:
        """[chunks] int32: which of the row's chunks they are, counted from its start."""
        return jnp.stack([self.rank, 2 * self.pieces - 1 - self.rank][: self.chunks])

    def by_chunk(self, x: jax.Array) -> jax.Array:
        """[B, chunks * length, ...] -> [B * chunks, length, ...]."""
        return x.reshape(x.shape[0] * self.chunks, -1, *x.shape[2:])

    def farthest(self, length: int) -> int:
        """How many tokens left of a chunk of `length` tokens `from_left` fetches at most.

        Where a window reaches farther back, all of the row is the cheaper thing to send.
        """
        return length if self.zigzag else length * (self.pieces - 1) - 1


def from_left(x: jax.Array, reach: int, place: RowShare) -> jax.Array:
    """The `reach` tokens left of each of a device's chunks; zeros (segment id 0) left of the row's start.

    Args:
      x: [B, chunks * length, ...], what the device holds itself; `reach` is at most `place.farthest(length)`.

    Returns:
      [B * chunks, reach, ...].
    """
    if reach == 0:
        return place.by_chunk(x)[:, :0]
    if place.zigzag:
        return _into_both_chunks(x, reach, place)
    length, fetched = x.shape[1], []
    hops = -(-reach // length)
    for hop in range(hops, 0, -1):
        wanted = reach - (hops - 1) * length if hop == hops else length
        steps = [(source, source + hop) for source in range(place.pieces - hop)]
        fetched.append(lax.ppermute(x[:, length - wanted :], place.axis, steps))
    return jnp.concatenate(fetched, axis=1)


def _into_both_chunks(x: jax.Array, reach: int, place: RowShare) -> jax.Array:
    """The early chunks' neighbours are to the left on the mesh, the late ones' to the right; at its end they meet."""
    n = place.pieces
    ends = x.reshape(x.shape[0], 2, -1, *x.shape[2:])[:, :, -reach:]  # [B, 2, reach, ...]
    early = lax.ppermute(ends[:, 0], place.axis, [(source, source + 1) for source in range(n - 1)])
    late = lax.ppermute(ends[:, 1], place.axis, [(source, source - 1) for source in range(1, n)])
    late = jnp.where(place.rank == n - 1, ends[:, 0], late)
    return jnp.stack([early, late], axis=1).reshape(-1, *ends.shape[2:])
