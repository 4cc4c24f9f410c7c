"""Attention forward on TPUs for any pattern: full causal, long windows, full rows, keys outside a window.

The grid visits pairs of blocks (`pair_schedule`) with FlashAttention's running maximum and sum (`forward_step`).

`scheduled_forward` writes into `previous` when given, for the heads it is told to serve. `branches_forward` takes the
whole window of a block of queries first, writes that result, and goes on with the keys outside.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.math.spec import Coordinates
from pallas_kernels.tpu.schedule.forward_step import AHEAD, ForwardStatic, ForwardStep
from pallas_kernels.tpu.schedule.pair_schedule import has_default_positions, order_pairs, token_blocks
from pallas_kernels.tpu.schedule.side_by_side import SideBySide, heads_side_by_side, scratch_of
from pallas_kernels.tpu.tile.rotation import rotate_tile
from pallas_kernels.tpu.tile.tiles import (
    LANES,
    Blocked,
    Call,
    LaunchGrid,
    LaunchHeads,
    TpuOperands,
    by_head,
    cost_of,
    head_at,
    launch,
    read_width,
    shape_like,
    slope_and_bias,
    split,
    whole_lanes,
    window_of,
)

_RESIDENT_BYTES = 32 * 2**20  # of keys and values in VMEM
_MAX_BRANCH_WINDOW = 2048  # that `branches_forward` takes in one go


def scheduled_forward(
    call: Call,
    x: TpuOperands,
    heads: LaunchHeads,
    previous: tuple[jax.Array, ...] = (),
    initial: tuple[jax.Array, ...] = (),
    *,
    listed: bool = False,
    branches: bool = False,
) -> tuple[jax.Array, ...]:
    """Returns out [B, H, T, D] and, for softmax, lse [B, H, 1, T] f32 (base 2, -inf where nothing is seen).

    Args:
      initial: out and lse over other keys of the same queries; the results are then those over all keys together.
      listed: most blocks of queries see no key. They are left out, and the results are `initial`, changed in place.
      branches: the call is over the keys outside; the results of the window come first, and those of all keys behind.
    """
    batch, num_heads, q_length, head_dim = x.q.shape
    group, q_block = num_heads // x.k.shape[1], call.tiles.q_block
    side = heads_side_by_side(call, group) if listed else 1
    heads = heads.queries(group // side)
    resident = fits_vmem(x.k.shape[2], head_dim, x.k.dtype)
    schedule = order_pairs(call, x.where, resident=resident, only_plain=branches, listed=listed)

    def spec(block, index):
        """A block located by batch, query head and visit."""

        def index_map(b, h, *rest):
            indices, scalars, order = split(rest, len(schedule.grid), len(schedule.scalars))
            return index(b, head_at(h, order), schedule.fetched(schedule.visit(indices, scalars), b, scalars))

        return pl.BlockSpec(block, index_map)

    def keys(b, h, visit):
        return b, h // (group // side), schedule.column(visit), 0

    of_heads = side if listed else None
    queries = spec((None, of_heads, q_block, head_dim), lambda b, h, visit: (b, h, visit.row, 0))
    rows = spec((None, of_heads, 1, q_block), lambda b, h, visit: (b, h, 0, visit.row))
    of_keys, of_values = (
        spec((None, None, schedule.keys_at_hand(call, x.k), width), keys)
        for width in (head_dim, read_width(call, head_dim))
    )
    inputs = [Blocked(x.q, queries), Blocked(x.k, of_keys), Blocked(x.v, of_values)]
    results = zip(initial, (queries, rows), strict=False)
    inputs += [Blocked(array, at, becomes=i if listed else None) for i, (array, at) in enumerate(results)]
    if call.has_head_bias:
        inputs.append(Blocked(by_head(x.head_bias), spec((None, 8, LANES), lambda b, h, visit: (h, 0, 0))))
    inputs += token_blocks(call, schedule, x, lambda block, at: spec(block, lambda b, h, visit: at(b, visit)))
    outputs = [Blocked(shape_like(x.q.shape, call.result_dtype(x.q), x.q), queries)]
    if call.softmax:
        outputs.append(Blocked(shape_like((batch, num_heads, 1, q_length), jnp.float32, x.q), rows))
    has_segments = x.where.q_segment_ids is not None and schedule.is_list
    static = ForwardStatic(call, schedule, has_segments, x.where.full_rows is not None, branches, len(initial))
    return launch(
        call,
        functools.partial(_kernel, static),
        "branches_forward" if branches else "scheduled_forward",
        grid=LaunchGrid((batch, heads.count, *schedule.grid), heads, schedule.scalars),
        inputs=inputs,
        outputs=outputs * (2 if branches else 1),
        scratch=_scratch(static, x, side * q_block),
        previous=previous,
        cost=cost_of(call, x.q, x.k),
    )


def serves_branches(call: Call, where: Coordinates, head_dim: int, dtype) -> bool:
    """Whether `branches_forward` can do the call: a window that it holds whole, and keys that VMEM does."""
    window = call.spec.window
    return (
        window is not None
        and window <= _MAX_BRANCH_WINDOW
        and has_default_positions(call, where)
        and fits_vmem(where.kv_order.shape[1], head_dim, dtype)
    )


def branches_forward(
    call: Call, x: TpuOperands, heads: LaunchHeads
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """The results of the window and those of all keys (each as `scheduled_forward`'s), from one pass over the keys."""
    results = scheduled_forward(dataclasses.replace(call, outside=True), x, heads, branches=True)
    return results[: len(results) // 2], results[len(results) // 2 :]


def fits_vmem(length: int, head_dim: int, dtype) -> bool:
    """Whether VMEM holds all keys and values of a head, and those of the next one."""
    return 4 * length * max(head_dim, LANES) * jnp.dtype(dtype).itemsize <= _RESIDENT_BYTES


def _scratch(static: ForwardStatic, x: TpuOperands, num_rows: int) -> list[Any]:
    """In the order of `ForwardRefs` from `acc` on."""
    call, head_dim = static.call, x.q.shape[3]
    width = read_width(call, head_dim)
    scratch = [pltpu.VMEM((num_rows, width), jnp.float32)]
    if static.schedule.is_list:
        scratch.append(pltpu.VMEM((call.tiles.kv_block, width), x.v.dtype))
    if static.branches:
        scratch.append(pltpu.SMEM((1,), jnp.int32))
    if call.rotated_by:
        scratch.append(pltpu.VMEM((num_rows, head_dim), x.q.dtype))
    if static.stores_logits:
        tiles = call.tiles
        strip, tile = math.gcd(tiles.strip, num_rows), math.gcd(tiles.tile, tiles.kv_block)
        blocks = 1 + (-(-(window_of(call) - 1) // tiles.kv_block) if static.branches else 0)
        columns = blocks * (tiles.kv_block // tile) * whole_lanes(tile)
        scratch.append(pltpu.VMEM((AHEAD + 1, strip, columns), jnp.float32))
    if call.softmax:
        scratch += [pltpu.VMEM((num_rows, LANES), jnp.float32)] * 2
    if static.schedule.listed is not None:
        scratch += scratch_of(num_rows, x.q, call.result_dtype(x.q))
    return scratch


def _kernel(static, order, *unnamed):
    schedule = static.schedule
    scalars, rest = split(unnamed, len(schedule.scalars))
    visit = schedule.visit([pl.program_id(2 + i) for i in range(len(schedule.grid))], scalars)
    visit = schedule.in_row(visit, pl.program_id(0), scalars)
    side = None
    if schedule.listed is None:
        refs = static.name_refs(rest)
    else:
        side = SideBySide(static, rest)
        static, refs = side.static, side.refs
        pl.when(visit.first)(side.begin)
    call = static.call
    if call.rotated_by:

        @pl.when(visit.first)
        def _():
            block = refs.cos.shape[0]
            for at in range(0, call.tiles.q_block, block):
                rows = slice(at, at + block)
                refs.rotated_q[rows, :] = rotate_tile(call, refs.q[rows, :], refs.cos[...], refs.sin[...])

        refs = refs._replace(q=refs.rotated_q)
    step = ForwardStep(static, refs, visit, slope_and_bias(refs.head_bias))
    clean: Any = 0 if schedule.packed is None else schedule.packed.bounds(scalars, pl.program_id(0), visit.row).clean
    if static.branches:
        step.attend_window(clean)
    elif not static.fresh:
        pl.when(visit.first)(step.begin)
    elif schedule.packed is not None:
        pl.when(visit.first & (clean > visit.row))(step.begin)
    schedule.run(visit, scalars, step.attend_pair, step.attend_small)

    @pl.when(visit.last)
    def _():
        for rows in step.strips:
            step.write(refs.results, rows)
        if side is not None:
            side.end()
