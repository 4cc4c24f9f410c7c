"""NaN and infinity reach the queries that see them, and no others.

A mask gives weight zero, but zero times NaN is NaN: through the products with values (and, backward, with keys, queries
and cotangents) a token that nobody sees could spoil whole tiles. Padding, other documents, tokens outside the window
and future tokens must not. The choice, the same in every backend:

* what is multiplied by masked weights has its non-finite numbers replaced by zero (`finite`), in the tiles that have a
  mask; where every key is visible, NaN may spread freely;
* the queries that do see such a token become NaN explicitly. `reference` and `xla` add `taint` to the logits before the
  mask, which then decides. The kernels do not pay for that: where a tile with a mask holds a number that is not finite
  (one flag, hardly ever true), `sees_non_finite` finds the rows, and they are overwritten.

So a NaN in a visible key gives NaN in out and lse, one in a visible value gives NaN in out.
"""

import jax
import jax.numpy as jnp
from jax import lax


def is_finite(x: jax.Array) -> jax.Array:
    """As jnp.isfinite, in operations that every kernel language has."""
    return jnp.abs(x) < jnp.inf


def finite(x: jax.Array) -> jax.Array:
    """x with zeros where it is not finite."""
    return jnp.where(is_finite(x), x, jnp.zeros_like(x))


def taint(*arrays: jax.Array) -> jax.Array:
    """What to add to the logits of tokens [.., D]: NaN where a number of theirs is not finite, else 0."""
    clean = jnp.stack([jnp.isfinite(x).all(axis=-1) for x in arrays]).all(axis=0)
    return jnp.where(clean, 0.0, jnp.nan).astype(arrays[0].dtype)


def sees_non_finite(seen: jax.Array, value: jax.Array, contract=((1,), (0,))) -> jax.Array:
    """Which results of masked weights [rows, keys] times values [keys, D] must be NaN: [rows, D] bool.

    Args:
      contract: the axes of the two that hold the keys.
    """
    bad = jnp.where(is_finite(value), 0.0, 1.0).astype(jnp.bfloat16)
    seen = seen.astype(jnp.bfloat16)
    return lax.dot_general(seen, bad, (contract, ((), ())), preferred_element_type=jnp.float32) > 0
