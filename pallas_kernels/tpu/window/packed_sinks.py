"""Where a step of the window kernels gets the sink tokens of packed rows: each document has its own, at its start.

Where the documents of a step are few, the kernel copies them itself, a step ahead: of each document the whole tiles
that its sink tokens lie in, from which the step puts them together. Elsewhere XLA gathers them, which took a fifth of a
forward pass of 8 query heads over 2 KV heads (v6e, window 1024).
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tpu.tile.tiles import Blocked, Call, Ref, TpuOperands, head_at
from pallas_kernels.tpu.window.geometry import Segments, sink_rows, sink_slots

MOST_COPIED = 2  # of a step: more have their sink tokens gathered
_TILE = 16  # rows that a copy is aligned to


def documents_copied(call: Call, packed: bool) -> int:
    """Of so many documents a step copies the sink tokens itself; 0 where they come as an array of their own."""
    documents = sink_slots(call, packed)
    return documents if packed and call.spec.num_sink_tokens and documents <= MOST_COPIED else 0


def sink_blocks(call: Call, x: TpuOperands, segments: Segments | None, spec: pl.BlockSpec) -> list[Blocked]:
    """The sink tokens that a launch reads: all keys and values where it copies them itself, else blocks at `spec`."""
    if documents_copied(call, segments is not None):
        return [Blocked(array, pl.BlockSpec(memory_space=pl.ANY)) for array in (x.k, x.v)]
    if not call.spec.num_sink_tokens:
        return []
    return [Blocked(y if segments is None else gather_sinks(call, y, segments), spec) for y in (x.k, x.v)]


def room_for_copies(call: Call, documents: int, keys: jax.Array) -> list[Any]:
    """Scratch: what `SinkCopies` copies into, for keys and values and for two steps, and the sink tokens joined."""
    if documents == 0:
        return []
    *_, length, head_dim = keys.shape
    copies = pltpu.VMEM((2, 2, documents, copied_rows(call, length), head_dim), keys.dtype)
    joined = pltpu.VMEM((sink_rows(call, True), head_dim), keys.dtype)
    return [copies, pltpu.SemaphoreType.DMA((2,)), joined, joined]


def sink_copies(call: Call, documents: int, num_steps: int, order: Any, refs: Any, room: list[Ref]) -> "SinkCopies":
    """Those of a kernel whose grid begins with batch, KV head and step.

    Args:
      order: the head order, as the kernel got it.
      refs: the kernel's, whose sink keys and values are all keys and values.
      room: of `room_for_copies`.
    """
    place = pl.program_id(0), head_at(pl.program_id(1), order)
    found = refs.first_sinks, refs.sink_keys, refs.sink_values
    return SinkCopies(call, documents, num_steps, *place, *found, *room)


@dataclasses.dataclass(frozen=True)
class SinkCopies:
    """The copies of the sink tokens of each step's `documents`.

    Attributes:
      batch, head: which row of the batch and which KV head the step is of.
      starts: `Segments.sinks` in scalar memory, one after another.
      keys, values: [B, K, T, D], where they lie.
      copies, semaphores, sink_keys, sink_values: of `room_for_copies`.
    """

    call: Call
    documents: int
    num_steps: int
    batch: jax.Array
    head: jax.Array
    starts: Ref
    keys: Ref
    values: Ref
    copies: Ref
    semaphores: Ref
    sink_keys: Ref
    sink_values: Ref

    def fetch(self, step: jax.Array) -> None:
        """Begins the next step's copies, waits for this one's, and writes its sink tokens one behind another.

        What the step before has is not copied again.
        """

        @pl.when(step == 0)
        def _():
            for copy in self.of_step(step):
                copy.start()

        @pl.when(self.is_new(step + 1))
        def _():
            for copy in self.of_step(step + 1):
                copy.start()

        @pl.when((step == 0) | self.is_new(step))
        def _():
            for copy in self.of_step(step):
                copy.wait()
            for which, joined_ref in enumerate((self.sink_keys, self.sink_values)):
                self.join(step, self.copies.at[lax.rem(step, 2), which], joined_ref)

    def is_new(self, step: jax.Array) -> jax.Array:
        """Whether a step has other documents than the one before; False where either is outside the grid."""
        here, before = jnp.minimum(step, self.num_steps - 1), jnp.maximum(step - 1, 0)
        pairs = [(self.start(here, i), self.start(before, i)) for i in range(self.documents)]
        return functools.reduce(jnp.logical_or, [one != other for one, other in pairs])

    def of_step(self, step: jax.Array) -> list[Any]:
        slot, rows = lax.rem(step, 2), self.copies.shape[3]
        return [
            pltpu.make_async_copy(
                ref.at[self.batch, self.head, pl.ds(self.first_row(step, document), rows)],
                self.copies.at[slot, which, document],
                self.semaphores.at[slot],
            )
            for which, ref in enumerate((self.keys, self.values))
            for document in range(self.documents)
        ]

    def start(self, step: jax.Array, document: int = 0) -> jax.Array:
        """The index of a document's first token."""
        return self.starts[(self.batch * self.num_steps + step) * self.documents + document]

    def first_row(self, step: jax.Array, document: int) -> jax.Array:
        """The first row that is copied of a document."""
        return aligned_row(self.start(step, document), self.keys.shape[2] - self.copies.shape[3])

    def join(self, step: jax.Array, copies: Ref, joined_ref: Ref) -> None:
        """Writes the documents' sink tokens one behind another, and zeros behind them."""
        num_sinks, copied, (rows, head_dim) = (self.call.spec.num_sink_tokens, copies.shape[1], joined_ref.shape)
        size = max(copied, rows)
        row = lax.broadcasted_iota(jnp.int32, (size, head_dim), 0)
        joined = jnp.zeros((size, head_dim), jnp.float32)
        for i in range(self.documents):
            found = copies[i].astype(jnp.float32)
            if size > copied:
                found = jnp.concatenate([found, jnp.zeros((size - copied, head_dim), jnp.float32)])
            # The document's first row goes to row i * num_sinks.
            up = size + i * num_sinks - (self.start(step, i) - self.first_row(step, i))
            here = (row >= i * num_sinks) & (row < (i + 1) * num_sinks)
            joined = jnp.where(here, pltpu.roll(found, lax.rem(up, size), axis=0), joined)
        joined_ref[...] = joined[:rows].astype(joined_ref.dtype)


def aligned_row(start: jax.Array, last: int) -> jax.Array:
    """From which row, at most `last`, a copy that holds row `start` can begin."""
    return pl.multiple_of(jnp.minimum(lax.div(start, _TILE) * _TILE, last), _TILE)


def copied_rows(call: Call, length: int) -> int:
    """Whole tiles that hold the sink tokens of a document wherever it starts."""
    return min(length, -(-call.spec.num_sink_tokens // _TILE) * _TILE + _TILE)


def gather_sinks(call: Call, keys: jax.Array, segments: Segments) -> jax.Array:
    """The rows of keys [B, K, T, D] that `Segments.sinks` name: [B, K, steps * sink_rows, D]."""
    assert segments.sinks is not None
    batch, steps, slots = segments.sinks.shape
    num_sinks, rows = call.spec.num_sink_tokens, sink_rows(call, True)
    index = segments.sinks[..., None] + jnp.arange(num_sinks, dtype=jnp.int32)
    index = index.reshape(batch, 1, steps * slots * num_sinks, 1)
    found = jnp.take_along_axis(keys, index, axis=2, mode="clip")
    found = found.reshape(*keys.shape[:2], steps, slots * num_sinks, keys.shape[3])
    found = jnp.pad(found, [(0, 0), (0, 0), (0, 0), (0, rows - slots * num_sinks), (0, 0)])
    return found.reshape(*keys.shape[:2], steps * rows, keys.shape[3])
