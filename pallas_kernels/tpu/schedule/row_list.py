"""The blocks of queries that see any key at all, where most do not: what full rows see outside their window.

Full rows (`full_from`) are few: the answers at the ends of documents. A list in scalar memory names, for each row of
the batch, the small blocks of queries that hold some, and for each block the first and the last block of keys that its
full rows see. The kernels visit these blocks alone, and change results that the window kernels have written, in
place; all other blocks stay as they are.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.math.schedule import Visit, fully_visible_by_row, visited_by_row
from pallas_kernels.math.spec import Coordinates
from pallas_kernels.tpu.tile.tiles import LANES, MASKED, Call

_BOUNDS = 4


class RowList(NamedTuple):
    """The blocks of queries to visit.

    Attributes:
      order: [N * num_blocks] int32: of each row of the batch its blocks, those to visit first.
      bounds: [N * num_blocks * 4] int32: of each block the columns [first, stop) that it sees, and [first, stop) of
        those among them that are seen whole by all of its queries, those left out that see nothing at all.
      counts: [N] int32: how many blocks of a row there are to visit.
      most: [1] int32: the greatest of the counts, at least 1.
      num_blocks: of queries in a row.
      per_batch: whether N is the batch's size; else it is 1.
    """

    order: jax.Array
    bounds: jax.Array
    counts: jax.Array
    most: jax.Array
    num_blocks: int
    per_batch: bool

    @property
    def scalars(self) -> tuple[jax.Array, ...]:
        return self.order, self.bounds, self.counts, self.most

    def at(self, visit: Visit, batch, scalars) -> Visit:
        """The visit of a step, its row being the block of queries. Steps behind a row's last block do nothing."""
        order, _, counts, _ = scalars
        batch = batch if self.per_batch else 0
        # A row without any such block has a step all the same, which gives its results back as they are.
        count = jnp.maximum(counts[batch], 1)
        row = order[batch * self.num_blocks + jnp.minimum(visit.row, count - 1)]
        here = visit.wanted & (visit.row < count)
        return visit._replace(row=row, first=here, last=here, wanted=here)

    def run(self, batch, visit: Visit, scalars, attend, attend_small) -> None:
        """Calls `attend(seen, column)` for the blocks of keys that a block of queries sees."""
        bounds = scalars[1]
        at = _BOUNDS * ((batch if self.per_batch else 0) * self.num_blocks + visit.row)
        first, stop, whole, whole_stop = (bounds[at + i] for i in range(_BOUNDS))

        @pl.loop(first, stop)
        def _(column):
            plain = (column >= whole) & (column < whole_stop)
            pl.when(plain)(lambda: attend(None, column))
            pl.when(~plain)(lambda: attend("tokens", column))


def list_rows(call: Call, where: Coordinates) -> RowList:
    """The blocks of queries that see a key by the call."""
    blocks = call.tiles.q_block, call.tiles.kv_block
    seen = visited_by_row(call.spec, where, *blocks, outside=call.outside)  # [N, nq, nk]
    whole = fully_visible_by_row(call.spec, _seeing(where, blocks[0]), *blocks, outside=call.outside)
    wanted = seen.any(axis=2)
    order = jnp.argsort(~wanted, axis=1, stable=True).astype(jnp.int32)
    first, stop = _range(seen)
    whole_first, whole_stop = _range(whole)
    gaps = whole_stop - whole_first != whole.sum(axis=2)  # then a mask for all of them
    bounds = jnp.stack([first, stop, whole_first, jnp.where(gaps, whole_first, whole_stop)], axis=2)
    counts = wanted.sum(axis=1, dtype=jnp.int32)
    most = jnp.maximum(counts.max(), 1).reshape(1)
    return RowList(order.reshape(-1), bounds.reshape(-1), counts, most, seen.shape[1], seen.shape[0] > 1)


def sees(position: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Of queries at positions [1, n], those that see anything: [n, D] bool."""
    return jnp.broadcast_to(jnp.broadcast_to(position, (LANES, shape[0])).T[:, :1] >= 0, shape)


def leave_out(
    position: jax.Array, q: jax.Array, dout: jax.Array, statistics: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """A block's queries [n, D], cotangents [n, D] and statistics [8, n] without what belongs to queries that see
    nothing, as their position [1, n] says: they have no weight then and add zero, whether a pair is masked or not. Of
    keys that are not finite they add NaN to their own gradients alone, which are therefore not to be written.
    """
    here = sees(position, q.shape)
    q, dout = (jnp.where(here, x, jnp.zeros_like(x)) for x in (q, dout))
    if statistics is None:
        return q, dout, None
    shape = statistics.shape
    nothing = jnp.where(lax.broadcasted_iota(jnp.int32, shape, 0) == 0, -MASKED, 0.0)  # of lse, and of the rest
    return q, dout, jnp.where(jnp.broadcast_to(position, shape) >= 0, statistics, nothing)


def _seeing(where: Coordinates, block: int) -> Coordinates:
    """The coordinates with queries that see nothing (their position is -1) as the last one of their block."""
    by_block = jnp.asarray(where.q_pos).reshape(-1, where.q_pos.shape[1] // block, block)
    last = by_block.argmax(axis=2)[:, :, None]

    def filled(x):
        if x is None:
            return None
        x = jnp.broadcast_to(jnp.asarray(x), where.q_pos.shape).reshape(by_block.shape)
        return jnp.where(by_block < 0, jnp.take_along_axis(x, last, axis=2), x).reshape(where.q_pos.shape)

    return where._replace(
        q_pos=filled(where.q_pos), q_order=filled(where.q_order), q_segment_ids=filled(where.q_segment_ids)
    )


def _range(table: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The first True of each last axis and one behind the last, [..] int32; (0, 0) where there is none."""
    columns = lax.broadcasted_iota(jnp.int32, table.shape, table.ndim - 1)
    stop = jnp.where(table, columns + 1, 0).max(axis=-1)
    first = jnp.where(table, columns, table.shape[-1]).min(axis=-1)
    return jnp.minimum(first, stop), stop
