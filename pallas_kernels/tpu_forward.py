"""Attention forward on TPUs for any pattern: full causal, long windows, full rows, keys outside a window.

The grid walks over pairs of blocks (`tpu_walk`) with FlashAttention's running maximum and sum. The order of the program
is the software pipeline: the products q.k of one strip of queries stand before the exponentials of the strip before it.

`scheduled_forward` writes into `previous` when given, for the heads it is told to serve.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.spec import Coordinates
from pallas_kernels.tpu_tiles import (
    LANES,
    LOG2E,
    MASKED,
    NN,
    NT,
    Call,
    Heads,
    addend_at,
    batch_index,
    dot,
    form_logits,
    head_at,
    launch,
    over_lanes,
    shape_like,
    sigmoid_values,
    sigmoid_weights,
    split,
    tile_mask,
    write_softmax,
)
from pallas_kernels.tpu_walk import default_mask, seen_tiles, walk_over


def scheduled_forward(
    call: Call,
    q: jax.Array,  # [B, H, T, D], times call.query_factor
    k: jax.Array,  # [B, K, S, D]
    v: jax.Array,  # [B, K, S, D]
    head_bias: jax.Array,  # [2, H] f32: ALiBi slope and bias
    where: Coordinates,
    heads: Heads,
    previous: tuple[jax.Array, ...] = (),
    initial: tuple[jax.Array, ...] = (),
) -> tuple[jax.Array, ...]:
    """Returns out [B, H, T, D] and, for softmax, lse [B, H, 1, T] f32 (natural log, -inf where nothing is seen).

    Args:
      initial: out and lse over other keys of the same queries; the results are then those over all keys together.
    """
    batch, num_heads, q_length, head_dim = q.shape
    group = num_heads // k.shape[1]
    q_block, kv_block = call.tiles.q_block, call.tiles.kv_block
    walk = walk_over(call, where)
    info = walk.information(call, head_bias, where)
    heads = heads.queries(group)

    def spec(block, index):
        """A block located by batch, query head and visit."""

        def index_map(b, h, *rest):
            indices, scalars, order = split(rest, len(walk.grid), len(walk.scalars))
            return index(b, head_at(h, order), walk.visit(indices, scalars))

        return pl.BlockSpec(block, index_map)

    queries = spec((None, None, q_block, head_dim), lambda b, h, visit: (b, h, visit.row, 0))
    keys = spec((None, None, kv_block, head_dim), lambda b, h, visit: (b, h // group, visit.column, 0))
    rows = spec((None, None, 1, q_block), lambda b, h, visit: (b, h, 0, visit.row))
    in_specs = [queries, keys, keys, *[queries, rows][: len(initial)]]
    if info:
        in_specs += [
            spec((None, 8, LANES), lambda b, h, visit: (h, 0, 0)),
            spec((None, 8, q_block), lambda b, h, visit: (batch_index(b, info[1]), 0, visit.row)),
            spec((None, 8, kv_block), lambda b, h, visit: (batch_index(b, info[2]), 0, visit.column)),
        ]
    out_specs, out_shapes = [queries], [shape_like(q.shape, q.dtype, q)]
    scratch = [pltpu.VMEM((q_block, head_dim), jnp.float32)]
    if call.softmax:
        out_specs.append(rows)
        out_shapes.append(shape_like((batch, num_heads, 1, q_length), jnp.float32, q))
        scratch += [pltpu.VMEM((q_block, LANES), jnp.float32)] * 2
    return launch(
        call,
        functools.partial(
            _kernel,
            call,
            walk,
            where.q_seg is not None,
            where.full_rows is not None,
            len(initial),
            len(info),
        ),
        "scheduled_forward",
        grid=(batch, heads.count, *walk.grid),
        scalars=walk.scalars,
        heads=heads,
        inputs=(q, k, v, *initial, *info),
        in_specs=in_specs,
        outputs=out_shapes,
        out_specs=out_specs,
        scratch=scratch,
        previous=previous,
    )


def _kernel(call, walk, has_segments, has_full_rows, num_initial, num_info, order, *refs):
    scalars, (q_ref, k_ref, v_ref, *rest) = split(refs, len(walk.scalars))
    visit = walk.visit([pl.program_id(2 + i) for i in range(len(walk.grid))], scalars)
    initial, info, rest = split(rest, num_initial, num_info)
    bias_ref, q_info, kv_info = info or (None,) * 3
    if call.softmax:
        out_ref, lse_ref, acc_ref, top_ref, total_ref = rest
    else:
        out_ref, acc_ref = rest
    by_head = (bias_ref[0:1, 0:1], bias_ref[1:2, 0:1]) if info else None
    begins_fresh = walk.fresh is not None and not initial
    may_be_empty = walk.is_list or not (begins_fresh or initial)  # a row of the results
    q_block = q_ref.shape[0]
    strip, tile = math.gcd(call.tiles.strip, q_block), math.gcd(call.tiles.tile, k_ref.shape[0])
    strips = [slice(start, start + strip) for start in range(0, q_block, strip)]
    sum_on_mxu = call.tiles.sum_on_mxu and v_ref.shape[1] % LANES == 0

    @pl.when(visit.first & (not begins_fresh))
    def _():
        if initial:
            acc_ref[...] = initial[0][...].astype(jnp.float32)
        else:
            acc_ref[...] = jnp.zeros_like(acc_ref)
        if call.softmax and initial:
            lse = jnp.broadcast_to(initial[1][...] * LOG2E, (LANES, q_block)).T
            top_ref[...] = jnp.maximum(lse, MASKED)
            total_ref[...] = jnp.where(lse > MASKED, 1.0, 0.0)
        elif call.softmax:
            top_ref[...] = jnp.full_like(top_ref, MASKED)
            total_ref[...] = jnp.zeros_like(total_ref)

    def attend(seen):
        fresh = begins_fresh and seen == walk.fresh
        query = q_info[...].T if seen == "tokens" or call.has_slopes else None  # [q_block, 8]

        def logits(rows):
            tiles = []
            for keys, masked in seen_tiles(call, seen, rows, tile):
                s = dot(q_ref[rows, :], k_ref[keys, :], NT)  # [strip, keys]
                key = None if query is None else [kv_info[i : i + 1, keys] for i in range(2)]
                mine = None if query is None else [query[rows, i : i + 1] for i in range(3)]
                s, _ = form_logits(call, s, lambda mine=mine, key=key: addend_at(call, mine, key, by_head))
                if masked and seen == "tokens":
                    s = jnp.where(tile_mask(call, has_segments, has_full_rows, mine, key, s.shape), s, MASKED)
                elif masked:
                    relative = lax.broadcasted_iota(jnp.int32, s.shape, 0)
                    relative -= lax.broadcasted_iota(jnp.int32, s.shape, 1)
                    s = jnp.where(default_mask(call, seen, rows, keys, relative), s, MASKED)
                tiles.append((s, keys))
            top = None
            if call.softmax and tiles:
                top = over_lanes(jnp.maximum, [s for s, _ in tiles]).max(axis=1, keepdims=True)
            return tiles, top

        def accumulate(rows, tiles, top):
            if not tiles:
                return
            if not call.softmax:
                acc = sum(sigmoid_values(sigmoid_weights(s), v_ref[keys, :]) for s, keys in tiles)
                acc_ref[rows, :] = acc if fresh else acc_ref[rows, :] + acc
                return
            acc, total = 0.0, 0.0
            new = jnp.broadcast_to(top, (strip, LANES))  # all lanes alike
            if not fresh:
                old = top_ref[rows, :]
                new = jnp.maximum(old, top)
                decay = jnp.exp2(old - new)
                acc, total = acc_ref[rows, :] * _as_wide(decay, acc_ref), total_ref[rows, :] * decay
            sums = []
            for s, keys in tiles:
                weights, value = jnp.exp2(s - new[:, :1]), v_ref[keys, :]
                if sum_on_mxu:
                    value = jnp.concatenate([value, jnp.ones((value.shape[0], LANES), value.dtype)], axis=1)
                    product = dot(weights.astype(value.dtype), value, NN)
                    acc, total = acc + product[:, :-LANES], total + product[:, -LANES:]
                else:
                    acc += dot(weights.astype(value.dtype), value, NN)
                    sums.append(weights)
            if sums:
                total += over_lanes(jnp.add, sums).sum(axis=1, keepdims=True)
            acc_ref[rows, :], top_ref[rows, :] = acc, new
            total_ref[rows, :] = jnp.broadcast_to(total, new.shape)

        ahead = logits(strips[0])
        for i, rows in enumerate(strips):
            current = ahead
            if i + 1 < len(strips):
                ahead = logits(strips[i + 1])
            accumulate(rows, *current)

    for seen, here in walk.cases(visit):
        pl.when(here)(functools.partial(attend, seen))

    @pl.when(visit.last)
    def _():
        for rows in strips:
            if call.softmax:
                top, total = (_as_wide(ref[rows, :], acc_ref) for ref in (top_ref, total_ref))
                write_softmax(out_ref, lse_ref, rows, acc_ref[rows, :], top, total, may_be_empty)
            else:
                out_ref[rows, :] = acc_ref[rows, :].astype(out_ref.dtype)


def _as_wide(column, like):
    """A column that fills all lanes, as an operand of rows of `like`, which are as wide or need a broadcast."""
    return column if like.shape[1] == LANES else column[:, :1]
