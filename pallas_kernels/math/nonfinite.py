"""NaN and infinity in a token reach the queries that see it, and change no bit of the others.

A mask gives weight zero, but zero times NaN is NaN: through the products with values (and, backward, with keys, queries
and cotangents) a token that nobody sees could spoil whole tiles. Padding, other documents, tokens outside the window,
future tokens and unused entries of a cache must not. The choice, the same in every backend:

* what is multiplied by masked weights has its non-finite numbers replaced by zero (`finite`), where there is a mask;
  where every key is visible, NaN may spread freely;
* the queries that do see such a token become NaN explicitly. `reference` and `xla` add `nan_marks` to the logits before
  the mask, which then decides. The kernels for TPUs do not pay for that: one flag, hardly ever true, says that there is
  such a value; then `sees_non_finite` finds the rows, and they are overwritten. The window forward kernel and decoding
  need no clean copy of the values: their flag comes from the result, which is computed again if it is set.

What follows, for softmax and sigmoid:

* NaN in a visible key, or in the query itself: NaN in out and lse. Infinity there may give NaN or a limit.
* NaN or infinity in a visible value: out is NaN or infinite; lse may be NaN or not, as the backend has it.
* Gradients: dq is untouched for a query that sees nothing of the kind, dk and dv for a key that no such query sees.
  A query that is NaN spoils the gradients of all keys that it sees, even for a cotangent of zero: it has no weights.
* A cotangent that is not finite does the same to the keys that its query sees, in the backends. In `reference`, which
  JAX differentiates, it reaches every key.
"""

import jax
import jax.numpy as jnp
from jax import lax


def is_finite(x: jax.Array) -> jax.Array:
    """As jnp.isfinite, in operations that every kernel language has."""
    return jnp.abs(x) < jnp.inf


def finite(x: jax.Array) -> jax.Array:
    """x with zeros where it is not finite."""
    seen = is_finite(x)  # zeros like x itself could not be made where jit closes over an x of several devices
    return jnp.where(seen, x, jnp.zeros_like(seen, x.dtype))


def nan_marks(*arrays: jax.Array) -> jax.Array:
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
