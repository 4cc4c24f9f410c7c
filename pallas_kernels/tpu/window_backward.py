"""Window attention backward on TPUs: dq, dk and dv from one sweep over the queries.

A step has a block of queries and the blocks of keys in its window. dk and dv of those live in a ring of accumulators
in VMEM, block j in slot j % blocks; a block leaves it, and is written, once the window has passed. `blocks_back` more
steps at the end empty the ring. So every array is read and written once, and each pair of tiles takes five matmuls.

Logits are transposed, [keys, queries]: what belongs to a query (lse, delta, its first key) is a row, and the weights
are the stationary side of every product, so that 128 rows of q, dout or k stream past a matrix unit that they fill.
The gradients are transposed too, once a step. Of the scores' units, the products run two ahead of the rest.

Sink tokens outside the window are one more tile of keys. Their gradients grow in VMEM over all steps of a head and are
added to those of the first block afterwards.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.nonfinite import finite as finite_under_mask
from pallas_kernels.schedule import Kind, bounds_of, kind_at
from pallas_kernels.spec import Coordinates
from pallas_kernels.tpu.scheduled_backward import pipelined, weights_and_slopes
from pallas_kernels.tpu.tiles import (
    LANES,
    NN,
    NT,
    Call,
    Heads,
    by_head,
    dot,
    form_logits,
    head_at,
    launch,
    shape_like,
)
from pallas_kernels.tpu.window import Ref, blocks_back, packed_segments, sink_rows, window_of, window_steps

_UNIT = 256  # queries of a unit of work, as wide as the widest matrix unit
_AHEAD = 2
_SINKS = -1


class _Unit(NamedTuple):
    block: int  # of keys, the oldest first; or _SINKS
    keys: slice  # in the block
    queries: slice
    distance: int  # of the first query to the first key; of sink tokens, in the first step


def window_backward(
    call: Call,
    q: jax.Array,  # [B, H, T, D], times call.query_factor
    k: jax.Array,  # [B, K, T, D]
    v: jax.Array,  # [B, K, T, D]
    head_bias: jax.Array,  # [2, H] f32: ALiBi slope and bias
    where: Coordinates,
    heads: Heads,
    dout: jax.Array,  # [B, H, T, D]
    statistics: jax.Array | None,  # [B, H, 8, T] f32: lse in base 2 and delta (softmax)
    previous: tuple[jax.Array, ...] = (),
) -> tuple[jax.Array, ...]:
    """As `scheduled_backward`, for the calls of `Call.window_kernel`."""
    batch, num_heads, length, head_dim = q.shape
    group = num_heads // k.shape[1]
    block, back = call.tiles.q_block, blocks_back(call)
    num_blocks = length // block

    def spec(block_shape, index):
        """A block located by batch, query head, KV head, and step."""

        def index_map(b, h, i, g, *order):
            kv = head_at(h, order)
            g = jnp.where(i < num_blocks, g, group - 1)  # the last steps leave the queries' results alone
            return index(b, kv * group + g, kv, i)

        return pl.BlockSpec(block_shape, index_map)

    def of_queries(rows, columns, along_lanes):
        def index(b, h, kv, i):
            i = jnp.minimum(i, num_blocks - 1)
            return (b, h, 0, i) if along_lanes else (b, h, i, 0)

        return spec((None, None, rows, columns), index)

    def of_keys(before):
        return spec(
            (None, None, block, head_dim),
            lambda b, h, kv, i: (b, kv, jnp.clip(i - before, 0, num_blocks - 1), 0),
        )

    queries = of_queries(block, head_dim, along_lanes=False)
    window = [of_keys(before) for before in range(back, -1, -1)]
    inputs = [q, dout, by_head(head_bias), *[k] * (back + 1), *[v] * (back + 1)]
    in_specs = [queries, queries, spec((None, 8, LANES), lambda b, h, kv, i: (h, 0, 0)), *window, *window]
    if statistics is not None:
        inputs.append(statistics)
        in_specs.append(of_queries(8, block, along_lanes=True))
    if where.q_seg is not None:
        inputs.append(packed_segments(call, where).first_keys)
        in_specs.append(spec((None, 8, block), lambda b, h, kv, i: (b, 0, jnp.minimum(i, num_blocks - 1))))
    if call.spec.num_sink_tokens:
        inputs += [k, v]
        in_specs += [spec((None, None, sink_rows(call), head_dim), lambda b, h, kv, i: (b, kv, 0, 0))] * 2
    outputs, out_specs = (
        [shape_like(x.shape, x.dtype, q) for x in (q, k, v)],
        [queries, of_keys(back), of_keys(back)],
    )
    ring = pltpu.VMEM((back + 1, head_dim, block), jnp.float32)
    scratch = [
        ring,
        ring,
        pltpu.VMEM((head_dim, block), jnp.float32),
        pltpu.VMEM((head_dim, block), q.dtype),
        pltpu.VMEM((head_dim, block), q.dtype),
        pltpu.VMEM((back + 1, head_dim, block), k.dtype),
    ]
    if call.has_bias:
        outputs.append(shape_like((batch, num_heads, 1, length), jnp.float32, q))
        out_specs.append(of_queries(1, block, along_lanes=True))
    if call.spec.num_sink_tokens:
        of_sinks = sink_rows(call), head_dim
        outputs += [shape_like((*k.shape[:2], *of_sinks), jnp.float32, q)] * 2
        out_specs += [spec((None, None, *of_sinks), lambda b, h, kv, i: (b, kv, 0, 0))] * 2
        scratch += [pltpu.VMEM(of_sinks[::-1], jnp.float32)] * 2
    results = launch(
        call,
        functools.partial(_kernel, call, where.q_seg is not None, num_blocks, group),
        "window_backward",
        grid=(batch, heads.count, num_blocks + back, group),
        scalars=(),
        heads=heads,
        inputs=inputs,
        in_specs=in_specs,
        outputs=outputs,
        out_specs=out_specs,
        scratch=scratch,
        previous=previous,
    )
    if not call.spec.num_sink_tokens:
        return results
    dq, dk, dv, *dbias, dk_sinks, dv_sinks = results
    return dq, _add_to_first_keys(dk, dk_sinks), _add_to_first_keys(dv, dv_sinks), *dbias


def _add_to_first_keys(gradient: jax.Array, rows: jax.Array) -> jax.Array:
    first = gradient[:, :, : rows.shape[2]] + rows
    return lax.dynamic_update_slice(gradient, first.astype(gradient.dtype), (0, 0, 0, 0))


def _kernel(
    call: Call, has_segments: bool, num_blocks: int, group: int, order: tuple[Ref, ...], *refs: Ref
) -> None:
    statistics: Ref
    first_key_ref: Ref
    dbias_ref: Ref
    q_ref, do_ref, bias_ref, *rest = refs
    back = blocks_back(call)
    step, member = pl.program_id(2), pl.program_id(3)
    k_refs, v_refs, rest = rest[: back + 1], rest[back + 1 : 2 * back + 2], rest[2 * back + 2 :]
    statistics, rest = (rest[0], rest[1:]) if call.softmax else (None, rest)
    first_key_ref, rest = (rest[0], rest[1:]) if has_segments else (None, rest)
    num_sinks = call.spec.num_sink_tokens
    if num_sinks:
        sink_k_ref, sink_v_ref, *rest = rest
    dq_ref, dk_ref, dv_ref, *rest = rest
    dbias_ref, rest = (rest[0], rest[1:]) if call.has_bias else (None, rest)
    if num_sinks:
        dk_sinks_ref, dv_sinks_ref, *rest = rest
    dk_ring, dv_ring, dq_acc, q_t, do_t, k_t, *rest = rest
    if num_sinks:
        dk_sinks_acc, dv_sinks_acc = rest

        for acc in (dk_sinks_acc, dv_sinks_acc):
            pl.when((step == 0) & (member == 0))(functools.partial(_clear, acc, ...))

    block, window, bounds = call.tiles.q_block, window_of(call), bounds_of(call.spec)
    strip, tile = math.gcd(call.tiles.strip, block), math.gcd(call.tiles.tile, block)
    slope, bias = bias_ref[0:1, 0:1] * call.unit, bias_ref[1:2, 0:1] * call.unit

    def slot(b):
        return lax.rem(step + 1 + b, back + 1)

    def write(out_ref, rows, transposed, factor=1.0):
        out_ref[rows, :] = (transposed * factor).T.astype(out_ref.dtype)

    def write_keys(keys):
        write(dk_ref, keys, dk_ring[slot(0), :, keys], call.product_factor)
        write(dv_ref, keys, dv_ring[slot(0), :, keys])

    def attend(present, sinks):
        # The first write of a step need not add to what is there.
        started_keys: set[int | None] = set()
        started_queries: set[int] = set()
        last_units: dict[int, _Unit] = {}  # of the block that leaves the ring, by first key
        if group > 1:
            for ring in (dk_ring, dv_ring):
                pl.when(member == 0)(functools.partial(_clear, ring, slot(back)))
        if call.has_bias:
            dbias_ref[...] = jnp.zeros_like(dbias_ref)
        q_t[...], do_t[...] = q_ref[...].T, do_ref[...].T
        for b in range(back + 1 - present, back + 1):
            k_t[b] = k_refs[b][...].T
        if has_segments:
            first_key = first_key_ref[0:1, :] - step * block  # [1, block]

        if sinks is not None:
            sink_k_t = sink_k_ref[...].T

        def add_to_queries(queries, gradient):  # [D, queries]
            for start in range(queries.start, queries.stop, strip):
                here, part = slice(start, start + strip), gradient[:, start - queries.start :][:, :strip]
                dq_acc[:, here] = dq_acc[:, here] + part if start in started_queries else part
                started_queries.add(start)

        def products(unit):
            keys, queries = unit.keys, unit.queries
            sink = unit.block == _SINKS
            k_ref, v_ref = (sink_k_ref, sink_v_ref) if sink else (k_refs[unit.block], v_refs[unit.block])
            return (
                dot(k_ref[keys, :], q_ref[queries, :], NT),  # [keys, queries]
                dot(v_ref[keys, :], do_ref[queries, :], NT),
            )

        def finish(unit, s, dw):
            keys, queries, distance = unit.keys, unit.queries, unit.distance
            num_keys, num_queries = s.shape
            sink = unit.block == _SINKS
            if sink:
                distance += step * block
            relative = lax.broadcasted_iota(jnp.int32, s.shape, 1) - lax.broadcasted_iota(
                jnp.int32, s.shape, 0
            )

            def addend():
                if not call.has_slopes:
                    return bias
                # As a row less a column: a whole tile of it would be spilled.
                query = lax.broadcasted_iota(jnp.int32, (1, num_queries), 1) + distance
                key = lax.broadcasted_iota(jnp.int32, (num_keys, 1), 0)
                return (slope * query.astype(jnp.float32) + bias) - slope * key.astype(jnp.float32)

            s, derivative = form_logits(call, s, addend)
            seen = []
            kind = (
                kind_at(bounds, distance - (num_keys - 1), distance + num_queries - 1) if not sink else None
            )
            if sink:
                if num_sinks < num_keys:
                    seen.append(lax.broadcasted_iota(jnp.int32, s.shape, 0) < num_sinks)
                if sinks == "some":  # the others lie inside the window
                    seen.append(relative >= window - distance)
            elif kind in (Kind.DIAGONAL, Kind.BOTH):
                seen.append(relative >= -distance)
            if has_segments:
                row = lax.broadcasted_iota(jnp.int32, s.shape, 0)
                seen.append(row >= first_key[:, queries] - (queries.start - distance))
            elif kind in (Kind.EDGE, Kind.BOTH):
                seen.append(relative < window - distance)
            mask = functools.reduce(jnp.logical_and, seen) if seen else None
            finite = finite_under_mask if seen else lambda x: x
            lse, delta = (statistics[i : i + 1, queries] if call.softmax else None for i in range(2))
            w, dlogits, ds = weights_and_slopes(call, s, derivative, dw, lse, delta, mask)
            if call.has_bias:
                dbias_ref[:, queries] += dlogits.sum(axis=0, keepdims=True)
            w, ds = w.astype(q_ref.dtype), ds.astype(q_ref.dtype)
            if sink:
                dv_sinks_acc[...] += dot(finite(do_t[:, queries]), w, NT)
                dk_sinks_acc[...] += dot(finite(q_t[:, queries]), ds, NT)
                add_to_queries(queries, dot(finite(sink_k_t), ds, NN))
                return
            at = slot(unit.block)
            entering = unit.block == back and group == 1 and keys.start not in started_keys
            leaving = group == 1 and last_units.get(keys.start) == unit
            started_keys.add(keys.start if unit.block == back else None)
            for ring, out_ref, factor, gradient in (
                (dv_ring, dv_ref, 1.0, dot(finite(do_t[:, queries]), w, NT)),  # [D, keys]
                (dk_ring, dk_ref, call.product_factor, dot(finite(q_t[:, queries]), ds, NT)),
            ):
                total = gradient if entering else ring[at, :, keys] + gradient
                if leaving:
                    write(out_ref, keys, total, factor)
                else:
                    ring[at, :, keys] = total
            add_to_queries(queries, dot(finite(k_t[unit.block, :, keys]), ds, NN))

        units = _units(call, present)
        last_units.update({unit.keys.start: unit for unit in units if unit.block == 0 and present > back})
        if sinks is not None:
            keys = slice(0, sink_k_ref.shape[0])
            width = math.gcd(_UNIT, block)
            sink_units = [_Unit(_SINKS, keys, slice(at, at + width), at) for at in range(0, block, width)]
            units = sink_units + units
        pipelined(units, products, finish, ahead=_AHEAD)
        write(dq_ref, slice(None), dq_acc[...], call.product_factor)
        if group == 1 and present > back:  # tiles that the window had passed already
            for start in range(0, block, tile):
                if start not in last_units:
                    write_keys(slice(start, start + tile))

    # The first steps lack blocks before the sequence, and their window may cover some of the sink tokens.
    steps = window_steps(call, num_blocks)
    for i, (present, sinks) in enumerate(steps):
        here = step == i if i + 1 < len(steps) else (step >= i) & (step < num_blocks)
        pl.when(here)(functools.partial(attend, present, sinks))

    def write_sinks():
        write(dk_sinks_ref, slice(None), dk_sinks_acc[...], call.product_factor)
        write(dv_sinks_ref, slice(None), dv_sinks_acc[...])

    if num_sinks:
        pl.when((step == num_blocks - 1) & (member == group - 1))(write_sinks)

    # A single query head has written what leaves the ring with its last addition, except after the last queries.
    @pl.when((step >= (max(back, num_blocks) if group == 1 else back)) & (member == group - 1))
    def _():
        write_keys(slice(0, block))


def _clear(ref: Ref, index) -> None:
    ref[index] = jnp.zeros_like(ref[index])


def _units(call: Call, present: int) -> list[_Unit]:
    """The pairs of key and query tiles of a step whose last `present` blocks of keys exist, keys outermost."""
    block, window, back = call.tiles.q_block, window_of(call), blocks_back(call)
    strip, tile, width = (math.gcd(size, block) for size in (call.tiles.strip, call.tiles.tile, _UNIT))
    units = []
    for b in range(back + 1 - present, back + 1):
        for offset in range(0, block, tile):
            key = offset - (back - b) * block  # counted from the step's first query
            first = max(0, key // strip * strip)
            end = min(block, -(-(key + tile - 1 + window) // strip) * strip)
            for start in range(first, end, width):
                queries = slice(start, min(end, start + width))
                units.append(_Unit(b, slice(offset, offset + tile), queries, start - key))
    return units
