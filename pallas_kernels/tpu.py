"""Attention on TPUs: lays a call out for the kernels of `tpu_forward` and `tpu_backward`, and glues their results.

Calls with default positions, a causal window of moderate length and nothing else to widen it run in the window kernels;
all others in the scheduled ones. With full heads, one launch serves the windowed heads and a second the full ones,
each with its own grid, both writing to the same arrays. Routed attention is two disjoint parts merged through lse, the
keys that the window sees and those outside; decoding folds the query heads of a KV head into rows.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.blocks import choose_tiles, device_kind
from pallas_kernels.decode import decode_attention as decode_attention
from pallas_kernels.parts import join_sinks, route, vary_alike
from pallas_kernels.spec import AttentionSpec, Coordinates
from pallas_kernels.tpu_backward import scheduled_backward
from pallas_kernels.tpu_forward import scheduled_forward
from pallas_kernels.tpu_tiles import LOG2E, Call, Heads
from pallas_kernels.tpu_window import window_kernel_serves
from pallas_kernels.tpu_window_backward import window_backward
from pallas_kernels.tpu_window_forward import window_forward


def attention(
    q: jax.Array,  # [B, T, H, D]
    k: jax.Array,  # [B, S, K, D]
    v: jax.Array,  # [B, S, K, D]
    spec: AttentionSpec,
    where: Coordinates,
    *,
    alibi_slopes: jax.Array | None = None,  # [H]
    sigmoid_bias: jax.Array | None = None,  # [H]
    sink_logits: jax.Array | None = None,  # [H]
    full_heads: jax.Array | None = None,  # [K] bool
) -> tuple[jax.Array, jax.Array | None]:
    """Returns out [B, T, H, D] in q's dtype and lse [B, T, H] f32 (None for sigmoid)."""
    out, lse = _attend(
        _call(q, k, spec, alibi_slopes, sigmoid_bias), q, k, v, where, alibi_slopes, sigmoid_bias, full_heads
    )
    return join_sinks(out, lse, sink_logits)


def routed_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    gate: jax.Array,  # [B, T]
    spec: AttentionSpec,
    where: Coordinates,
    *,
    alibi_slopes: jax.Array | None = None,
    sigmoid_bias: jax.Array | None = None,
    sink_logits: jax.Array | None = None,
    full_heads: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns gate * O_full + (1 - gate) * O_window and the branch disagreement [B, T]; see `parts.route`."""
    call = _call(q, k, spec, alibi_slopes, sigmoid_bias)
    attend = functools.partial(
        _attend, alibi_slopes=alibi_slopes, sigmoid_bias=sigmoid_bias, full_heads=full_heads
    )

    def part(q, where, outside):
        out, lse = attend(dataclasses.replace(call, outside=outside), q, k, v, where)
        return out.astype(jnp.float32), lse

    return route(part, q, gate, where, sink_logits)


def interpret_mode():
    """Whether the kernels are to be interpreted: the current trace is not for a TPU."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    return (jax.default_backend() if abstract is None else abstract.platform) != "tpu"


def _call(q, k, spec: AttentionSpec, alibi_slopes, sigmoid_bias) -> Call:
    if q.dtype not in (jnp.float32, jnp.bfloat16):
        raise NotImplementedError(
            f"implementation 'tpu' takes float32 and bfloat16, but q is {q.dtype}; use 'xla'."
        )
    return Call(
        spec=spec,
        tiles=choose_tiles(device_kind(), q.shape[1], k.shape[1], q.shape[3]),
        has_slopes=alibi_slopes is not None,
        has_bias=sigmoid_bias is not None,
        interpret=interpret_mode(),
    )


def _attend(call: Call, q, k, v, where: Coordinates, alibi_slopes, sigmoid_bias, full_heads):
    """Head-major, padded to whole blocks (padding is at position -1, so nothing sees it), and back."""
    _, q_length, heads, head_dim = q.shape
    if window_kernel_serves(call, where):
        spec = dataclasses.replace(call.spec, window=min(call.spec.window, q_length))
        call = dataclasses.replace(call, spec=spec, window_kernel=True)
    tiles = call.tiles

    def head_major(x, block):
        return _pad(x.transpose(0, 2, 1, 3), block, 2, 0)

    where = Coordinates(
        q_pos=_pad(where.q_pos, tiles.q_block, 1, -1),
        kv_pos=_pad(where.kv_pos, tiles.kv_block, 1, -1),
        q_order=_pad(where.q_order, tiles.q_block, 1, -1),
        kv_order=_pad(where.kv_order, tiles.kv_block, 1, -1),
        q_seg=_pad(where.q_seg, tiles.q_block, 1, 0),
        kv_seg=_pad(where.kv_seg, tiles.kv_block, 1, 0),
        full_rows=_pad(where.full_rows, tiles.q_block, 1, False),
    )
    zeros = jnp.zeros(heads, jnp.float32)
    slopes = zeros if alibi_slopes is None else jax.lax.stop_gradient(alibi_slopes).astype(jnp.float32)
    bias = zeros if sigmoid_bias is None else sigmoid_bias.astype(jnp.float32)
    q = q * jnp.asarray(call.query_factor(head_dim), q.dtype)
    arguments = (
        head_major(q, tiles.q_block),
        head_major(k, tiles.kv_block),
        head_major(v, tiles.kv_block),
        jnp.stack([slopes, bias]),
        where,
        full_heads,
    )
    out, lse = _core(call, *vary_alike(arguments))
    out = out[:, :, :q_length].transpose(0, 2, 1, 3)
    return out, None if lse is None else lse[:, :, 0, :q_length].transpose(0, 2, 1)


def _pad(x, block: int, axis: int, fill):
    """Extends an axis to a multiple of `block`."""
    if x is None or x.shape[axis] % block == 0:
        return x
    numpy = np if isinstance(x, np.ndarray) else jnp
    widths = [(0, -x.shape[axis] % block if i == axis else 0) for i in range(x.ndim)]
    return numpy.pad(x, widths, constant_values=fill)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _core(call: Call, q, k, v, head_bias, where: Coordinates, full_heads):
    out, lse = (*forward(call, q, k, v, head_bias, where, full_heads), None)[:2]
    return out, lse


def _core_fwd(call, *arguments):
    out, lse = _core(call, *arguments)
    return (out, lse), (*arguments, out, lse)


def _core_bwd(call, saved, cotangents):
    *arguments, out, lse = saved
    dout, dlse = cotangents
    statistics = None
    if lse is not None:
        sees_any = lse > -jnp.inf
        delta = (dout.astype(jnp.float32) * out.astype(jnp.float32)).sum(axis=-1)[:, :, None] - dlse
        rows = [jnp.where(sees_any, lse * LOG2E, 0), jnp.where(sees_any, delta, 0)]
        statistics = jnp.pad(jnp.concatenate(rows, axis=2), [(0, 0), (0, 0), (0, 6), (0, 0)])
    dq, dk, dv, *dbias = backward(call, *arguments, dout, statistics)
    dhead_bias = jnp.zeros_like(arguments[3])
    if dbias:
        dhead_bias = dhead_bias.at[1].set(dbias[0].sum(axis=(0, 2, 3)))
    return dq, dk, dv, dhead_bias, None, None


_core.defvjp(_core_fwd, _core_bwd)


def forward(call: Call, q, k, v, head_bias, where: Coordinates, full_heads) -> tuple[jax.Array, ...]:
    """out [B, H, T, D] and, for softmax, lse [B, H, 1, T], of head-major, padded arrays and multiplied queries.

    Args:
      head_bias: [2, H] f32, ALiBi slopes and biases.
    """
    results: tuple[jax.Array, ...] = ()
    for part, heads in _launches(call, k.shape[1], full_heads):
        kernel = window_forward if part.window_kernel else scheduled_forward
        results = kernel(part, q, k, v, head_bias, where, heads, results)
    return results


def backward(
    call: Call, q, k, v, head_bias, where: Coordinates, full_heads, dout, statistics
) -> tuple[jax.Array, ...]:
    """dq, dk, dv and, with a bias, its gradient by row [B, H, 1, T].

    Args:
      dout: [B, H, T, D].
      statistics: [B, H, 8, T] f32, lse in base 2 and delta, the rest unused; None for sigmoid.
    """
    results: tuple[jax.Array, ...] = ()
    for part, heads in _launches(call, k.shape[1], full_heads):
        # Sink tokens gather gradients from the whole sequence, long after their block has left the window.
        in_window = part.window_kernel and not part.spec.num_sink_tokens
        kernel = window_backward if in_window else scheduled_backward
        results = kernel(part, q, k, v, head_bias, where, heads, dout, statistics, results)
    return results


def _launches(call: Call, kv_heads: int, full_heads) -> list[tuple[Call, Heads]]:
    """One launch for all heads; or one for the windowed and one for the full ones."""
    if full_heads is None:
        return [(call, Heads(kv_heads))]
    order = jnp.argsort(full_heads, stable=True).astype(jnp.int32)
    num_full = full_heads.sum(dtype=jnp.int32)
    full = dataclasses.replace(call, spec=dataclasses.replace(call.spec, window=None), window_kernel=False)
    return [(call, Heads(kv_heads - num_full, order)), (full, Heads(num_full, order[::-1]))]
