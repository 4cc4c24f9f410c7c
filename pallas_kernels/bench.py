"""What the static measurement of the TPU kernels runs: functions that return `(fn, args)`, to be compiled for a chip.

They call the very functions that `attention(..., implementation="tpu")` dispatches to, with its choice of tiles, on
head-major arrays, so that a figure is a kernel's and not that of the transposes around it. Keyword arguments: H query
heads, K KV heads, T tokens, D head_dim, window, num_sink_tokens, dtype, and fields of `Tiles` to try others.

The window kernels read nothing from scalar memory, so a simulator that knows no contents of it times them whole. The
*scheduled* kernels (`full_*`, `routed_*`, `head_hybrid_forward`, `decode`, long windows) take their control flow
from it: all flags read as zero, no visit does its work, and what is reported is the grid's skeleton. For
those, take from the listing of basic blocks the bundles of the body with and without a mask, times the visits of
each kind (`visit_counts`), and add the skeleton.
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels import tpu, tpu_passes
from pallas_kernels.blocks import choose_tiles, device_kind
from pallas_kernels.schedule import fully_visible, visited
from pallas_kernels.spec import AttentionSpec, coordinates
from pallas_kernels.tpu_tiles import Call
from pallas_kernels.tpu_window import window_kernel_serves


def window_forward(packed=False, **shape):
    """Window attention with lse; `packed` adds segment ids."""
    return _bench({"window": 1024} | shape, packed=packed)


def window_backward(packed=False, **shape):
    """dq, dk and dv of window attention."""
    return _bench({"window": 1024} | shape, packed=packed, backward=True)


def full_forward(**shape):
    """Full causal attention with lse."""
    return _bench({"window": None} | shape)


def full_backward(**shape):
    """dq, dk and dv of full causal attention."""
    return _bench({"window": None} | shape, backward=True)


def sigmoid_forward(**shape):
    """Window attention with sigmoid and ALiBi."""
    return _bench({"window": 1024} | shape, activation="sigmoid")


def sigmoid_backward(**shape):
    """dq, dk and dv of window attention with sigmoid and ALiBi."""
    return _bench({"window": 1024} | shape, activation="sigmoid", backward=True)


def head_hybrid_forward(rho=0.75, **shape):
    """Window attention in the share `rho` of the KV heads, full attention in the others: two launches."""
    return _bench({"window": 1024, "H": 8, "K": 8} | shape, rho=rho)


def routed_forward(ratio=0.13, **shape):
    """Both branches of SwiAttn: the window's keys and those outside, merged."""
    return _routed(ratio, {"window": 1024, "T": 8192} | shape, backward=False)


def routed_backward(ratio=0.13, **shape):
    """Forward and backward of SwiAttn's attention, the given share of the tokens being routed to full attention."""
    return _routed(ratio, {"window": 1024, "T": 8192} | shape, backward=True)


def decode(H=8, K=8, T=8192, D=128, window=1024, num_sink_tokens=0, dtype="bfloat16"):
    """One token a sequence over a cache of T entries."""
    spec = AttentionSpec(window, num_sink_tokens)
    q = jax.ShapeDtypeStruct((1, 1, H, D), jnp.dtype(dtype))
    cache = jax.ShapeDtypeStruct((1, T, K, D), jnp.dtype(dtype))

    def function(q, k, v, lengths):
        where = coordinates(1, T, q_positions=lengths[:, None] - 1, kv_positions=jnp.arange(T)[None])
        return tpu.decode_attention(q, k, v, spec, where)

    return function, (q, cache, cache, jax.ShapeDtypeStruct((1,), jnp.int32))


def visit_counts(T=16384, q_block=1024, kv_block=1024, window=None, num_sink_tokens=0) -> dict[str, int]:
    """Block pairs that the scheduled kernel visits for one head, those that need a mask apart."""
    spec, where = AttentionSpec(window, num_sink_tokens), coordinates(T, T)
    table = visited(spec, where, q_block, kv_block)
    masked = table & ~fully_visible(spec, where, q_block, kv_block)
    return {"masked": int(masked.sum()), "plain": int((table & ~masked).sum())}


def _bench(shape, *, packed=False, backward=False, activation="softmax", rho=None):
    H, K, T, D, dtype, spec, tiles = _read(shape, activation)
    q = jax.ShapeDtypeStruct((1, H, T, D), dtype)
    kv = jax.ShapeDtypeStruct((1, K, T, D), dtype)
    head_bias = jax.ShapeDtypeStruct((2, H), jnp.float32)
    row = jax.ShapeDtypeStruct((1, H, 8 if backward else 1, T), jnp.float32)
    ids = jax.ShapeDtypeStruct((1, T), jnp.int32)

    def function(q, k, v, head_bias, ids, *cotangents):
        where = coordinates(T, T, q_segment_ids=ids) if packed else coordinates(T, T)
        chosen = dataclasses.replace(choose_tiles(device_kind(), T, T, D), **tiles)
        call = Call(spec, chosen, indexed=True, has_slopes=activation == "sigmoid")
        call = dataclasses.replace(call, window_kernel=window_kernel_serves(call, where))
        full_heads = None if rho is None else jnp.arange(K) >= round(rho * K)
        if not backward:
            return tpu_passes.forward(call, q, k, v, head_bias, where, full_heads)
        return tpu_passes.backward(call, q, k, v, head_bias, where, full_heads, *cotangents)

    cotangents = ((q, row) if activation == "softmax" else (q, None)) if backward else ()
    return function, (q, kv, kv, head_bias, ids, *cotangents)


def _routed(ratio, shape, backward):
    H, K, T, D, dtype, spec, _ = _read(shape, "softmax")
    q = jax.ShapeDtypeStruct((1, T, H, D), dtype)
    kv = jax.ShapeDtypeStruct((1, T, K, D), dtype)

    def forward(q, k, v, gate):
        return tpu.routed_attention(q, k, v, gate, spec, coordinates(T, T))[0]

    def both(q, k, v, gate):
        # Every n-th token is routed: as good as random for what is measured.
        gate = jnp.where(jnp.arange(T)[None] % round(1 / ratio) == 0, gate, 0)
        out, pullback = jax.vjp(forward, q, k, v, gate)
        return out, pullback(out)

    return both if backward else forward, (q, kv, kv, jax.ShapeDtypeStruct((1, T), jnp.float32))


def _read(shape, activation):
    shape = {"H": 1, "K": 1, "T": 16384, "D": 128, "num_sink_tokens": 0, "dtype": "bfloat16"} | shape
    H, K, T, D = (shape.pop(name) for name in "HKTD")
    spec = AttentionSpec(shape.pop("window"), shape.pop("num_sink_tokens"), activation)
    return H, K, T, D, jnp.dtype(shape.pop("dtype")), spec, shape
