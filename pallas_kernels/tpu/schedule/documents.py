"""Packed rows in the scheduled TPU kernels: which pairs of blocks the edge of a document crosses.

A document is one run of tokens, so that with default positions the keys of a query are those from its document's first
one to its own. Two numbers for each block of queries say how its pairs with blocks of keys are seen: before the column
`first` not at all, from the column `clean` on as if there were no documents. The pairs between are crossed by an edge.
They are cut into small blocks, which have the same two numbers; of those, only the ones that an edge crosses are masked
by token. Both numbers are zero for a row of one document.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.math.spec import Coordinates

SMALL_BLOCK = 512  # tokens of the blocks that a crossed pair is cut into


class RowDocuments(NamedTuple):
    """What the scheduled kernels know of packed rows."""

    first_keys: jax.Array  # [B, 1, T] int32: the index of the first key that a query sees; T if none
    table: jax.Array  # [B * rows * 2 * (1 + small blocks in a row)] int32: `first` and `clean`, rows as the keys lie
    per_row: int  # small blocks in a row of blocks


class DocumentBounds(NamedTuple):
    first: jax.Array  # the first column of which a query sees a key
    clean: jax.Array  # the first column from which on all queries see keys as in one document


def small_block(block: int) -> int:
    """The size of the blocks that a pair of blocks is cut into where an edge crosses it."""
    return math.gcd(block, SMALL_BLOCK)


def documents_of(where: Coordinates, block: int) -> RowDocuments:
    """Packed rows as the kernels read them, `block` being that of queries and of keys."""
    length, small = where.kv_pos.shape[1], small_block(block)

    def first_keys(position, order) -> jax.Array:
        return jnp.where(position < 0, length, jnp.asarray(order) - position)

    first = first_keys(where.kv_pos, where.kv_order)  # [B, S]: queries may be some of these tokens
    rows = first.reshape(first.shape[0], -1, block)
    blocks = rows.reshape(*rows.shape[:2], block // small, small)
    whole = _bounds(rows, block)[:, :, None]  # [B, rows, 1, 2]
    table = jnp.concatenate([whole, _bounds(blocks, small)], axis=2)
    return RowDocuments(first_keys(where.q_pos, where.q_order)[:, None], table.reshape(-1), block // small)


def _bounds(first: jax.Array, block: int) -> jax.Array:
    """[..., block] -> [..., 2]: `Bounds` of each block of queries, in blocks."""
    return jnp.stack([first.min(axis=-1) // block, -(-first.max(axis=-1) // block)], axis=-1)


def read_bounds(table, batch, row, num_rows: int, per_row: int, small=None) -> DocumentBounds:
    """The bounds of a row of blocks, or of one of its small blocks."""
    at = (batch * num_rows + row) * (2 * (1 + per_row)) + (0 if small is None else 2 * (1 + small))
    return DocumentBounds(table[at], table[at + 1])


def in_small_blocks(bounds_of, row, column, per_row: int, partly, plain, attend) -> None:
    """Calls `attend(seen, row, column, crossed)` for the small blocks that are seen of a pair of blocks.

    Args:
      bounds_of: `read_bounds` of the row, given one of its small blocks.
      partly, plain: the distances of small blocks that are seen in part, or throughout, documents aside.
    """

    @pl.loop(0, per_row)
    def _(i):
        bounds, here = bounds_of(i), row * per_row + i

        @pl.loop(jnp.maximum(column * per_row, bounds.first), jnp.minimum((column + 1) * per_row, here + 1))
        def _(key):
            distance = here - key
            for seen in partly:
                pl.when(distance == seen)(functools.partial(attend, seen, here, key, True))
            if plain:
                inside = (distance >= plain[0]) & (distance <= plain[-1])
                pl.when(inside & (key >= bounds.clean))(lambda: attend(None, here, key, False))
                pl.when(inside & (key < bounds.clean))(lambda: attend(None, here, key, True))
