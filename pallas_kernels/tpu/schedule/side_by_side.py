"""Several heads of a group in one step: their small blocks of queries as one block, one head's rows behind the other's.

A block of keys costs a step time of its own (its copy without what is not finite, filling and draining the pipeline),
whatever the number of queries. Rows that see nothing by the call may be taken along unmasked: what a step gives for
them is not written.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tpu.schedule.forward_step import ForwardRefs, ForwardStatic
from pallas_kernels.tpu.schedule.row_list import sees
from pallas_kernels.tpu.tile.tiles import Call

_MOST = 4  # heads: 512 queries in blocks of 128


def heads_side_by_side(call: Call, group: int) -> int:
    """How many heads of a group a step takes. What is added to logits is a head's own, and they have one of it."""
    return 1 if call.has_head_bias else math.gcd(group, _MOST)


def scratch_of(num_rows: int, q: jax.Array, dtype) -> list[Any]:
    """What a step needs beside the scratch of one head: queries, results of `dtype`, properties of tokens, and lse."""
    width = q.shape[3]
    return [
        pltpu.VMEM((num_rows, width), q.dtype),
        pltpu.VMEM((num_rows, width), dtype),
        pltpu.VMEM((8, num_rows), jnp.int32),
        pltpu.VMEM((8, num_rows), jnp.float32),
    ]


class SideBySide:
    """The references of a step of several heads, as those of one head whose block has so many more rows."""

    def __init__(self, static: ForwardStatic, refs) -> None:
        *own, self._q, self._out, self._info, self._lse = refs
        self._given: ForwardRefs = static.name_refs(own)
        self._heads, self._block, _ = self._given.q.shape
        tiles = dataclasses.replace(static.call.tiles, q_block=self._heads * self._block)
        self.static = static._replace(call=dataclasses.replace(static.call, tiles=tiles))
        both = [self._out, self._lse.at[0:1, :]]
        self.refs = self._given._replace(
            q=self._q,
            q_info=self._info,
            initial=both[: len(self._given.initial)],
            results=both[: len(self._given.results)],
        )

    def begin(self) -> None:
        """Before a step reads what it is given."""
        given = self._given
        for head, rows in self._rows():
            self._q[rows, :] = given.q[head]
            self._info[:, rows] = given.q_info[...]
            self._out[rows, :] = given.initial[0][head]
            if len(given.initial) > 1:
                self._lse[0:1, rows] = given.initial[1][head]

    def end(self) -> None:
        """After a step has written its results: those of rows that see anything."""
        initial, results = self._given.initial, self._given.results
        row = self._given.q_info[0:1, :] >= 0  # of positions; the others are not to see anything
        column = sees(self._given.q_info[0:1, :], initial[0].shape[1:])
        for head, rows in self._rows():
            out = initial[0][head]
            results[0][head] = jnp.where(column, self._out[rows, :], out)
            if len(results) > 1:
                results[1][head] = jnp.where(row, self._lse[0:1, rows], initial[1][head])

    def _rows(self) -> list[tuple[int, slice]]:
        return [(i, slice(i * self._block, (i + 1) * self._block)) for i in range(self._heads)]
