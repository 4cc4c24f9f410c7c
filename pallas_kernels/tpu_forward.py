"""Attention forward on TPUs for any pattern: full causal, long windows, full rows, keys outside a window.

`scheduled_forward` walks over a list of block pairs in scalar memory (FlashAttention's running maximum and sum). It
writes into `previous` when given, for the heads it is told to serve.
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
    sigmoid_values,
    sigmoid_weights,
    tile_mask,
    visits,
    write_softmax,
)


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
            acc_ref[rows, :] += sigmoid_values(sigmoid_weights(s), v_ref[...])
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
                write_softmax(
                    out_ref, lse_ref, rows, acc_ref[rows, :], top_ref[rows, :1], total_ref[rows, :1]
                )
            else:
                out_ref[rows, :] = acc_ref[rows, :].astype(out_ref.dtype)
