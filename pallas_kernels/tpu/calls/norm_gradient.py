"""The gradient of a norm of query or key heads (QK-norm; Henry et al. 2020) on TPUs.

XLA would compute it inside both products that read it, those of the projection behind the norm, and again for the
scale's: all three slow down. The kernel reads each array once. The heads of a token lie side by side in what it
writes, which those products read faster than one head after the other.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.blocks import on_tpu
from pallas_kernels.tpu.tile.tiles import LANES, largest_divisor

_BLOCK = 2048  # tokens of a step: smaller ones leave the memory idle between steps
_SUBLANES = 8


def serves(length: int, head_dim: int, implementation: str | None) -> bool:
    """Whether the kernel takes heads [B, T, H, D]: those that fill registers, of whole tiles of tokens.

    `implementation` is that of the attention behind the norm; None: the best one on the device.
    """
    here = on_tpu() if implementation is None else implementation == "tpu"
    return here and head_dim % LANES == 0 and length % LANES == 0


def norm_gradient(x: jax.Array, dout: jax.Array, scale: jax.Array, eps: float) -> tuple[jax.Array, jax.Array]:
    """Of `x / sqrt(mean(x^2) + eps) * scale`, the mean over D.

    Args:
      x, dout: [B, T, H, D], and the cotangents of what it gave.
      scale: [D] f32.

    Returns:
      dx [B, T, H, D] in x's dtype, dscale [D] f32.
    """
    batch, length, heads, head_dim = x.shape
    block = largest_divisor(length, _BLOCK)
    by_head = pl.BlockSpec((None, None, block, head_dim), lambda b, h, i: (b, h, i, 0))
    dx, dscale = pl.pallas_call(
        functools.partial(_kernel, eps),
        grid=(batch, heads, length // block),
        in_specs=[by_head, by_head, pl.BlockSpec((1, head_dim), lambda b, h, i: (0, 0))],
        out_specs=[
            pl.BlockSpec((None, block, head_dim), lambda b, h, i: (b, i, h)),
            pl.BlockSpec((None, None, _SUBLANES, head_dim), lambda b, h, i: (b, h, 0, 0)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((batch, length, heads * head_dim), x.dtype),
            jax.ShapeDtypeStruct((batch, heads, _SUBLANES, head_dim), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        # No operations to speak of: it takes as long as the memory does.
        cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=3 * x.size * x.dtype.itemsize),
        interpret=not on_tpu(),
        name="norm_gradient",
    )(x.transpose(0, 2, 1, 3), dout.transpose(0, 2, 1, 3), scale[None])
    return dx.reshape(x.shape), dscale.sum(axis=(0, 1, 2))


def _kernel(eps: float, x_ref, dout_ref, scale_ref, dx_ref, dscale_ref) -> None:
    x, dout = x_ref[...].astype(jnp.float32), dout_ref[...].astype(jnp.float32)
    inverse = lax.rsqrt(jnp.mean(x * x, axis=1, keepdims=True) + eps)
    normed, scaled = x * inverse, dout * scale_ref[...]
    along = jnp.mean(scaled * normed, axis=1, keepdims=True)
    dx_ref[...] = (inverse * (scaled - normed * along)).astype(dx_ref.dtype)

    @pl.when(pl.program_id(2) == 0)
    def _():
        dscale_ref[...] = jnp.zeros_like(dscale_ref)

    dscale_ref[...] += (dout * normed).reshape(-1, _SUBLANES, x.shape[1]).sum(axis=0)
