"""SwiAttn's attention on TPUs: both branches from one pass over the keys, and a backward pass that follows the gates.

A query's keys are those in its window and those outside; full attention is over both. Forward, the window's result is
where the pass over the keys outside begins, so O_window and lse_window come on the way to O_full and lse_full, and no
pair is computed twice.

Backward, let a = 2^(lse_window - lse_full), the window's share of the full softmax (1 for sigmoid: its parts add up).
Keys in the window take part in both branches, with weights that differ by this factor, so one backward pass over the
window with the cotangent dO_window + a dO_full (and delta likewise) is exact for both. Keys outside take part in the
full branch only, whose cotangents are exactly zero in every row that a hard gate sends to the window: the other rows
are gathered into dense blocks, and the pass over the keys outside runs on those alone.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.blocks import Tiles, device_kind
from pallas_kernels.parts import members, merge, mix, named, natural_lse, route, vary_alike
from pallas_kernels.ring import Ring, RowOrder, attend_to_all, gradients_of_all, one_part
from pallas_kernels.rotary import Rotation
from pallas_kernels.spec import AttentionSpec, Coordinates, PerHead
from pallas_kernels.tpu.attend import attend
from pallas_kernels.tpu.passes import (
    backward,
    by_position,
    call_of,
    choose_kernel,
    forward,
    head_major,
    pack_statistics,
    pad,
    pad_keys,
    pad_queries,
    stack_head_bias,
    token_major,
    with_own_tiles,
)
from pallas_kernels.tpu.rows import add_apart, choose, together
from pallas_kernels.tpu.scheduled_forward import branches_forward, serves_branches
from pallas_kernels.tpu.tiles import Call, Heads
from pallas_kernels.tpu.turning import left_to_kernels, multiplied

# Of gathered rows: the smaller the block, the narrower the span of positions that its keys are bounded by.
GATHERED_BLOCK = 256
_OUTSIDE_BLOCK = 1024  # of keys outside


def routed_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    gate: jax.Array,  # [B, T]
    spec: AttentionSpec,
    where: Coordinates,
    per_head: PerHead,
    *,
    inference: bool = False,
    ring: Ring | None = None,
    order: RowOrder | None = None,
    rotation: Rotation | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns gate * O_full + (1 - gate) * O_window [B, T, H, D] f32 and the branch disagreement [B, T] f32.

    Args:
      inference: compute the full branch of rows with a gate only; without disagreement, and not differentiable by the
        gate.
    """
    if not inference:
        branches = two_branches(q, k, v, spec, where, per_head, ring, order, rotation)
        return mix(gate, *branches, per_head.sink_logits)
    call = call_of(q, spec, one_part(ring, where), per_head, order)

    def part(q, where, outside):
        here = dataclasses.replace(call, outside=outside, in_parts=True)
        here = by_position(here) if outside else here
        return attend(here, q, k, v, where, per_head, ring)

    return route(part, q, gate, where, per_head.sink_logits, inference=True)


def two_branches(
    q: jax.Array,  # [B, T, H, D]
    k: jax.Array,  # [B, S, K, D]
    v: jax.Array,  # [B, S, K, D]
    spec: AttentionSpec,
    where: Coordinates,
    per_head: PerHead,
    ring: Ring | None = None,
    order: RowOrder | None = None,
    rotation: Rotation | None = None,
) -> tuple[jax.Array, jax.Array | None, jax.Array, jax.Array | None]:
    """O_window [B, T, H, D], lse_window [B, T, H] f32, O_full, lse_full; no lse for sigmoid."""
    (_, length, heads, _), full_heads = q.shape, per_head.full_heads
    here = one_part(ring, where)
    call, where = left_to_kernels(call_of(q, spec, here, per_head, order), where, rotation)
    # The gate's gradient is a difference of the branches: large sums without a normaliser must not be rounded before.
    call = dataclasses.replace(call, in_parts=not call.softmax)
    if full_heads is None and serves_branches(call, here, q.shape[3], k.dtype):
        call = with_own_tiles(call, here, q.shape[3], device_kind())
    q = pad(multiplied(call, q), call.tiles.q_block, 1, 0)
    k, v = (pad(x, call.tiles.kv_block, 1, 0) for x in (k, v))
    where, head_bias = pad_queries(where, call.tiles), stack_head_bias(heads, per_head)
    results = _branches(call, ring, *vary_alike((q, k, v, head_bias, where, full_heads)))
    window, window_lse, full, full_lse = jax.tree.map(lambda x: x[:, :length], results)
    return window, window_lse, full, full_lse


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _branches(call: Call, ring: Ring | None, q, k, v, head_bias, where: Coordinates, full_heads):
    """As `two_branches`, of padded arrays and multiplied queries; where the keys are is not padded."""
    return _branches_fwd(call, ring, q, k, v, head_bias, where, full_heads)[0]


def _branches_fwd(call, ring, q, k, v, head_bias, where: Coordinates, full_heads):
    arrays = _head_major(call, q, k, v)
    if ring is None:
        passes = both_branches(call, *arrays, head_bias, pad_keys(where, call.tiles), full_heads)
    else:
        passes = _branches_to_all(call, ring, *arrays, head_bias, where, full_heads)

    def rows(out, lse=None):
        return token_major(out.astype(call.result_dtype(q)), q.shape[1]), None if lse is None else lse[
            :, :, 0
        ].swapaxes(1, 2)

    (window, window_lse), (full, full_lse) = (named(*rows(*one)) for one in passes)
    saved = q, k, v, head_bias, where, full_heads, window, window_lse, full, full_lse
    return (window, natural_lse(window_lse), full, natural_lse(full_lse)), saved


def both_branches(
    call: Call, q, k, v, head_bias, where: Coordinates, full_heads
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """out and lse of the window and of all keys, head-major: from one kernel, or from two where that cannot be."""
    if full_heads is None and serves_branches(call, where, k.shape[3], k.dtype):
        return branches_forward(call, q, k, v, head_bias, where, Heads(k.shape[1]))
    in_parts = dataclasses.replace(call, in_parts=True)
    window = forward(choose_kernel(in_parts, where), q, k, v, head_bias, where, full_heads)
    outside = dataclasses.replace(call, outside=True)
    return window, forward(outside, q, k, v, head_bias, where, full_heads, initial=window)


def _branches_to_all(call: Call, ring: Ring, q, k, v, head_bias, where: Coordinates, full_heads):
    """`both_branches` over the keys of all devices of a ring: the window's and those outside are added up apart."""
    window_call = dataclasses.replace(call, in_parts=True)
    outside_call = dataclasses.replace(window_call, outside=True)

    def attend_both(keys, where, results, last):
        (k, v), where = keys, pad_keys(where, call.tiles)
        both = zip((window_call, outside_call), results, strict=True)
        return tuple(forward(one, q, k, v, head_bias, where, full_heads, so_far) for one, so_far in both)

    window, outside = attend_to_all(ring, (k, v), where, attend_both, ((), ()))
    if not call.softmax:
        return window, (window[0] + outside[0],)
    (window_out, window_lse), (outside_out, outside_lse) = window, outside  # lse: [B, H, 1, T]
    full, lse = merge(window_out, window_lse[:, :, 0], outside_out, outside_lse[:, :, 0], base=2)
    return window, (full, lse[:, :, None])


class _Saved(NamedTuple):
    """What the backward pass needs of the forward pass."""

    q: jax.Array  # [B, T, H, D]
    k: jax.Array
    v: jax.Array
    head_bias: jax.Array
    where: Coordinates
    full_heads: jax.Array | None
    window: jax.Array  # [B, T, H, D]
    window_lse: jax.Array  # [B, T, H] in base 2
    full: jax.Array
    full_lse: jax.Array


class _Cotangents(NamedTuple):
    """Of a pass over some of the keys, by query."""

    out: jax.Array  # [B, H, T, D]
    lse: jax.Array | None  # [B, T, H], the forward pass's own lse (softmax)
    delta: jax.Array | None  # [B, T, H] (softmax)


def _branches_bwd(call, ring, saved, cotangents):
    saved = _Saved(*saved)
    q, k, _, head_bias, where, *_ = saved
    joint, full = _divide(call, saved, cotangents)
    arrays = _head_major(call, q, k, saved.v)
    run = functools.partial(_run_backward, call.tiles, ring, saved, arrays[1:])
    dq, dk, dv, *dbias = run(choose_kernel(call, one_part(ring, where)), arrays[0], where, joint)

    # By head first, as the sums of `_divide`, so that one pass over the cotangents makes all of them.
    active = jnp.any(jnp.abs(full.out.astype(jnp.float32)).max(axis=3) != 0, axis=1)  # [B, T]
    if full.delta is not None:
        active |= jnp.any(full.delta != 0, axis=2)
    num_active, length = active.sum(axis=1, keepdims=True), q.shape[1]
    outside = outside_backward_call(call)
    tile = outside.tiles.q_block
    chosen = choose(active, tile)
    queries, dout = together(call, chosen, (arrays[0], full.out), tile)
    order = members(active, length)
    is_active = jnp.arange(length) < num_active
    rows = _gather_coordinates(call, where, order, active.shape, is_active)
    blocks = -(-num_active.max() // tile)
    added = (dk, dv) if ring is None else ()
    results = run(outside, queries, rows, _of_rows(full, dout, order), blocks, added)
    dq_outside, dk_outside, dv_outside, *dbias_outside = results
    dq = token_major(add_apart(call, chosen, dq, dq_outside, tile), length)
    dk, dv = (dk_outside, dv_outside) if ring is None else (dk + dk_outside, dv + dv_outside)
    dk, dv = (token_major(x, k.shape[1]) for x in (dk, dv))
    dhead_bias = jnp.zeros_like(head_bias)
    if dbias:
        more = jnp.where(is_active[:, None, None], dbias_outside[0], 0)
        dhead_bias = dhead_bias.at[1].set((dbias[0].sum(axis=3) + more.sum(axis=3)).sum(axis=(0, 2)))
    return dq.astype(q.dtype), dk, dv, dhead_bias, None, None


def _divide(call: Call, saved: _Saved, cotangents) -> tuple[_Cotangents, _Cotangents]:
    """The cotangents of the pass over the window, which serves both branches, and of that over the keys outside."""
    dwindow, dwindow_lse, dfull, dfull_lse = cotangents

    def by_head(x):
        return x.astype(saved.q.dtype).transpose(0, 2, 1, 3)

    if not call.softmax:
        return _Cotangents(by_head(dwindow + dfull), None, None), _Cotangents(by_head(dfull), None, None)
    window_lse, full_lse = saved.window_lse, saved.full_lse
    share = jnp.exp2(jnp.where(window_lse == -jnp.inf, -jnp.inf, window_lse - full_lse))  # [B, T, H]
    delta = _row_sums(dfull, saved.full) - dfull_lse
    joint = dwindow + share[..., None] * dfull.astype(jnp.float32)
    joint_delta = _row_sums(dwindow, saved.window) - dwindow_lse + share * delta
    return (
        _Cotangents(by_head(joint), window_lse, joint_delta),
        _Cotangents(by_head(dfull), full_lse, delta),
    )


def _run_backward(
    tiles: Tiles,
    ring: Ring | None,
    saved: _Saved,
    keys,
    call: Call,
    q,
    where: Coordinates,
    by_query: _Cotangents,
    num_active=None,
    added=(),
):
    """`backward` of head-major queries.

    Args:
      tiles: those that the keys are padded for.
      keys: the head-major keys and values.
    """
    statistics = None
    if by_query.lse is not None and by_query.delta is not None:
        by_head = (x.swapaxes(1, 2)[:, :, None] for x in (by_query.lse, by_query.delta))
        statistics = pack_statistics(*by_head)

    def of_part(keys, where):
        (k, v), where = keys, pad_keys(where, tiles)
        arrays = q, k, v, saved.head_bias, where, saved.full_heads, by_query.out, statistics
        return backward(call, *arrays, num_active, added)

    return gradients_of_all(ring, keys, where, of_part)


def _gather(order: jax.Array, x: jax.Array) -> jax.Array:
    """Rows of x [B, T, ..] by the indices of `order` [B, size]."""
    return jnp.take_along_axis(x, order.reshape(*order.shape, *(1,) * (x.ndim - 2)), axis=1)


def _gather_coordinates(call: Call, where: Coordinates, order, shape, is_active) -> Coordinates:
    """Those of gathered queries, each property being [1 or B, T] and `shape` [B, T]."""
    if where.q_cos is not None and where.q_sin is not None:
        tables = jnp.concatenate([where.q_cos, where.q_sin], axis=2)
        tables = _gather(order, jnp.broadcast_to(tables, (*shape, tables.shape[2])))
        cos, sin = jnp.split(tables, 2, axis=2)
        where = where._replace(q_cos=cos, q_sin=sin)
    names = ("q_pos", "q_order", "q_seg", "full_rows")
    given = {name: x for name in names if (x := getattr(where, name)) is not None}
    if call.indexed and where.q_seg is None:  # positions and all
        if where.full_rows is None:
            return where._replace(q_pos=jnp.where(is_active, order, -1), q_order=order)
        given["q_pos"] = given["q_order"] = jnp.arange(shape[1], dtype=jnp.int32)[None]
    # As columns of one array: gathers of single numbers are slow, and those of one row may not compile for v6e.
    columns = jnp.stack([jnp.broadcast_to(x, shape).astype(jnp.int32) for x in given.values()], axis=2)
    gathered = jnp.unstack(_gather(order, columns), axis=2)
    rows = {name: x.astype(given[name].dtype) for name, x in zip(given, gathered, strict=True)}
    rows["q_pos"] = jnp.where(is_active, rows["q_pos"], -1)  # the others are not visited
    return where._replace(**rows)


def _of_rows(full: _Cotangents, dout: jax.Array, order: jax.Array) -> _Cotangents:
    """The cotangents of gathered rows, `dout` being theirs already."""
    lse, delta = full.lse, full.delta
    if lse is not None and delta is not None:
        lse, delta = jnp.split(_gather(order, jnp.concatenate([lse, delta], axis=2)), 2, axis=2)
    return _Cotangents(dout, lse, delta)


def outside_backward_call(call: Call) -> Call:
    """Of the pass over the keys outside, on gathered rows."""
    tiles = dataclasses.replace(
        call.tiles,
        q_block=math.gcd(call.tiles.q_block, GATHERED_BLOCK),
        kv_block=math.gcd(call.tiles.kv_block, _OUTSIDE_BLOCK),
    )
    return dataclasses.replace(by_position(call), outside=True, tiles=tiles)


_branches.defvjp(_branches_fwd, _branches_bwd)


def _head_major(call: Call, q, k, v) -> tuple[jax.Array, jax.Array, jax.Array]:
    tiles = call.tiles
    return head_major(q, tiles.q_block), head_major(k, tiles.kv_block), head_major(v, tiles.kv_block)


def _row_sums(cotangent, out):
    return (cotangent.astype(jnp.float32) * out.astype(jnp.float32)).sum(axis=-1)
