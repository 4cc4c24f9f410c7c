"""Attention forward on TPUs: a kernel for windows and one for everything.

`window_forward` takes the whole window of a block of queries in one grid step. Its strips of query rows each see every
key they need at once: the exact maximum comes first, then one exp2 and one matmul with V; nothing is rescaled and
nothing carried from step to step. The order of the program is the software pipeline: the products q.k of strip t + 1
stand before the exponentials of strip t, so that the matrix unit works while the vector unit does.

`scheduled_forward` walks over a list of block pairs in scalar memory (FlashAttention's running maximum and sum), and so
serves any pattern: full causal, long windows, full rows, given positions, the keys outside a window.

Both write into `previous` when given, for the heads they are told to serve.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.schedule import unpack
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
    by_head,
    describe_tokens,
    dot,
    form_logits,
    head_at,
    launch,
    shape_like,
    sigmoid_weights,
    tile_mask,
    to_row,
    visits,
)
from pallas_kernels.tpu_window import blocks_back, first_keys, sink_rows, window_steps, window_tiles


def scheduled_forward(
    call: Call,
    q: jax.Array,  # [B, H, T, D], times call.query_factor
    k: jax.Array,  # [B, K, S, D]
    v: jax.Array,  # [B, K, S, D]
    head_bias: jax.Array,  # [2, H] f32: ALiBi slope and bias
    where: Coordinates,
    heads: Heads,
    previous: tuple[jax.Array, ...] = (),
    out_dtype=None,
) -> tuple[jax.Array, ...]:
    """Returns out [B, H, T, D] and, for softmax, lse [B, H, 1, T] f32 (natural log, -inf where nothing is seen)."""
    batch, num_heads, q_length, head_dim = q.shape
    group = num_heads // k.shape[1]
    q_block, kv_block = call.tiles.q_block, call.tiles.kv_block
    schedule = visits(call, where)
    tokens = describe_tokens(where)
    heads = heads.queries(group)

    def spec(block, index):
        """A block located by batch, query head and visit."""

        def index_map(b, h, p, pairs, *order):
            return index(b, head_at(h, order), unpack(pairs[p]))

        return pl.BlockSpec(block, index_map)

    queries = spec((None, None, q_block, head_dim), lambda b, h, visit: (b, h, visit.row, 0))
    keys = spec((None, None, kv_block, head_dim), lambda b, h, visit: (b, h // group, visit.column, 0))
    rows = spec((None, None, 1, q_block), lambda b, h, visit: (b, h, 0, visit.row))
    in_specs = [
        queries,
        keys,
        keys,
        spec((None, 8, LANES), lambda b, h, visit: (h, 0, 0)),
        spec((None, 8, q_block), lambda b, h, visit: (batch_index(b, tokens.queries), 0, visit.row)),
        spec((None, 8, kv_block), lambda b, h, visit: (batch_index(b, tokens.keys), 0, visit.column)),
    ]
    out_specs, out_shapes = [queries], [shape_like(q.shape, out_dtype or q.dtype, q)]
    scratch = [pltpu.VMEM((q_block, head_dim), jnp.float32)]
    if call.softmax:
        out_specs.append(rows)
        out_shapes.append(shape_like((batch, num_heads, 1, q_length), jnp.float32, q))
        scratch += [pltpu.VMEM((q_block, LANES), jnp.float32)] * 2
    return launch(
        call,
        functools.partial(_scheduled_kernel, call, where.q_seg is not None, where.full_rows is not None),
        "scheduled_forward",
        grid=(batch, heads.count, schedule.used),
        scalars=(schedule.pairs,),
        heads=heads,
        inputs=(q, k, v, by_head(head_bias), *tokens),
        in_specs=in_specs,
        outputs=out_shapes,
        out_specs=out_specs,
        scratch=scratch,
        previous=previous,
    )


def _scheduled_kernel(
    call, has_segments, has_full_rows, order, pairs, q_ref, k_ref, v_ref, bias_ref, q_info, kv_info, *rest
):
    if call.softmax:
        out_ref, lse_ref, acc_ref, top_ref, total_ref = rest
    else:
        out_ref, acc_ref = rest
    visit = unpack(pairs[pl.program_id(2)])
    scalars = bias_ref[0:1, 0:1], bias_ref[1:2, 0:1]
    q_block = q_ref.shape[0]
    strip = math.gcd(call.tiles.strip, q_block)
    strips = [pl.ds(start, strip) for start in range(0, q_block, strip)]

    @pl.when(visit.first)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)
        if call.softmax:
            top_ref[...] = jnp.full_like(top_ref, MASKED)
            total_ref[...] = jnp.zeros_like(total_ref)

    def logits(rows, query, masked):
        key = [kv_info[i : i + 1, :] for i in range(2)]
        query = [query[rows.start : rows.start + strip, i : i + 1] for i in range(3)]  # [strip, 1]
        products = dot(q_ref[rows, :], k_ref[...], NT)  # [strip, kv_block]
        s, _ = form_logits(call, products, lambda: addend_at(call, query[0] - key[0], *scalars))
        if masked:
            s = jnp.where(tile_mask(call, has_segments, has_full_rows, query, key, s.shape), s, MASKED)
        return s, s.max(axis=1, keepdims=True) if call.softmax else None

    def accumulate(rows, s, top):
        if not call.softmax:
            acc_ref[rows, :] += _sigmoid_values(sigmoid_weights(s), v_ref[...])
            return
        old = top_ref[rows, :]
        new = jnp.maximum(old, top)  # [strip, LANES], all lanes alike
        decay = jnp.exp2(old - new)
        weights = jnp.exp2(s - new[:, :1])
        total_ref[rows, :] = total_ref[rows, :] * decay + weights.sum(axis=1, keepdims=True)
        acc_ref[rows, :] = acc_ref[rows, :] * decay[:, :1] + dot(weights.astype(v_ref.dtype), v_ref[...], NN)
        top_ref[rows, :] = new

    def attend(masked):
        query = q_info[...].T if masked or call.has_slopes else jnp.zeros((q_block, 8), jnp.int32)
        ahead = logits(strips[0], query, masked)
        for i, rows in enumerate(strips):
            current = ahead
            if i + 1 < len(strips):
                ahead = logits(strips[i + 1], query, masked)
            accumulate(rows, *current)

    pl.when(visit.wanted & visit.masked)(lambda: attend(True))
    pl.when(visit.wanted & ~visit.masked)(lambda: attend(False))

    @pl.when(visit.last)
    def _():
        for rows in strips:
            if call.softmax:
                _write_softmax(
                    out_ref, lse_ref, rows, acc_ref[rows, :], top_ref[rows, :1], total_ref[rows, :1]
                )
            else:
                out_ref[rows, :] = acc_ref[rows, :].astype(out_ref.dtype)


def window_forward(
    call: Call,
    q: jax.Array,  # [B, H, T, D], times call.query_factor
    k: jax.Array,  # [B, K, T, D]
    v: jax.Array,  # [B, K, T, D]
    head_bias: jax.Array,  # [2, H] f32: ALiBi slope and bias
    where: Coordinates,
    heads: Heads,
    previous: tuple[jax.Array, ...] = (),
) -> tuple[jax.Array, ...]:
    """As `scheduled_forward`, for the calls of `Call.window_kernel`."""
    batch, num_heads, length, head_dim = q.shape
    group = num_heads // k.shape[1]
    block = call.tiles.q_block
    back = blocks_back(call)
    heads = heads.queries(group)

    def spec(block_shape, index):
        """A block located by batch, query head and step."""
        return pl.BlockSpec(block_shape, lambda b, h, i, *order: index(b, head_at(h, order), i))

    def keys(before):
        return spec(
            (None, None, block, head_dim), lambda b, h, i: (b, h // group, jnp.maximum(i - before, 0), 0)
        )

    queries = spec((None, None, block, head_dim), lambda b, h, i: (b, h, i, 0))
    window = [keys(before) for before in range(back, -1, -1)]
    inputs = [q, by_head(head_bias), *[k] * (back + 1), *[v] * (back + 1)]
    in_specs = [queries, spec((None, 8, LANES), lambda b, h, i: (h, 0, 0)), *window, *window]
    if call.spec.num_sink_tokens:
        sinks = spec((None, None, sink_rows(call), head_dim), lambda b, h, i: (b, h // group, 0, 0))
        inputs += [k, v]
        in_specs += [sinks, sinks]
    if where.q_seg is not None:
        inputs.append(first_keys(call, where))
        in_specs.append(spec((None, 8, block), lambda b, h, i: (b, 0, i)))
    outputs, out_specs = [shape_like(q.shape, q.dtype, q)], [queries]
    if call.softmax:
        outputs.append(shape_like((batch, num_heads, 1, length), jnp.float32, q))
        out_specs.append(spec((None, None, 1, block), lambda b, h, i: (b, h, 0, i)))
    return launch(
        call,
        functools.partial(_window_kernel, call, where.q_seg is not None, length // block),
        "window_forward",
        grid=(batch, heads.count, length // block),
        scalars=(),
        heads=heads,
        inputs=inputs,
        in_specs=in_specs,
        outputs=outputs,
        out_specs=out_specs,
        previous=previous,
    )


def _sigmoid_values(weights, value):
    """weights @ value. Without a normaliser the rounding of many weights near 1 adds up: what it cut off is added."""
    high = weights.astype(value.dtype)
    acc = dot(high, value, NN)
    if value.dtype == jnp.float32:
        return acc
    return acc + dot((weights - high.astype(jnp.float32)).astype(value.dtype), value, NN)


def _window_kernel(call, has_segments, num_steps, order, q_ref, bias_ref, *rest):
    back = blocks_back(call)
    k_refs, v_refs, rest = rest[: back + 1], rest[back + 1 : 2 * back + 2], rest[2 * back + 2 :]
    num_sinks = call.spec.num_sink_tokens
    if num_sinks:
        sink_k_ref, sink_v_ref, *rest = rest
    if has_segments:
        first_key_ref, *rest = rest
    out_ref, lse_ref = (*rest, None)[:2]

    step = pl.program_id(2)
    slope, bias = bias_ref[0:1, 0:1] * call.unit, bias_ref[1:2, 0:1] * call.unit
    block, window = call.tiles.q_block, call.spec.window
    strip = math.gcd(call.tiles.strip, block)

    def attend(present: int, sinks: str | None):
        """All strips of the step, whose window's last `present` blocks exist."""
        if has_segments:
            first_key = (
                first_key_ref[...].T[:, :1] - step * block
            )  # [block, 1], counted from the step's first query

        def relative(size):
            """Row minus column, of a strip's tile."""
            return lax.broadcasted_iota(jnp.int32, (strip, size), 0) - lax.broadcasted_iota(
                jnp.int32, (strip, size), 1
            )

        def addend(size, distance):
            if not call.has_slopes:
                return bias
            return slope * relative(size).astype(jnp.float32) + (slope * distance.astype(jnp.float32) + bias)

        def logits(start):
            rows = pl.ds(start, strip)
            query = q_ref[rows, :]
            tiles = []
            for tile in window_tiles(call, start, present):
                keys = pl.ds(tile.offset, tile.size)
                distance = start - tile.key  # of the first row to the first column
                s = dot(query, k_refs[tile.block][keys, :], NT)
                s, _ = form_logits(call, s, functools.partial(addend, tile.size, jnp.int32(distance)))
                seen = []
                if distance - (tile.size - 1) < 0:
                    seen.append(relative(tile.size) >= -distance)
                if has_segments:
                    key = lax.broadcasted_iota(jnp.int32, s.shape, 1) + tile.key
                    seen.append(key >= first_key[start : start + strip])
                elif distance + strip - 1 >= window:
                    seen.append(relative(tile.size) < window - distance)
                if seen:
                    s = jnp.where(functools.reduce(jnp.logical_and, seen), s, MASKED)
                tiles.append((s, v_refs[tile.block], keys))
            if sinks is not None:
                size = sink_k_ref.shape[0]
                s = dot(query, sink_k_ref[...], NT)
                distance = step * block + start
                s, _ = form_logits(call, s, functools.partial(addend, size, distance))
                column = lax.broadcasted_iota(jnp.int32, s.shape, 1)
                seen = [column < num_sinks] if num_sinks < size else []
                if sinks == "some":  # the others lie inside the window
                    seen.append(relative(size) >= window - distance)
                if seen:
                    s = jnp.where(functools.reduce(jnp.logical_and, seen), s, MASKED)
                tiles.append((s, sink_v_ref, slice(None)))
            top = (
                _over_lanes(jnp.maximum, [s for s, *_ in tiles]).max(axis=1, keepdims=True)
                if call.softmax
                else None
            )
            return rows, tiles, top

        def finish(rows, tiles, top):
            acc, partial_sums = 0.0, []
            for s, v_ref, keys in tiles:
                value = v_ref[keys, :]
                weights = jnp.exp2(s - top) if call.softmax else sigmoid_weights(s)
                if call.softmax and call.tiles.sum_on_mxu:
                    value = jnp.concatenate([value, jnp.ones_like(value)], axis=1)
                elif call.softmax:
                    partial_sums.append(weights)
                if call.softmax:
                    acc += dot(weights.astype(value.dtype), value, NN)
                else:
                    acc += _sigmoid_values(weights, value)
            if not call.softmax:
                out_ref[rows, :] = acc.astype(out_ref.dtype)
            elif call.tiles.sum_on_mxu:
                head_dim = acc.shape[1] // 2
                _write_softmax(
                    out_ref, lse_ref, rows, acc[:, :head_dim], top, acc[:, head_dim:], has_segments
                )
            else:
                total = _over_lanes(jnp.add, partial_sums).sum(axis=1, keepdims=True)
                _write_softmax(out_ref, lse_ref, rows, acc, top, total, has_segments)

        ahead = logits(0)
        for start in range(0, block, strip):
            current = ahead
            if start + strip < block:
                ahead = logits(start + strip)
            finish(*current)

    # The first steps lack blocks before the sequence, and their window may cover some of the sink tokens.
    steps = window_steps(call, num_steps)
    for i, (present, sinks) in enumerate(steps):
        here = step == i if i + 1 < len(steps) else step >= i
        pl.when(here)(functools.partial(attend, present, sinks))


def _over_lanes(operator, tiles):
    """Combines tiles column group by column group, leaving [rows, LANES] for one pass over the lanes at the end."""
    width = min(LANES, *(tile.shape[1] for tile in tiles))
    groups = [tile[:, start : start + width] for tile in tiles for start in range(0, tile.shape[1], width)]
    return functools.reduce(operator, groups)


def _write_softmax(out_ref, lse_ref, rows, acc, top, total, may_be_empty=True):
    """Normalises a strip; a row whose maximum is still MASKED has seen nothing."""
    out = acc * (1 / total)
    lse = (top + jnp.log2(total)) * (1 / LOG2E)
    if may_be_empty:
        sees_any = top > 0.5 * MASKED
        out, lse = jnp.where(sees_any, out, 0), jnp.where(sees_any, lse, -jnp.inf)
    out_ref[rows, :] = out.astype(out_ref.dtype)
    lse_ref[:, rows] = to_row(lse)
