"""Window attention forward on TPUs: the whole window of a block of queries in one grid step.

Its strips of query rows each see every key they need at once: the exact maximum comes first, then one exp2 and one
matmul with V; nothing is rescaled and nothing carried from step to step. The order of the program is the software
pipeline: the products q.k of later strips stand before the exponentials of strip t, so that the matrix unit works while
the vector unit does. The window's two edges are one tile (`shared_columns`).
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tpu.tile.rotation import table_blocks
from pallas_kernels.tpu.tile.tiles import (
    LANES,
    Blocked,
    Call,
    LaunchGrid,
    LaunchHeads,
    Ref,
    TpuOperands,
    by_head,
    cost_of,
    head_at,
    launch,
    read_width,
    shape_like,
    split,
    take,
    whole_lanes,
)
from pallas_kernels.tpu.window.document_codes import document_codes, reads_codes
from pallas_kernels.tpu.window.geometry import (
    Cut,
    Segments,
    blocks_back,
    oldest_rows,
    packed_segments,
    scalars_of,
    sink_rows,
    window_steps,
    window_tiles,
)
from pallas_kernels.tpu.window.packed_sinks import documents_copied, room_for_copies, sink_blocks, sink_copies
from pallas_kernels.tpu.window.window_forward_step import AHEAD, WindowForwardBody, WindowForwardRefs, mark_rows_nan


def window_forward(
    call: Call, x: TpuOperands, heads: LaunchHeads, previous: tuple[jax.Array, ...] = ()
) -> tuple[jax.Array, ...]:
    """As `scheduled_forward`, for the calls of `Call.window_kernel`."""
    call, (batch, num_heads, length, head_dim) = _with_own_strip(call), x.q.shape  # heads abreast as one
    block, group = call.tiles.q_block, num_heads // x.k.shape[1]
    segments = None if x.where.q_segment_ids is None else packed_segments(call, x.where)
    packed = segments is not None
    copied = documents_copied(call, packed)
    scalars = scalars_of(call, segments, copied or 1)

    def spec(block_shape, index):
        """A block located by batch, query head, KV head and step."""

        def index_map(b, h, i, g, *scalar):
            kv = head_at(h, scalar[len(scalars) :])
            return index(b, kv * group + g, kv, i)

        return pl.BlockSpec(block_shape, index_map)

    queries, out = (
        spec((None, None, block, width), lambda b, h, kv, i: (b, h, i, 0))
        for width in (read_width(call, head_dim), head_dim)
    )
    outputs = [Blocked(shape_like(x.q.shape, call.result_dtype(x.q), x.q), out)]
    if call.softmax:
        lse = shape_like((batch, num_heads * call.abreast, 1, length), jnp.float32, x.q)
        outputs.append(Blocked(lse, spec((None, call.abreast, 1, block), lambda b, h, kv, i: (b, h, 0, i))))
    return launch(
        call,
        functools.partial(_window_kernel, call, packed, copied, length // block),
        "window_forward",
        grid=LaunchGrid(window_forward_grid(call, batch, heads.count, length, group), heads, scalars),
        inputs=[Blocked(x.q, queries), *_inputs(call, x, segments, spec)],
        outputs=outputs,
        scratch=[pltpu.SMEM((1,), jnp.int32), *_room_for_logits(call, packed), *room_for_copies(call, copied, x.k)],
        previous=previous,
        cost=cost_of(call, x.q, x.k),
    )


def _inputs(call: Call, x: TpuOperands, segments: Segments | None, spec: Callable) -> list[Blocked]:
    """What the kernel reads beside the queries."""
    block, (*_, length, head_dim) = call.tiles.q_block, x.q.shape
    width = read_width(call, head_dim)
    window = range(blocks_back(call), -1, -1)

    def keys(before):
        rows, at = _window_rows(call, before)
        return spec((None, None, rows, width), lambda b, h, kv, i: (b, kv, jnp.maximum(at(i), 0), 0))

    inputs = []
    if call.has_head_bias:
        inputs.append(Blocked(by_head(x.head_bias), spec((call.abreast, 8, LANES), lambda b, h, kv, i: (h, 0, 0))))
    inputs += [Blocked(array, keys(before)) for array in (x.k, x.v) for before in window]
    of_step = segments is not None
    sinks = (None, None, sink_rows(call, of_step), head_dim)
    inputs += sink_blocks(call, x, segments, spec(sinks, lambda b, h, kv, i: (b, kv, i if of_step else 0, 0)))
    if segments is not None:
        inputs.append(Blocked(segments.queries, spec((None, 8, block), lambda b, h, kv, i: (b, 0, i))))
        if reads_codes(call, width):
            codes = document_codes(x.where, x.q.dtype, behind=block)
            inputs += [Blocked(codes, _codes(call, length, before)) for before in window]
    table = (None, block, head_dim)
    return inputs + table_blocks(x.where, lambda row: spec(table, lambda b, h, kv, i: (row(b), i, 0)))


def window_forward_grid(call: Call, batch: int, kv_heads: Any, length: int, group: int) -> tuple[Any, ...]:
    """The query heads that read the same keys follow each other: no block of keys is fetched twice."""
    return batch, kv_heads, length // call.tiles.q_block, group


def _window_rows(call: Call, before: int) -> tuple[int, Callable[[Any], Any]]:
    """Of one of the window's blocks: so many rows are read, and which ones in step i; before the sequence, < 0."""
    block = call.tiles.q_block
    rows = oldest_rows(call) if before == blocks_back(call) else block
    # Of a short window, a step's are the rows right before its own.
    each, before = block // rows, 1 if rows < block else before
    return rows, lambda i: i * each - before


def _codes(call: Call, length: int, before: int) -> pl.BlockSpec:
    """The block of the document codes of the same rows."""
    rows, at = _window_rows(call, before)

    def index_map(b, h, i, g, cuts, *scalar):
        is_cut = cuts[b * (length // call.tiles.q_block) + i] + call.zero_cut != Cut.NO
        index = jnp.where(at(i) < 0, length // rows, at(i))  # what stands for keys before the sequence
        # A step that no document cuts reads none: the block that is there stays.
        return b, jnp.where(is_cut, index, 0), 0

    return pl.BlockSpec((None, rows, LANES), index_map)


def _with_own_strip(call: Call) -> Call:
    """No statistics of a row are shared by its strip where the activation is a sigmoid: a short one spills less."""
    if call.softmax:
        return call
    tiles = dataclasses.replace(call.tiles, strip=min(call.tiles.strip, LANES))
    return dataclasses.replace(call, tiles=tiles)


def _room_for_logits(call: Call, packed: bool) -> list[Any]:
    """For the logits of as many strips as are on their way at once."""
    if not call.softmax:
        return []
    block, strip = call.tiles.q_block, math.gcd(call.tiles.strip, call.tiles.q_block)
    widest = max(
        sum(whole_lanes(tile.size) for tile in window_tiles(call, start, blocks_back(call) + 1))
        for start in range(0, block, strip)
    )
    columns = widest + whole_lanes(sink_rows(call, packed))
    return [pltpu.VMEM((AHEAD + 2, strip, columns), jnp.float32)]


def _name_refs(call: Call, has_segments: bool, refs: tuple[Ref, ...]) -> tuple[WindowForwardRefs, list[Ref]]:
    """What a step reads and writes, and `room_for_copies`."""
    has_sinks = call.spec.num_sink_tokens > 0
    *scalars, rest = take(refs, has_segments, has_segments and has_sinks)
    queries, head_bias, rest = take(rest, True, call.has_head_bias)
    keys, values, rest = split(rest, blocks_back(call) + 1, blocks_back(call) + 1)
    *of_documents, rest = take(rest, has_sinks, has_sinks, has_segments)
    has_codes = has_segments and reads_codes(call, queries.shape[1])
    codes, rest = split(rest, has_codes * (blocks_back(call) + 1))
    rotated = call.rotated_by > 0
    *others, rest = take(rest, rotated, rotated, True, call.softmax, True, call.softmax)
    named: list[Any] = [*scalars, queries, head_bias, keys, values, *of_documents, codes, *others]
    return WindowForwardRefs(*named), rest


def _window_kernel(
    call: Call, has_segments: bool, copied: int, num_steps: int, order: tuple[Ref, ...], *unnamed: Ref
) -> None:
    refs, room = _name_refs(call, has_segments, unnamed)
    step = pl.program_id(2)
    first_sink = jnp.int32(0)
    if copied:
        copies = sink_copies(call, copied, num_steps, order, refs, room)
        first_sink = copies.start(step)
        # The other query heads that read the same keys find them there.
        pl.when(pl.program_id(3) == 0)(functools.partial(copies.fetch, step))
        refs = refs._replace(sink_keys=copies.sink_keys, sink_values=copies.sink_values)
    elif refs.first_sinks is not None:
        first_sink = refs.first_sinks[pl.program_id(0) * num_steps + step]
    body = functools.partial(WindowForwardBody, call, refs, step, first_sink)

    def attend_packed(present: int, sinks: str | None, exact: bool = False) -> None:
        body(present, sinks, by_token=True, exact=exact).attend()

    # The first steps lack blocks before the sequence, and their window may cover some of the sink tokens.
    steps = window_steps(call, num_steps)
    cut = None if refs.cuts is None else refs.cuts[pl.program_id(0) * num_steps + step] + call.zero_cut
    for i, (present, sinks) in enumerate(steps):
        here = step == i if i + 1 < len(steps) else step >= i
        whole = True if cut is None else cut == Cut.NO
        pl.when(here & whole)(body(present, sinks).attend)
    all_present = steps[-1][0]
    has_sinks = call.spec.num_sink_tokens > 0
    if cut is not None:  # Keys before the sequence come before any query's first key.
        pl.when(cut == Cut.WITHOUT_SINKS)(functools.partial(attend_packed, all_present, None))
        if has_sinks:
            pl.when(cut == Cut.WITH_SINKS)(functools.partial(attend_packed, all_present, "by token"))

    # A value that is not finite made NaN of queries that do not see it: all of the step once more, in one slow body.
    @pl.when(refs.nonfinite[0] != 0)
    def _():
        sinks = "some" if cut is None else "by token"
        attend_packed(all_present, sinks if has_sinks else None, exact=True)
        mark_rows_nan(call, refs, step)
