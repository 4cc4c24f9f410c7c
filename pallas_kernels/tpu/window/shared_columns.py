"""The two edges of a window as one tile: what a query sees of the one, it does not see of the other.

A strip of queries meets the edges of its window in two tiles of keys, the *near* one at its own tokens and the *far*
one a window before. Of column c, query r sees the near key if c <= r and the far key if c > r. So one tile of logits
and of exponentials serves both, with a product for each. Of a window that is no whole number of strips, the far tile is
where that of the next whole one is, and a mask hides what lies between.

By quarters. Where matrix units are 256 wide, a row of 128 numbers fills half of their depth; a strip has 256 queries.
Its first half sees nothing of the second half of the near keys, and its second half nothing of the first half of the
far keys. One product with the near keys' first and the far keys' second half serves all queries. Of the rest, each half
of the queries needs its own quarter, and as two blocks on a diagonal, which fill the depth, both are one product of
half as many rows. Three quarters of the two tiles' work remain.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.math.nonfinite import finite
from pallas_kernels.tpu.tile.tiles import LANES, NN, NT, Call, dot, window_of
from pallas_kernels.tpu.window.geometry import WindowTile


def share_columns(call: Call, tiles: list[WindowTile]) -> bool:
    """Whether the first and the last tile of a strip are such a pair."""
    first, last = tiles[0], tiles[-1]
    strip = math.gcd(call.tiles.strip, call.tiles.q_block)
    return last.key - first.key == whole_window(call) and first.size == last.size == strip


def whole_window(call: Call) -> int:
    """The window in whole strips, which is how far apart such tiles are."""
    strip = math.gcd(call.tiles.strip, call.tiles.q_block)
    return -(-window_of(call) // strip) * strip


def sees_far(size: int) -> jax.Array:
    """[queries, columns]: whether the key is the far one."""
    shape = size, size
    return lax.broadcasted_iota(jnp.int32, shape, 0) < lax.broadcasted_iota(jnp.int32, shape, 1)


def shared_products(query: jax.Array, far_keys: jax.Array, near_keys: jax.Array) -> jax.Array:
    """q.k of the key that each query sees in each column, [n, n] f32; all three arguments are [n, D]."""
    n = len(query)
    if not _by_quarters(n, query.shape[1]):
        products = dot(query, jnp.concatenate([far_keys, near_keys]), NT)
        return jnp.where(sees_far(n), products[:, :n], products[:, n:])
    half, far = n // 2, sees_far(n // 2)
    common = dot(query, jnp.concatenate([near_keys[:half], far_keys[half:]]), NT)
    # Two queries share a row: one that is not finite leaves the other alone, and spoils itself in the common keys.
    beside = finite(jnp.concatenate([query[:half], query[half:]], axis=1))
    corners = dot(beside, _diagonal(far_keys[:half], near_keys[half:]), NT)
    return _square(
        jnp.where(far, corners[:, :half], common[:half, :half]),
        common[:half, half:],
        common[half:, :half],
        jnp.where(far, common[half:, half:], corners[:, half:]),
    )


def shared_values(
    weights: jax.Array, far_values: jax.Array, near_values: jax.Array, *, with_sums: bool, acc: jax.Array
) -> jax.Array:
    """Adds the weighted values of the keys that are seen.

    Args:
      weights: [n, n] f32, of the logits that `shared_products` became.
      far_values, near_values: [n, D], with sums what `beside_ones` makes of whole lanes.
      acc: as wide.
    """
    n, dtype = len(weights), near_values.dtype
    # Factors of 1 and 0, as the v5e's simulator does not know what selections before a rounding are compiled to.
    if not _by_quarters(n, near_values.shape[1] - LANES * with_sums):
        far = weights * jnp.where(sees_far(n), 1.0, 0.0)
        both = jnp.concatenate([far, weights - far], axis=1).astype(dtype)
        return acc + dot(both, jnp.concatenate([far_values, near_values]), NN)
    half = n // 2
    far, first, last = sees_far(half), weights[:half, :half], weights[half:, half:]
    common = _square(
        jnp.where(far, 0, first), weights[:half, half:], weights[half:, :half], jnp.where(far, last, 0)
    ).astype(dtype)
    values = jnp.concatenate([near_values[:half], far_values[half:]])
    acc = acc + dot(common, values, NN)
    corners = jnp.where(far, first, 0), jnp.where(far, 0, last)
    beside = finite(jnp.concatenate(corners, axis=1).astype(dtype))  # as for the products
    found = dot(beside, _diagonal(far_values[:half, :LANES], near_values[half:, :LANES]), NN)
    found = jnp.concatenate([found[:, :half], found[:, half:]])
    if with_sums:
        # Each along the lanes before they are put together: columns one wide would be laid out anew.
        sums = [jnp.broadcast_to(x.sum(axis=1, keepdims=True), x.shape) for x in corners]
        found = jnp.concatenate([found, jnp.concatenate(sums)], axis=1)
    return acc + found


def _by_quarters(num_queries: int, head_dim: int) -> bool:
    return num_queries == 2 * LANES and head_dim == LANES


def _diagonal(a: jax.Array, b: jax.Array) -> jax.Array:
    return _square(a, jnp.zeros_like(b), jnp.zeros_like(a), b)


def _square(*quarters: jax.Array) -> jax.Array:
    """Upper left and right, lower left and right."""
    return jnp.concatenate([jnp.concatenate(quarters[i : i + 2], axis=1) for i in (0, 2)])
