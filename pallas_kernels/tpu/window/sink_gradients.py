"""Adds the gradients of packed rows' sink tokens to those of the keys, in place.

The window backward kernel gives them step by step, since a document's sink tokens lie blocks before the queries that
see them. Here those of one document, which follow one another, are added up in f32, and the tiles of dk and dv that its
sink tokens lie in are read, changed and written back once.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tpu.tile.tiles import (
    LANES,
    Blocked,
    Call,
    LaunchGrid,
    LaunchHeads,
    Ref,
    largest_divisor,
    launch,
    shape_like,
    split,
)
from pallas_kernels.tpu.window.geometry import Segments, sink_rows, sink_slots
from pallas_kernels.tpu.window.packed_sinks import aligned_row, copied_rows

_TILE = 8  # rows of f32


def add_to_sinks(call: Call, segments: Segments | None, results: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """The results of `window_backward` for packed rows, with the gradients of sink tokens added to dk and dv in place.

    Args:
      results: dq, dk and dv [B, K, T, D], the bias's, and the gradients of each step's sink tokens, for dk and dv
        [B, K, steps * sink_rows, D] f32.
    """
    dq, *gradients, dk_rows, dv_rows = results
    gradients, dbias = gradients[:2], gradients[2:]
    assert segments is not None
    assert segments.sinks is not None
    (batch, kv_heads, length, head_dim), dtype = gradients[0].shape, gradients[0].dtype
    num_steps, slots = segments.sinks.shape[1:]
    num_entries, num_sinks = num_steps * slots, call.spec.num_sink_tokens

    def by_document(x):  # [B, entries, K, rows, D]
        x = x.reshape(batch, kv_heads, num_steps, sink_rows(call, True), head_dim)
        x = x[:, :, :, : slots * num_sinks].reshape(batch, kv_heads, num_entries, num_sinks, head_dim)
        return jnp.pad(x.swapaxes(1, 2), [(0, 0)] * 3 + [(0, -num_sinks % _TILE), (0, 0)])

    inputs = [by_document(x) for x in (dk_rows, dv_rows)]
    grid = sink_gradients_grid(call, batch, kv_heads, head_dim, num_steps)
    heads = kv_heads // grid[1]
    block = heads, *inputs[0].shape[3:]
    spec = pl.BlockSpec((None, None, *block), lambda b, h, i, starts: (b, i, h, 0, 0))
    dk, dv = launch(
        call,
        functools.partial(_kernel, num_entries),
        "window_sink_gradients",
        grid=LaunchGrid(grid, LaunchHeads(kv_heads), (segments.sinks.reshape(-1),)),
        inputs=[Blocked(x, spec) for x in inputs],
        outputs=[Blocked(shape_like(x.shape, x.dtype, x), pl.BlockSpec(memory_space=pl.ANY)) for x in gradients],
        scratch=[
            pltpu.VMEM((2, *block), jnp.float32),
            pltpu.VMEM((2, heads, copied_rows(call, length), head_dim), dtype),
            pltpu.SemaphoreType.DMA(()),
        ],
        previous=tuple(gradients),
    )
    return dq, dk, dv, *dbias


def sink_gradients_grid(call: Call, batch: int, kv_heads: int, head_dim: int, num_steps: int) -> tuple[int, int, int]:
    return batch, kv_heads // heads_at_once(call, kv_heads, head_dim), num_steps * sink_slots(call, True)


def heads_at_once(call: Call, kv_heads: int, head_dim: int) -> int:
    """Of the KV heads, those that a step of the grid serves: as many as take 2 MiB."""
    room = 2 * 2**20 // (4 * call.spec.num_sink_tokens * max(head_dim, LANES))
    return largest_divisor(kv_heads, room)


def _kernel(num_entries: int, _order: tuple[Ref, ...], starts: Ref, *refs: Ref) -> None:
    rows, gradients, (totals, tiles, semaphore) = split(refs, 2, 2)  # totals [2, heads, rows, D], tiles as they lie
    batch, entry = pl.program_id(0), pl.program_id(2)
    place = batch * num_entries + entry
    start = starts[place]
    is_first = (entry == 0) | (starts[jnp.maximum(place - 1, 0)] != start)
    is_last = (entry == num_entries - 1) | (
        starts[jnp.minimum(place + 1, pl.num_programs(0) * num_entries - 1)] != start
    )
    _, num_heads, size, head_dim = tiles.shape
    heads, first_row = pl.ds(pl.program_id(1) * num_heads, num_heads), aligned_row(start, gradients[0].shape[2] - size)
    targets = [ref.at[batch, heads, pl.ds(first_row, size)] for ref in gradients]
    reads = [pltpu.make_async_copy(target, tiles.at[i], semaphore) for i, target in enumerate(targets)]
    writes = [pltpu.make_async_copy(tiles.at[i], target, semaphore) for i, target in enumerate(targets)]

    def add_to_tiles(head: jax.Array) -> None:
        for i in range(2):
            more = totals[i, head][:size]
            more = jnp.concatenate([more, jnp.zeros((size - len(more), head_dim), jnp.float32)])
            more = pltpu.roll(more, start - first_row, axis=0)
            tiles[i, head] = (tiles[i, head].astype(jnp.float32) + more).astype(tiles.dtype)

    @pl.when(is_first)
    def begin_document():
        for copy in reads:
            copy.start()
        for i, ref in enumerate(rows):
            totals[i] = ref[...]

    @pl.when(jnp.logical_not(is_first))
    def add_step():
        for i, ref in enumerate(rows):
            totals[i] += ref[...]

    @pl.when(is_last)
    def write_document():
        for copy in reads:
            copy.wait()
        pl.loop(0, num_heads)(add_to_tiles)
        for copy in writes:
            copy.start()
        for copy in writes:
            copy.wait()
