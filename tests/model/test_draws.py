"""First weights: the same numbers in whatever shape XLA is asked for them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from swa_jax.model.draws import normal, split_over_devices


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_draws_are_those_of_flax(dtype):
    keys, shape = jax.random.split(jax.random.key(3), 2), (3, 5)
    expected = jax.vmap(lambda key: nnx.initializers.normal(0.02)(key, shape, dtype))(keys)
    draw = jax.vmap(lambda key: normal(0.02)(key, shape, dtype))
    np.testing.assert_array_equal(draw(keys), expected)
    with split_over_devices():
        np.testing.assert_array_equal(draw(keys), expected)
