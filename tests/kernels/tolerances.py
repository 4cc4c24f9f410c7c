"""The one table of tolerances: the absolute and relative error allowed against the reference, by input dtype."""

import jax
import jax.numpy as jnp
import numpy as np

VALUE_TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 1e-2}
GRADIENT_FACTOR = 2


def assert_close(actual, expected, dtype, *, gradient: bool = False) -> None:
    """Holds every leaf of `actual` to `expected`, which come from inputs of `dtype`."""
    tolerance = VALUE_TOLERANCE[jnp.dtype(dtype).name] * (GRADIENT_FACTOR if gradient else 1)
    actual, expected = jax.tree.leaves_with_path(actual), jax.tree.leaves(expected)
    assert len(actual) == len(expected)
    for (path, a), e in zip(actual, expected, strict=True):
        assert a.dtype == e.dtype
        a, e = (np.asarray(x.astype(jnp.promote_types(x.dtype, jnp.float32))) for x in (a, e))
        np.testing.assert_allclose(a, e, rtol=tolerance, atol=tolerance, err_msg=jax.tree_util.keystr(path))


def assert_both_close(actual, expected, dtype) -> None:
    """Of two pairs the values, and then the gradients."""
    assert_close(actual[0], expected[0], dtype)
    assert_close(actual[1], expected[1], dtype, gradient=True)
