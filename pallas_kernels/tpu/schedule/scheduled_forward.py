"""Attention forward on TPUs for any pattern: full causal, long windows, full rows, keys outside a window.

The grid visits pairs of blocks (`pair_schedule`) with FlashAttention's running maximum and sum (`forward_step`).

`scheduled_forward` writes into `previous` when given, for the heads it is told to serve. `branches_forward` takes the
whole window of a block of queries first, writes that result, and goes on with the keys outside.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.math.spec import Coordinates
from pallas_kernels.tpu.schedule.forward_step import ForwardStatic, ForwardStep
from pallas_kernels.tpu.schedule.pair_schedule import has_default_positions, order_pairs
from pallas_kernels.tpu.schedule.side_by_side import SideBySide, heads_side_by_side, scratch_of
from pallas_kernels.tpu.tile.rotation import add_tables, rotate_tile
from pallas_kernels.tpu.tile.tiles import (
    LANES,
    Call,
    LaunchHeads,
    batch_index,
    by_head,
    cost_of,
    describe_tokens,
    head_at,
    launch,
    shape_like,
    split,
)

_RESIDENT_BYTES = 32 * 2**20  # of keys and values in VMEM
_MAX_BRANCH_WINDOW = 2048  # that `branches_forward` takes in one go


def scheduled_forward(
    call: Call,
    q: jax.Array,  # [B, H, T, D], times call.query_factor
    k: jax.Array,  # [B, K, S, D]
    v: jax.Array,  # [B, K, S, D]
    head_bias: jax.Array,  # [2, H] f32: ALiBi slope and bias
    where: Coordinates,
    heads: LaunchHeads,
    previous: tuple[jax.Array, ...] = (),
    initial: tuple[jax.Array, ...] = (),
    *,
    listed: bool = False,
) -> tuple[jax.Array, ...]:
    """Returns out [B, H, T, D] and, for softmax, lse [B, H, 1, T] f32 (base 2, -inf where nothing is seen).

    Args:
      initial: out and lse over other keys of the same queries; the results are then those over all keys together.
      listed: most blocks of queries see no key. They are left out, and the results are `initial`, changed in place.
    """
    return _forward(call, q, k, v, head_bias, where, heads, previous, initial, branches=False, listed=listed)


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
    call: Call, q, k, v, head_bias, where: Coordinates, heads: LaunchHeads
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """The results of the window and those of all keys (each as `scheduled_forward`'s), from one pass over the keys."""
    outside = dataclasses.replace(call, outside=True)
    results = _forward(outside, q, k, v, head_bias, where, heads, (), (), branches=True)
    return results[: len(results) // 2], results[len(results) // 2 :]


def fits_vmem(length: int, head_dim: int, dtype) -> bool:
    """Whether VMEM holds all keys and values of a head, and those of the next one."""
    return 4 * length * max(head_dim, LANES) * jnp.dtype(dtype).itemsize <= _RESIDENT_BYTES


def _forward(call, q, k, v, head_bias, where, heads, previous, initial, branches, listed=False):
    batch, num_heads, q_length, head_dim = q.shape
    kv_length, group = k.shape[2], num_heads // k.shape[1]
    q_block, kv_block = call.tiles.q_block, call.tiles.kv_block
    side = heads_side_by_side(call, group) if listed else 1
    heads = heads.queries(group // side)
    resident = fits_vmem(kv_length, head_dim, k.dtype)
    schedule = order_pairs(call, where, resident=resident, only_plain=branches, listed=listed)

    def spec(block, index):
        """A block located by batch, query head and visit."""

        def index_map(b, h, *rest):
            indices, scalars, order = split(rest, len(schedule.grid), len(schedule.scalars))
            return index(b, head_at(h, order), schedule.fetched(schedule.visit(indices, scalars), b, scalars))

        return pl.BlockSpec(block, index_map)

    of_heads = side if listed else None
    queries = spec((None, of_heads, q_block, head_dim), lambda b, h, visit: (b, h, visit.row, 0))
    held = kv_length if schedule.resident else kv_block  # keys at hand

    def column(visit):
        return 0 if schedule.resident else visit.column

    keys = spec((None, None, held, head_dim), lambda b, h, visit: (b, h // (group // side), column(visit), 0))
    rows = spec((None, of_heads, 1, q_block), lambda b, h, visit: (b, h, 0, visit.row))
    inputs = [q, k, v, *initial]
    in_specs = [queries, keys, keys, *[queries, rows][: len(initial)]]
    if call.has_slopes or call.has_bias:
        inputs.append(by_head(head_bias))
        in_specs.append(spec((None, 8, LANES), lambda b, h, visit: (h, 0, 0)))
    if schedule.is_list:
        tokens = describe_tokens(where)
        inputs += tokens
        in_specs += [
            spec((None, 8, q_block), lambda b, h, visit: (batch_index(b, tokens.queries), 0, visit.row)),
            spec((None, 8, held), lambda b, h, visit: (batch_index(b, tokens.keys), 0, column(visit))),
        ]
    if schedule.packed is not None:
        inputs.append(schedule.packed.documents.first_keys)
        in_specs.append(spec((None, 1, q_block), lambda b, h, visit: (b, 0, visit.row)))
    table = (None, q_block, head_dim)
    add_tables(where, inputs, in_specs, lambda row: spec(table, lambda b, h, visit: (row(b), visit.row, 0)))
    out_specs, out_shapes = [queries], [shape_like(q.shape, call.result_dtype(q), q)]
    num_rows = side * q_block
    scratch = [pltpu.VMEM((num_rows, head_dim), jnp.float32)]
    if schedule.is_list:
        scratch.append(pltpu.VMEM((kv_block, head_dim), v.dtype))
    if branches:
        scratch.append(pltpu.SMEM((1,), jnp.int32))
    if call.rotated_by:
        scratch.append(pltpu.VMEM((num_rows, head_dim), q.dtype))
    if call.softmax:
        out_specs.append(rows)
        out_shapes.append(shape_like((batch, num_heads, 1, q_length), jnp.float32, q))
        scratch += [pltpu.VMEM((num_rows, LANES), jnp.float32)] * 2
    if listed:
        scratch += scratch_of(num_rows, q, call.result_dtype(q))
    has_segments = where.q_segment_ids is not None and schedule.is_list
    static = ForwardStatic(call, schedule, has_segments, where.full_rows is not None, branches, len(initial))
    return launch(
        call,
        functools.partial(_kernel, static),
        "branches_forward" if branches else "scheduled_forward",
        grid=(batch, heads.count, *schedule.grid),
        scalars=schedule.scalars,
        heads=heads,
        inputs=inputs,
        in_specs=in_specs,
        outputs=out_shapes * (2 if branches else 1),
        out_specs=out_specs * (2 if branches else 1),
        scratch=scratch,
        previous=previous,
        in_place={3 + i: i for i in range(len(initial))} if listed else None,
        cost=cost_of(call, q, k),
    )


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
    slope_and_bias = None
    if refs.head_bias is not None:
        slope_and_bias = refs.head_bias[0:1, 0:1], refs.head_bias[1:2, 0:1]
    step = ForwardStep(static, refs, visit, slope_and_bias)
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
