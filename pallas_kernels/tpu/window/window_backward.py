"""Window attention backward on TPUs: dq, dk and dv from one sweep over the queries.

A step has a block of queries and the blocks of keys in its window. dk and dv of those live in a ring of accumulators
in VMEM, block j in slot j % blocks; a block leaves it, and is written, once the window has passed. `blocks_back` more
steps at the end empty the ring. So every array is read and written once, and each pair of tiles takes five matmuls.

Sink tokens outside the window are one more tile of keys. Their gradients grow in VMEM over all steps of a head and are
added to those of the first block afterwards; in packed rows each step has its own documents' sink tokens, whose
gradients `sink_gradients` adds up.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tpu.tile.rotation import table_blocks
from pallas_kernels.tpu.tile.tiles import (
    LANES,
    Blocked,
    Call,
    LaunchGrid,
    LaunchHeads,
    OutGradients,
    Ref,
    TpuOperands,
    by_head,
    cost_of,
    head_at,
    launch,
    shape_like,
    split,
    take,
)
from pallas_kernels.tpu.window.geometry import (
    Cut,
    Segments,
    blocks_back,
    heads_a_step,
    scalars_of,
    sink_rows,
    window_steps,
)
from pallas_kernels.tpu.window.packed_sinks import documents_copied, room_for_copies, sink_blocks, sink_copies
from pallas_kernels.tpu.window.window_backward_step import (
    WindowBackwardBody,
    WindowBackwardRefs,
    WindowBackwardStep,
    clear,
)


def window_backward(
    call: Call,
    x: TpuOperands,
    heads: LaunchHeads,
    gradients: OutGradients,
    segments: Segments | None,  # of packed rows
    previous: tuple[jax.Array, ...] = (),
) -> tuple[jax.Array, ...]:
    """As `scheduled_backward`, for the calls of `Call.window_kernel`. In packed rows with sink tokens, the gradients of
    these come behind the others, for `add_to_sinks`."""
    (batch, num_heads, length, head_dim), packed = x.q.shape, segments is not None  # heads abreast as one
    copied = documents_copied(call, packed)
    scalars = scalars_of(call, segments, copied or 1)
    num_blocks, group = length // call.tiles.q_block, num_heads // x.k.shape[1]
    shape = window_backward_grid(call, batch, heads.count, length, group, head_dim, x.q.dtype)
    grid = _Grid(call.tiles.q_block, num_blocks, group // shape[3], shape[3], call.abreast, len(scalars))
    of_sinks = grid.of_sinks(sink_rows(call, packed), head_dim, by_step=packed)
    results = launch(
        call,
        functools.partial(_kernel, call, packed, copied, grid),
        "window_backward",
        grid=LaunchGrid(shape, heads, scalars),
        inputs=_inputs(call, x, gradients, segments, grid, of_sinks),
        outputs=_outputs(call, x, packed, grid, of_sinks),
        scratch=_scratch(call, packed, head_dim, x.q.dtype, x.k.dtype) + room_for_copies(call, copied, x.k),
        previous=previous,
        cost=cost_of(call, x.q, x.k, backward=True),
    )
    if not call.spec.num_sink_tokens or packed:
        return results
    dq, dk, dv, *dbias, dk_sinks, dv_sinks = results
    return dq, _add_to_first_keys(dk, dk_sinks), _add_to_first_keys(dv, dv_sinks), *dbias


def _inputs(
    call: Call,
    x: TpuOperands,
    gradients: OutGradients,
    segments: Segments | None,
    grid: "_Grid",
    of_sinks: pl.BlockSpec,
) -> list[Blocked]:
    head_dim = x.q.shape[3]
    queries = grid.of_queries(grid.block, head_dim)
    of_head = grid.spec((grid.members * grid.abreast, 8, LANES), lambda b, h, kv, i: (h, 0, 0))
    inputs = [Blocked(x.q, queries), Blocked(gradients.dout, queries)]
    if call.has_head_bias:
        inputs.append(Blocked(by_head(x.head_bias), of_head))
    window = range(blocks_back(call), -1, -1)
    inputs += [Blocked(array, grid.of_keys(before, head_dim)) for array in (x.k, x.v) for before in window]
    if gradients.statistics is not None:
        inputs.append(Blocked(gradients.statistics, grid.along_lanes(8)))
    if segments is not None:
        last = grid.num_blocks - 1
        of_rows = grid.spec((None, 8, grid.block), lambda b, h, kv, i: (b, 0, jnp.minimum(i, last)))
        inputs.append(Blocked(segments.queries, of_rows))
    inputs += sink_blocks(call, x, segments, of_sinks)
    return inputs + table_blocks(x.where, functools.partial(grid.of_table, head_dim))


def _outputs(call: Call, x: TpuOperands, packed: bool, grid: "_Grid", of_sinks: pl.BlockSpec) -> list[Blocked]:
    batch, num_heads, length, head_dim = x.q.shape
    keys = grid.of_keys(blocks_back(call), head_dim)
    specs = grid.of_queries(grid.block, head_dim), keys, keys
    outputs = [Blocked(shape_like(y.shape, y.dtype, x.q), spec) for y, spec in zip(x[:3], specs, strict=True)]
    if call.has_bias:
        dbias = shape_like((batch, num_heads * call.abreast, 1, length), jnp.float32, x.q)
        outputs.append(Blocked(dbias, grid.along_lanes(1)))
    if call.spec.num_sink_tokens:
        rows = sink_rows(call, packed) * (grid.num_blocks if packed else 1)
        outputs += [Blocked(shape_like((*x.k.shape[:2], rows, head_dim), jnp.float32, x.q), of_sinks)] * 2
    return outputs


def window_backward_grid(
    call: Call, batch: int, kv_heads: Any, length: int, group: int, head_dim: int, dtype: Any
) -> tuple[Any, ...]:
    """Row of the batch, KV head, block of queries (and more steps, to empty the ring), part of the query heads."""
    parts = group // heads_a_step(call, group, head_dim, dtype)
    return batch, kv_heads, length // call.tiles.q_block + blocks_back(call), parts


@dataclasses.dataclass(frozen=True)
class _Grid:
    """Which block of an array is at hand where in the grid."""

    block: int
    num_blocks: int  # of queries
    members: int  # of the query heads that share a KV head, those that a step serves
    parts: int  # of as many such heads
    abreast: int  # of the heads that lie side by side in a row, which count as one
    num_scalars: int

    def spec(self, block_shape, index) -> pl.BlockSpec:
        """A block located by batch, part of the query heads, KV head, and step."""

        def index_map(b, h, i, g, *scalars):
            kv = head_at(h, scalars[self.num_scalars :])
            # The last steps leave the queries' results alone.
            g = jnp.where(i < self.num_blocks, g, self.parts - 1)
            return index(b, kv * self.parts + g, kv, i)

        return pl.BlockSpec(block_shape, index_map)

    def of_queries(self, rows: int, columns: int) -> pl.BlockSpec:
        def index(b, h, kv, i):
            return b, h, jnp.minimum(i, self.num_blocks - 1), 0

        return self.spec((None, self.members, rows, columns), index)

    def along_lanes(self, rows: int) -> pl.BlockSpec:
        """Rows of numbers, one number a query."""

        def index(b, h, kv, i):
            return b, h, 0, jnp.minimum(i, self.num_blocks - 1)

        return self.spec((None, self.members * self.abreast, rows, self.block), index)

    def of_table(self, columns: int, row: Callable) -> pl.BlockSpec:
        """The block of a table of `table_blocks`."""

        def index(b, h, kv, i):
            return row(b), jnp.minimum(i, self.num_blocks - 1), 0

        return self.spec((None, self.block, columns), index)

    def of_keys(self, before: int, head_dim: int) -> pl.BlockSpec:
        """The block of keys so many before that of the queries."""

        def index(b, h, kv, i):
            return b, kv, jnp.clip(i - before, 0, self.num_blocks - 1), 0

        return self.spec((None, None, self.block, head_dim), index)

    def of_sinks(self, rows: int, head_dim: int, by_step: bool) -> pl.BlockSpec:
        def index(b, h, kv, i):
            return b, kv, jnp.minimum(i, self.num_blocks - 1) if by_step else 0, 0

        return self.spec((None, None, rows, head_dim), index)


def _scratch(call: Call, packed: bool, head_dim: int, q_dtype, k_dtype) -> list:
    """In the order of `Refs`."""
    block, blocks = call.tiles.q_block, blocks_back(call) + 1
    ring = pltpu.VMEM((blocks, head_dim, block), jnp.float32)
    scratch = [
        ring,
        ring,
        pltpu.VMEM((head_dim, block), jnp.float32),
        pltpu.VMEM((head_dim, block), q_dtype),
        pltpu.VMEM((head_dim, block), q_dtype),
        pltpu.VMEM((blocks, head_dim, block), k_dtype),
    ]
    if call.rotated_by:
        scratch.append(pltpu.VMEM((block, head_dim), q_dtype))
    if call.abreast > 1:
        scratch += [pltpu.VMEM((call.abreast, block, head_dim), q_dtype)] * 2
    if call.spec.num_sink_tokens:
        scratch += [pltpu.VMEM((head_dim, sink_rows(call, packed)), jnp.float32)] * 2
    return scratch


def _add_to_first_keys(gradient: jax.Array, rows: jax.Array) -> jax.Array:
    first = gradient[:, :, : rows.shape[2]] + rows
    return lax.dynamic_update_slice(gradient, first.astype(gradient.dtype), (0, 0, 0, 0))


def _name_refs(call: Call, has_segments: bool, refs: tuple[Ref, ...]) -> tuple[WindowBackwardRefs, list[Ref]]:
    """What a step reads and writes, and `room_for_copies`."""
    has_sinks = call.spec.num_sink_tokens > 0
    *scalars, rest = take(refs, has_segments, has_segments and has_sinks)
    *of_queries, rest = take(rest, True, True, call.has_head_bias)
    keys, values, rest = split(rest, blocks_back(call) + 1, blocks_back(call) + 1)
    rotated = call.rotated_by > 0
    *optional, rest = take(rest, call.softmax, has_segments, has_sinks, has_sinks, rotated, rotated)
    gradients, rest = split(rest, 3)
    *more_gradients, rest = take(rest, call.has_bias, has_sinks, has_sinks)
    scratch, rest = split(rest, 6)
    abreast = call.abreast > 1
    *more_scratch, rest = take(rest, rotated, abreast, abreast, has_sinks, has_sinks)
    named: list[Any] = [
        *scalars,
        *of_queries,
        keys,
        values,
        *optional,
        *gradients,
        *more_gradients,
        *scratch,
        *more_scratch,
    ]
    return WindowBackwardRefs(*named), rest


def _kernel(call: Call, has_segments: bool, copied: int, grid: _Grid, order: tuple[Ref, ...], *unnamed: Ref) -> None:
    refs, room = _name_refs(call, has_segments, unnamed)
    index, part, back, num_blocks = pl.program_id(2), pl.program_id(3), blocks_back(call), grid.num_blocks
    of_queries = jnp.minimum(index, num_blocks - 1)
    cut, first_sink = (
        0 if scalars is None else scalars[pl.program_id(0) * num_blocks + of_queries]
        for scalars in (refs.cuts, None if copied else refs.first_sinks)
    )
    if copied:
        copies = sink_copies(call, copied, num_blocks, order, refs, room)
        first_sink = copies.start(of_queries)
        pl.when((part == 0) & (index < num_blocks))(functools.partial(copies.fetch, index))
        refs = refs._replace(sink_keys=copies.sink_keys, sink_values=copies.sink_values)
    cut += call.zero_cut
    step = WindowBackwardStep(
        call, refs, grid.members, grid.members * grid.parts, index, part, first_sink, has_segments
    )
    if call.spec.num_sink_tokens and not step.writes_sinks:
        for acc in (refs.dk_sinks_acc, refs.dv_sinks_acc):
            new = part == 0 if has_segments else (index == 0) & (part == 0)
            pl.when(new)(functools.partial(clear, acc, ...))

    # The first steps lack blocks before the sequence, and their window may cover some of the sink tokens.
    steps = window_steps(call, num_blocks)
    for i, (present, sinks) in enumerate(steps):
        here = index == i if i + 1 < len(steps) else (index >= i) & (index < num_blocks)
        if has_segments:
            _attend_packed(step, cut, here, present, sinks, is_last=i + 1 == len(steps))
        else:
            pl.when(here)(WindowBackwardBody(step, present, sinks, usual=i + 1 == len(steps)).attend)

    if call.spec.num_sink_tokens and not step.writes_sinks:
        last = index < num_blocks if has_segments else index == num_blocks - 1
        pl.when(last & (part == grid.parts - 1))(step.write_sinks)

    # A single query head has written what leaves the ring with its last addition, except after the last queries.
    all_left = index >= (max(back, num_blocks) if step.group == 1 else back)
    pl.when(all_left & (part == grid.parts - 1))(lambda: step.write_keys(slice(0, call.tiles.q_block)))


def _attend_packed(step: WindowBackwardStep, cut, here, present: int, sinks: str | None, is_last: bool) -> None:
    """A step of packed rows; the first ones, of which there are few, go by token whatever their documents."""
    by_token = "by token" if sinks is not None else None
    if not is_last:
        pl.when(here)(WindowBackwardBody(step, present, by_token, by_token=True).attend)
        return
    pl.when(here & (cut == Cut.NO))(WindowBackwardBody(step, present, sinks, usual=True).attend)
    pl.when(here & (cut == Cut.WITHOUT_SINKS))(WindowBackwardBody(step, present, None, by_token=True).attend)
    if step.call.spec.num_sink_tokens:
        pl.when(here & (cut == Cut.WITH_SINKS))(WindowBackwardBody(step, present, "by token", by_token=True).attend)
