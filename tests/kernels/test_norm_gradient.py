"""The kernel for the gradients of norms of heads: what JAX differentiates the norm itself to."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.tpu.calls.norm_gradient import norm_gradient

from .tolerances import assert_close

EPS = 1e-5


def norm(x, scale):
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + EPS) * scale


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(2, 128, 3, 128), (1, 4224, 1, 128), (1, 384, 2, 256)])
def test_it_is_the_derivative_of_the_norm(shape, dtype):
    rng = np.random.default_rng(sum(shape))
    # Sizes of the heads from far below the root of eps to far above it.
    sizes = 10 ** rng.uniform(-4, 2, size=(*shape[:3], 1))
    x, dout = jnp.asarray(rng.normal(size=shape) * sizes, dtype), jnp.asarray(rng.normal(size=shape), dtype)
    scale = jnp.asarray(rng.normal(size=shape[3]), jnp.float32)
    dx, dscale = jax.vjp(norm, x, scale)[1](dout.astype(jnp.float32))
    assert_close(norm_gradient(x, dout, scale, EPS), (dx, dscale), dtype, gradient=True)
