"""The norms of query and key heads in training: on a TPU a kernel computes their gradients."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Implementation
from pallas_kernels.tpu.calls import norm_gradient
from swa_jax.model.config import ModelConfig
from swa_jax.model.layers import Norm, NormForm, normed
from swa_jax.model.sharding import Partition


def kernel_serves(
    config: ModelConfig, length: int, partition: Partition | None, implementation: Implementation | None
) -> bool:
    """Whether the kernel takes the norms of rows of `length` tokens; `implementation` is attention's."""
    plain = config.qk_norm and config.qk_norm_over == "head" and config.norm_type == "rms" and not config.norm_bias
    pieces = 1 if partition is None else partition.size("sequence")
    return plain and norm_gradient.serves(length // pieces, config.head_dim, implementation)


def normed_heads(norm: Norm, x: jax.Array, partition: Partition | None) -> jax.Array:
    """`norm(x)` of heads x [B, T, H, D] that `kernel_serves`, wherever they lie."""
    scale, form = norm.scale[...], norm.form
    if partition is None:
        return _normed(x, scale, form)
    heads = partition.spec("batch", "sequence", "heads", None)
    on_mesh = jax.shard_map(
        lambda x, scale: _normed(x, scale, form),
        mesh=partition.mesh,
        in_specs=(heads, jax.P()),
        out_specs=heads,
        check_vma=False,
    )
    return on_mesh(x, scale)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _normed(x: jax.Array, scale: jax.Array, form: NormForm) -> jax.Array:
    return normed(x, scale, None, form)


def _backward(form: NormForm, saved: tuple[jax.Array, jax.Array], dout: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, scale = saved
    factor = scale.astype(jnp.float32) + form.unit_offset
    dx, dscale = norm_gradient.norm_gradient(x, dout, factor, form.eps)
    return dx, dscale.astype(scale.dtype)


_normed.defvjp(lambda x, scale, form: (_normed(x, scale, form), (x, scale)), _backward)
