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

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.blocks import Tiles, device_kind
from pallas_kernels.math.parts import members, merge, mix, named, natural_lse, route, vary_alike
from pallas_kernels.math.ring import Ring, RowOrder, attend_to_all, gradients_of_all, one_part
from pallas_kernels.math.rotary import Rotation
from pallas_kernels.math.spec import AttentionSpec, Coordinates, PerHead
from pallas_kernels.tpu.calls.attend import attend_to_keys
from pallas_kernels.tpu.calls.launches import (
    Given,
    Launches,
    RoutedLaunches,
    call_of,
    inference_calls,
    routed_call,
    routed_launches,
)
from pallas_kernels.tpu.calls.layout import (
    head_major,
    pack_statistics,
    pad,
    pad_keys,
    pad_queries,
    stack_head_bias,
    token_major,
    with_keys,
)
from pallas_kernels.tpu.calls.passes import backward, forward
from pallas_kernels.tpu.calls.rows import add_rows, choose, gather_rows
from pallas_kernels.tpu.schedule.scheduled_forward import branches_forward
from pallas_kernels.tpu.tile.cotangents import Branch, Cotangents, divide
from pallas_kernels.tpu.tile.rotation import left_to_kernels, multiplied, rotated_by_xla, rotates_queries
from pallas_kernels.tpu.tile.tiles import Call, LaunchHeads, OutGradients, TpuOperands


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
    """Returns gate * O_full + (1 - gate) * O_window [B, T, H, D] and the branch disagreement [B, T] f32.

    Args:
      inference: compute the full branch of rows with a gate only; without disagreement, and not differentiable by the
        gate.
    """
    here = one_part(ring, where)
    call = call_of(q, spec, here, per_head, order)
    if rotation is not None and (inference or not rotates_queries(q.shape[3])):
        q, rotation = rotated_by_xla(q, rotation), None
    if inference:
        calls = inference_calls(call)

        def part(q, where, outside):
            return attend_to_keys(calls[outside], q, k, v, where, per_head, ring)

        return route(part, q, gate, where, per_head.sink_logits, inference=True)

    (_, length, heads, _), full_heads = q.shape, per_head.full_heads
    call, where = left_to_kernels(call, where, rotation)
    given = Given(q.shape[3], k.dtype, device_kind(), full_heads is not None)
    call = routed_call(call, here, given)
    launches = routed_launches(call, here, given, in_ring=ring is not None)
    q = pad(multiplied(call, q), call.tiles.q_block, 1, 0)
    k, v = (pad(x, call.tiles.kv_block, 1, 0) for x in (k, v))
    gate, where = pad(gate, call.tiles.q_block, 1, 0), pad_queries(where, call.tiles)
    x = _Routed(q, k, v, gate, stack_head_bias(heads, per_head), per_head.sink_logits, where, full_heads)
    out, disagreement = _mixed(launches, ring, vary_alike(x))
    return out[:, :length], disagreement[:, :length]


class _Routed(NamedTuple):
    """Padded arrays, with multiplied queries; where the keys are is not padded."""

    q: jax.Array  # [B, T, H, D]
    k: jax.Array
    v: jax.Array
    gate: jax.Array  # [B, T]
    head_bias: jax.Array
    sink_logits: jax.Array | None
    where: Coordinates
    full_heads: jax.Array | None

    def head_major(self, call: Call) -> TpuOperands:
        q = head_major(self.q, call.tiles.q_block)
        k, v = (head_major(x, call.tiles.kv_block) for x in (self.k, self.v))
        return TpuOperands(q, k, v, self.head_bias, self.where, self.full_heads)


class _Saved(NamedTuple):
    """What the backward pass needs of the forward pass."""

    given: _Routed
    window: Branch
    full: Branch


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _mixed(launches: RoutedLaunches, ring: Ring | None, given: _Routed):
    """The mixed result in q's dtype, and the disagreement, still padded."""
    return _mixed_fwd(launches, ring, given)[0]


def _mixed_fwd(launches, ring, given: _Routed):
    call, x = launches.call, given.head_major(launches.call)
    if ring is None:
        passes = both_branches(launches, x._replace(where=pad_keys(x.where, call.tiles)))
    else:
        passes = _branches_to_all(launches, ring, x)

    # Kept as the kernels give them: the backward pass reads what was kept, and no copy of it.
    dtype = call.result_dtype(given.q)
    window, full = (Branch(*named(out.astype(dtype), *(y[:, :, 0] for y in lse))) for out, *lse in passes)
    out, disagreement = mix(given.gate, *_by_token(window), *_by_token(full), given.sink_logits)
    return (out.astype(given.q.dtype), disagreement), _Saved(given, window, full)


def _by_token(branch: Branch) -> tuple[jax.Array, jax.Array | None]:
    """out [B, T, H, D] and its natural lse [B, T, H]."""
    out, lse = branch
    return out.transpose(0, 2, 1, 3), None if lse is None else natural_lse(lse.swapaxes(1, 2))


def both_branches(launches: RoutedLaunches, x: TpuOperands) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """out and lse of the window and of all keys, head-major: from one kernel, or from two where that cannot be."""
    if launches.together:
        return branches_forward(launches.window.forward[0].call, x, LaunchHeads(x.k.shape[1]))
    window = forward(launches.window.forward, x)
    return window, forward(launches.outside.forward, x, initial=window)


def _branches_to_all(launches: RoutedLaunches, ring: Ring, x: TpuOperands):
    """`both_branches` over the keys of all devices of a ring: each part's are added up."""
    call = launches.call

    def attend_both(keys, where, results, last):
        here = with_keys(x, keys, pad_keys(where, call.tiles))
        both = zip((launches.window, launches.outside), results, strict=True)
        return tuple(forward(one.forward, here, so_far) for one, so_far in both)

    window, outside = attend_to_all(ring, (x.k, x.v), x.where, attend_both, ((), ()))
    if not call.softmax:
        return window, (window[0] + outside[0],)
    (window_out, window_lse), (outside_out, outside_lse) = window, outside  # lse: [B, H, 1, T]
    full, lse = merge(window_out, window_lse[:, :, 0], outside_out, outside_lse[:, :, 0], base=2)
    return window, (full, lse[:, :, None])


def _mixed_bwd(launches, ring, saved: _Saved, cotangents):
    call, given = launches.call, saved.given
    where, length = given.where, given.q.shape[1]
    dout, ddisagreement = cotangents
    dout = head_major(dout, call.tiles.q_block)
    divided = divide(given.gate, given.sink_logits, saved.window, saved.full, dout, ddisagreement)
    of_window, of_full, dgate, dsinks = divided
    x = given.head_major(call)
    run = functools.partial(_run_backward, call.tiles, ring)
    dq, dk, dv, *dbias = run(launches.window, x, of_window)

    # Rows that reach outside; what is not finite reaches everywhere.
    active = (given.gate != 0) | (ddisagreement != 0) | ~jnp.isfinite(dgate)
    num_active = active.sum(axis=1, keepdims=True)
    tile = launches.outside.call.tiles.q_block
    chosen = choose(active, tile)
    queries, dout = gather_rows(call, chosen, x.q, (of_full.out,), tile, where)
    order = members(active, length)
    is_active = jnp.arange(length) < num_active
    rows, of_rows = _coordinates_of_rows(call, where, order, is_active, of_full._replace(out=dout))
    blocks = -(-num_active.max() // tile)
    added = (dk, dv) if ring is None else ()
    results = run(launches.outside, x._replace(q=queries, where=rows), of_rows, blocks, added)
    dq_outside, dk_outside, dv_outside, *dbias_outside = results
    dq = token_major(add_rows(call, chosen, dq, dq_outside, tile, where), length)
    dk, dv = (dk_outside, dv_outside) if ring is None else (dk + dk_outside, dv + dv_outside)
    dk, dv = (token_major(y, given.k.shape[1]) for y in (dk, dv))
    dhead_bias = jnp.zeros_like(given.head_bias)
    if dbias:
        more = jnp.where(is_active[:, None, None], dbias_outside[0], 0)
        dhead_bias = dhead_bias.at[1].set((dbias[0].sum(axis=3) + more.sum(axis=3)).sum(axis=(0, 2)))
    dq, dgate = dq.astype(given.q.dtype), dgate.astype(given.gate.dtype)
    return (_Routed(dq, dk, dv, dgate, dhead_bias, dsinks, None, None),)  # type: ignore[arg-type]  # integers


_mixed.defvjp(_mixed_fwd, _mixed_bwd)


def _run_backward(
    tiles: Tiles, ring: Ring | None, launches: Launches, x: TpuOperands, by_query: Cotangents, num_active=None, added=()
):
    """`backward` over the keys of all devices of a ring; `tiles` are those that the keys are padded for."""
    statistics = None
    if by_query.lse is not None and by_query.delta is not None:
        statistics = pack_statistics(by_query.lse[:, :, None], by_query.delta[:, :, None])

    def of_part(keys, where):
        here = with_keys(x, keys, pad_keys(where, tiles))
        return backward(launches.backward, here, OutGradients(by_query.out, statistics), num_active, added)

    return gradients_of_all(ring, (x.k, x.v), x.where, of_part)


def _coordinates_of_rows(
    call: Call, where: Coordinates, order, is_active, full: Cotangents
) -> tuple[Coordinates, Cotangents]:
    """Coordinates and cotangents of gathered queries, which are rotated and whose `full.out` is gathered already.

    Args:
      order: [B, T] indices of the queries.
      is_active: [B, T], of the gathered rows: the others are not visited.
    """
    names = ("q_pos", "q_order", "q_segment_ids", "full_rows")
    given = {name: x for name in names if (x := getattr(where, name)) is not None}
    rows = {"q_pos": order, "q_order": order}
    if call.indexed and where.q_segment_ids is None:  # positions and all
        indices = dict.fromkeys(("q_pos", "q_order"), np.arange(order.shape[1], dtype=np.int32)[None])
        given = {} if where.full_rows is None else given | indices
    # As columns of one array: gathers of single numbers are slow, and those of one row may not compile for v6e.
    columns = [jnp.broadcast_to(x, order.shape).astype(jnp.int32)[:, None] for x in given.values()]
    numbers = [x for x in (full.lse, full.delta) if x is not None]
    columns += [lax.bitcast_convert_type(x, jnp.int32) for x in numbers]
    if columns:
        by_token = jnp.concatenate(columns, axis=1).swapaxes(1, 2)  # [B, T, columns]
        found = jnp.take_along_axis(by_token, order.reshape(*order.shape, 1), axis=1).swapaxes(1, 2)
        first = found.shape[1] - sum(x.shape[1] for x in numbers)
        rows |= {name: found[:, i].astype(x.dtype) for i, (name, x) in enumerate(given.items())}
        found = lax.bitcast_convert_type(found[:, first:], jnp.float32)
        lse, delta = jnp.split(found, 2, axis=1) if numbers else (None, None)
        full = full._replace(lse=lse, delta=delta)
    rows["q_pos"] = jnp.where(is_active, rows["q_pos"], -1)
    return where._replace(**rows, q_cos=None, q_sin=None), full
