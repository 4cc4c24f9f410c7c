"""Attention backward on TPUs. Weights are recomputed from lse; nothing of the size [T, S], or a stack of dq, is stored.

`scheduled_backward` runs two kernels over the forward's list of block pairs: dq by query block, dk and dv by KV block
(the transposed list). The second one forms its logits transposed, [keys, queries], so that all its products are plain.

With w the weights, dw = dout v^T and delta = rowsum(dout * out) - dlse:

    softmax: ds = w (dw - delta)     sigmoid: ds = w (1 - w) dw
    dv = w^T dout,  dk = ds^T q,  dq = ds k      (times the softcap's derivative and the scale)
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.schedule import unpack
from pallas_kernels.spec import Coordinates
from pallas_kernels.tpu_tiles import (
    LANES,
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
    tile_mask,
    to_row,
    visits,
)


def scheduled_backward(
    call: Call,
    q: jax.Array,  # [B, H, T, D], times call.query_factor
    k: jax.Array,  # [B, K, S, D]
    v: jax.Array,  # [B, K, S, D]
    head_bias: jax.Array,  # [2, H] f32: ALiBi slope and bias
    where: Coordinates,
    heads: Heads,
    dout: jax.Array,  # [B, H, T, D]
    statistics: jax.Array | None,  # [B, H, 8, T] f32: lse in base 2 and delta (softmax)
    previous: tuple[jax.Array, ...] = (),
) -> tuple[jax.Array, ...]:
    """Returns the gradients of q (as given), k and v, and with a bias also its rows' [B, H, 1, T] f32."""
    # Rows whose cotangents are all zero (routed to the other branch, padding) change nothing.
    active = (dout != 0).any(axis=(0, 1, 3))  # [T]
    if statistics is not None:
        active |= (statistics[:, :, 1] != 0).any(axis=(0, 1))
    active = active.reshape(-1, call.tiles.q_block).any(axis=1)  # [nq]
    run = functools.partial(_scheduled, call, q, k, v, head_bias, where, heads, dout, statistics)
    dq, *dbias = run(visits(call, where, active), previous[:1] + previous[3:], by_key=False)
    dk, dv = run(visits(call, where, active, by_key=True), previous[1:3], by_key=True)
    return dq, dk, dv, *dbias


def _scheduled(call, q, k, v, head_bias, where, heads, dout, statistics, schedule, previous, by_key):
    batch, num_heads, q_length, head_dim = q.shape
    group = num_heads // k.shape[1]
    q_block, kv_block = call.tiles.q_block, call.tiles.kv_block
    tokens = describe_tokens(where)

    # The grid is (batch, query heads, visits), or (batch, KV heads, visits, query heads of the KV head).
    def spec(block, index):
        """A block located by batch, query head, KV head, query block and KV block."""

        def by_query(b, h, p, pairs, *order):
            h, visit = head_at(h, order), unpack(pairs[p])
            return index(b, h, h // group, visit.row, visit.column)

        def by_key_head(b, h, p, g, pairs, *order):
            h, visit = head_at(h, order), unpack(pairs[p])
            return index(b, h * group + g, h, visit.column, visit.row)

        return pl.BlockSpec(block, by_key_head if by_key else by_query)

    queries = spec((None, None, q_block, head_dim), lambda b, h, kv, i, j: (b, h, i, 0))
    keys = spec((None, None, kv_block, head_dim), lambda b, h, kv, i, j: (b, kv, j, 0))
    inputs = [q, k, v, dout, by_head(head_bias), *tokens]
    in_specs = [queries, keys, keys, queries, spec((None, 8, LANES), lambda b, h, kv, i, j: (h, 0, 0))]
    in_specs.append(spec((None, 8, q_block), lambda b, h, kv, i, j: (batch_index(b, tokens.queries), 0, i)))
    in_specs.append(spec((None, 8, kv_block), lambda b, h, kv, i, j: (batch_index(b, tokens.keys), 0, j)))
    if call.softmax:
        inputs.append(statistics)
        in_specs.append(spec((None, None, 8, q_block), lambda b, h, kv, i, j: (b, h, 0, i)))
    if by_key:
        out_specs, out_shapes = [keys, keys], [shape_like(x.shape, x.dtype, q) for x in (k, v)]
        scratch = [pltpu.VMEM((kv_block, head_dim), jnp.float32)] * 2
        grid = (batch, heads.count, schedule.used, group)
    else:
        heads = heads.queries(group)
        out_specs, out_shapes = [queries], [shape_like(q.shape, q.dtype, q)]
        scratch = [pltpu.VMEM((q_block, head_dim), jnp.float32)]
        if call.has_bias:
            out_specs.append(spec((None, None, 1, q_block), lambda b, h, kv, i, j: (b, h, 0, i)))
            out_shapes.append(shape_like((batch, num_heads, 1, q_length), jnp.float32, q))
            scratch.append(pltpu.VMEM((q_block, LANES), jnp.float32))
        grid = (batch, heads.count, schedule.used)
    kernel = _key_kernel if by_key else _query_kernel
    return launch(
        call,
        functools.partial(kernel, call, where.q_seg is not None, where.full_rows is not None),
        "scheduled_backward_keys" if by_key else "scheduled_backward_queries",
        grid=grid,
        scalars=(schedule.pairs,),
        heads=heads,
        inputs=inputs,
        in_specs=in_specs,
        outputs=out_shapes,
        out_specs=out_specs,
        scratch=scratch,
        previous=previous,
    )


def weights_and_slopes(call, s, derivative, dw, lse, delta):
    """The weights w of one tile, and the derivative of the loss by its logits before and after the softcap."""
    if call.softmax:
        w = jnp.exp2(s - lse)
        ds = w * (dw - delta)
    else:
        tanh = jnp.tanh(s)  # sigmoid(x) = 0.5 + 0.5 tanh(x / 2), whose derivative is 0.25 (1 - tanh^2)
        w = 0.5 + 0.5 * tanh
        ds = (0.25 - 0.25 * (tanh * tanh)) * dw
    return w, ds, ds if derivative is None else ds * derivative


def _query_kernel(
    call,
    has_segments,
    has_full_rows,
    order,
    pairs,
    q_ref,
    k_ref,
    v_ref,
    do_ref,
    bias_ref,
    q_info,
    kv_info,
    *rest,
):
    statistics, rest = (rest[0], rest[1:]) if call.softmax else (None, rest)
    if call.has_bias:
        dq_ref, dbias_ref, acc_ref, bias_acc_ref = rest
    else:
        dq_ref, acc_ref = rest
    visit = unpack(pairs[pl.program_id(2)])
    scalars = bias_ref[0:1, 0:1], bias_ref[1:2, 0:1]
    q_block = q_ref.shape[0]
    strip = math.gcd(call.tiles.strip, q_block)
    starts = range(0, q_block, strip)

    @pl.when(visit.first)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)
        if call.has_bias:
            bias_acc_ref[...] = jnp.zeros_like(bias_acc_ref)

    def attend(masked):
        query = q_info[...].T  # [q_block, 8]
        lse_delta = statistics[...].T if call.softmax else None
        key = [kv_info[i : i + 1, :] for i in range(2)]

        def products(start):
            rows = pl.ds(start, strip)
            return dot(q_ref[rows, :], k_ref[...], NT), dot(do_ref[rows, :], v_ref[...], NT)

        def finish(start, s, dw):
            rows = pl.ds(start, strip)
            mine = [query[start : start + strip, i : i + 1] for i in range(3)]
            s, derivative = form_logits(call, s, lambda: addend_at(call, mine[0] - key[0], *scalars))
            if masked:
                s = jnp.where(tile_mask(call, has_segments, has_full_rows, mine, key, s.shape), s, MASKED)
            lse, delta = (
                lse_delta[start : start + strip, i : i + 1] if call.softmax else None for i in range(2)
            )
            _, dlogits, ds = weights_and_slopes(call, s, derivative, dw, lse, delta)
            acc_ref[rows, :] += dot(ds.astype(k_ref.dtype), k_ref[...], NN)
            if call.has_bias:
                bias_acc_ref[rows, :] += dlogits.sum(axis=1, keepdims=True)

        pipelined(starts, products, finish)

    pl.when(visit.wanted & visit.masked)(lambda: attend(True))
    pl.when(visit.wanted & ~visit.masked)(lambda: attend(False))

    @pl.when(visit.last)
    def _():
        dq_ref[...] = (acc_ref[...] * call.product_factor).astype(dq_ref.dtype)
        if call.has_bias:
            for start in starts:
                rows = pl.ds(start, strip)
                dbias_ref[:, rows] = to_row(bias_acc_ref[rows, :1])


def _key_kernel(
    call,
    has_segments,
    has_full_rows,
    order,
    pairs,
    q_ref,
    k_ref,
    v_ref,
    do_ref,
    bias_ref,
    q_info,
    kv_info,
    *rest,
):
    statistics, rest = (rest[0], rest[1:]) if call.softmax else (None, rest)
    dk_ref, dv_ref, dk_acc_ref, dv_acc_ref = rest
    visit = unpack(pairs[pl.program_id(2)])
    group = pl.num_programs(3)
    scalars = bias_ref[0:1, 0:1], bias_ref[1:2, 0:1]
    kv_block = k_ref.shape[0]
    strip = math.gcd(call.tiles.strip, kv_block)

    @pl.when(visit.first & (pl.program_id(3) == 0))
    def _():
        dk_acc_ref[...] = jnp.zeros_like(dk_acc_ref)
        dv_acc_ref[...] = jnp.zeros_like(dv_acc_ref)

    def attend(masked):
        key = kv_info[...].T  # [kv_block, 8]
        query = [q_info[i : i + 1, :] for i in range(3)]
        lse, delta = (statistics[i : i + 1, :] if call.softmax else None for i in range(2))

        def products(start):
            rows = pl.ds(start, strip)
            return dot(k_ref[rows, :], q_ref[...], NT), dot(
                v_ref[rows, :], do_ref[...], NT
            )  # [strip, q_block]

        def finish(start, s, dw):
            rows = pl.ds(start, strip)
            mine = [key[start : start + strip, i : i + 1] for i in range(2)]
            s, derivative = form_logits(call, s, lambda: addend_at(call, query[0] - mine[0], *scalars))
            if masked:
                s = jnp.where(tile_mask(call, has_segments, has_full_rows, query, mine, s.shape), s, MASKED)
            w, _, ds = weights_and_slopes(call, s, derivative, dw, lse, delta)
            dv_acc_ref[rows, :] += dot(w.astype(do_ref.dtype), do_ref[...], NN)
            dk_acc_ref[rows, :] += dot(ds.astype(q_ref.dtype), q_ref[...], NN)

        pipelined(range(0, kv_block, strip), products, finish)

    pl.when(visit.wanted & visit.masked)(lambda: attend(True))
    pl.when(visit.wanted & ~visit.masked)(lambda: attend(False))

    @pl.when(visit.last & (pl.program_id(3) == group - 1))
    def _():
        dk_ref[...] = (dk_acc_ref[...] * call.product_factor).astype(dk_ref.dtype)
        dv_ref[...] = dv_acc_ref[...].astype(dv_ref.dtype)


def pipelined(units, products, finish, ahead=1):
    """The products of the units to come stand before the rest of this one, to keep the matrix unit busy."""
    units = list(units)
    queue = [products(unit) for unit in units[:ahead]]
    for i, unit in enumerate(units):
        if i + ahead < len(units):
            queue.append(products(units[i + ahead]))
        finish(unit, *queue.pop(0))
