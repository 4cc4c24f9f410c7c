"""Loop bounds for kernels that find their blocks by arithmetic.

A kernel without scalar prefetch cannot follow a list of blocks cheaply: a load whose address waits for another
load is not pipelined. So the visits of a block (of queries, or of keys) become two loops over plain ranges:

* *whole* visits, where every pair is visible: one range, and the mask need not be computed;
* *masked* visits: what else the schedule lists. These are at most four ranges, run through by one counter
  (`block`).

Two runs of visited blocks are represented exactly: sink tokens and window, for any packing, padding or
`full_from` with default positions. Positions in a stranger order (rings) may give more; then the second range
reaches over the gaps to the last visited block, which is correct, because those visits are masked.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

_RANGES = 4


class LoopBounds(NamedTuple):
    """One row of `loop_bounds`, as scalars."""

    ends: tuple  # the counter at which each range of masked visits ends
    offsets: tuple  # what to add to the counter in each
    whole: tuple  # first and last + 1 of the whole visits

    @classmethod
    def read(cls, column) -> "LoopBounds":
        """`column(i)` returns entry i of the row."""
        entries = [column(i) for i in range(2 * _RANGES + 2)]
        return cls(tuple(entries[:_RANGES]), tuple(entries[_RANGES : 2 * _RANGES]), tuple(entries[2 * _RANGES :]))

    @property
    def num_masked(self):
        return self.ends[-1]

    def block(self, i):
        """The block of masked visit i."""
        offset = self.offsets[-1]
        for end, before in zip(self.ends[-2::-1], self.offsets[-2::-1], strict=True):
            offset = jnp.where(i < end, before, offset)
        return i + offset


def loop_bounds(table: jax.Array, whole: jax.Array) -> jax.Array:
    """Tables [..., n, m] bool of blocks visited and of those wholly visible -> [..., n, 10] int32 (`LoopBounds`)."""
    m = table.shape[-1]
    index = jnp.arange(m, dtype=jnp.int32)

    def first(condition):
        return jnp.where(condition, index, m).min(axis=-1)

    def end(condition):
        return jnp.where(condition, index + 1, 0).max(axis=-1)

    start = first(table)
    stop = first(~table & (index >= start[..., None]))
    rest = table & (index >= stop[..., None])
    second_start, second_stop = first(rest), jnp.maximum(end(rest), stop)
    # Of the wholly visible blocks the last run: sink tokens' blocks come first, and are few.
    whole = whole & table
    whole_stop = end(whole)
    whole_start = end(~whole & (index < whole_stop[..., None]))
    none = whole_stop == 0
    whole_start, whole_stop = (jnp.where(none, m, x) for x in (whole_start, whole_stop))

    starts = [start, jnp.maximum(start, whole_stop), second_start, jnp.maximum(second_start, whole_stop)]
    stops = [jnp.minimum(stop, whole_start), stop, jnp.minimum(second_stop, whole_start), second_stop]
    counts = jnp.stack([jnp.maximum(b - a, 0) for a, b in zip(starts, stops, strict=True)], axis=-1)
    ends = jnp.cumsum(counts, axis=-1)
    offsets = jnp.stack(starts, axis=-1) - (ends - counts)
    return jnp.concatenate([ends, offsets, jnp.stack([whole_start, whole_stop], axis=-1)], axis=-1).astype(jnp.int32)
