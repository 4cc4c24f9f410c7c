"""Differentiable attention by the TPU kernels, of one set of keys: those a spec sees, or those outside."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.blocks import device_kind
from pallas_kernels.math.parts import named, natural_lse, vary_alike
from pallas_kernels.math.ring import Ring, attend_to_all, gradients_of_all, one_part
from pallas_kernels.math.spec import Coordinates, PerHead
from pallas_kernels.tpu.calls.launches import Given, Launches, attention_call, attention_launches
from pallas_kernels.tpu.calls.layout import (
    head_major,
    pack_statistics,
    pad_coordinates,
    stack_head_bias,
    token_major,
    with_keys,
)
from pallas_kernels.tpu.calls.passes import backward, forward
from pallas_kernels.tpu.tile.pairs import sums_by_head
from pallas_kernels.tpu.tile.rotation import multiplied
from pallas_kernels.tpu.tile.tiles import Call, OutGradients, TpuOperands


def attend_to_keys(
    call: Call,
    q: jax.Array,  # [B, T, H, D]
    k: jax.Array,  # [B, S, K, D]
    v: jax.Array,  # [B, S, K, D]
    where: Coordinates,
    per_head: PerHead,
    ring: Ring | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Out [B, T, H, D] in q's dtype and lse [B, T, H] f32 (None for sigmoid), sink logits left out.

    Of a call in pairs, q and out are [B, T, H / 2, 128] (see `pairs.py`).
    """
    _, length, heads, head_dim = q.shape
    here, given = one_part(ring, where), Given(head_dim, k.dtype, device_kind(), per_head.full_heads is not None)
    call = attention_call(call, here, given)
    launches = attention_launches(call, here, given)
    q = head_major(multiplied(call, q), call.tiles.q_block)
    x = TpuOperands(
        q,
        head_major(k, call.tiles.kv_block),
        head_major(v, call.tiles.kv_block),
        stack_head_bias(heads * call.abreast, per_head),
        where,
        per_head.full_heads,
    )
    out, lse = _core(launches, ring, vary_alike(x))
    return token_major(out, length), None if lse is None else lse[:, :, 0, :length].transpose(0, 2, 1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _core(launches: Launches, ring: Ring | None, x: TpuOperands):
    return _core_fwd(launches, ring, x)[0]


def _core_fwd(launches, ring, x):
    out, lse = named(*forward_to_all(launches, ring, x))
    return (out, natural_lse(lse)), (x, out, lse)


def forward_to_all(launches: Launches, ring: Ring | None, x: TpuOperands) -> tuple[jax.Array, ...]:
    """`passes.forward` over the keys of all devices of a ring; `x.where` is not padded."""

    def attend(keys, where, results, last):
        here = launches if last else launches.in_parts()
        return forward(here.forward, with_keys(x, keys, pad_coordinates(where, launches.call.tiles)), results)

    return attend_to_all(ring, (x.k, x.v), x.where, attend)


def _core_bwd(launches, ring, saved, cotangents):
    (x, out, lse), (dout, dlse) = saved, cotangents
    statistics = None
    if lse is not None:
        products = dout.astype(jnp.float32) * out.astype(jnp.float32)
        delta = sums_by_head(launches.call, products)[:, :, None] - dlse
        statistics = pack_statistics(lse, delta)

    def of_part(keys, where):
        here = with_keys(x, keys, pad_coordinates(where, launches.call.tiles))
        return backward(launches.backward, here, OutGradients(dout, statistics))

    dq, dk, dv, *dbias = gradients_of_all(ring, (x.k, x.v), x.where, of_part)
    dhead_bias = jnp.zeros_like(x.head_bias)
    if dbias:
        dhead_bias = dhead_bias.at[1].set(dbias[0].sum(axis=(0, 2, 3)))
    return (TpuOperands(dq.astype(x.q.dtype), dk, dv, dhead_bias, None, None),)  # type: ignore[arg-type]  # integers


_core.defvjp(_core_fwd, _core_bwd)
