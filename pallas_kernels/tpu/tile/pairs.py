"""Heads of 64 in pairs: two query heads lie side by side in the 128 lanes of a register, from projection to projection.

Keys and values lie beside those of the next KV head where every query head has its own, and beside themselves where
several query heads share them. A kernel takes both heads of a pair in one step. For products along the lanes, a head's
queries have zeros in the other's lanes, so that the products are its own; of results only its own lanes are kept. The
matrix units take as long for 64 lanes as for 128, but moving arrays of 64 lanes into the kernels' layout and back costs
more than a short window.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.tpu.tile.tiles import LANES, Call

LONGEST_WINDOW = 2048


def pairs_pay(heads: int, kv_heads: int, head_dim: int, window: int | None) -> bool:
    """Whether heads of these sizes can be taken in pairs, and a window (None: all keys) is short enough for it."""
    fit = 2 * head_dim == LANES and heads % 2 == 0 and (heads == kv_heads or heads // kv_heads % 2 == 0)
    return fit and window is not None and window <= LONGEST_WINDOW


def side_by_side(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q [B, T, H, 64] -> [B, T, H / 2, 128]; k and v -> [B, S, H / 2, 128], or [B, S, K, 128] if they are shared."""

    def two(x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:2], -1, LANES)

    if q.shape[2] == k.shape[2]:
        return two(q), two(k), two(v)
    return two(q), jnp.concatenate([k, k], axis=-1), jnp.concatenate([v, v], axis=-1)


def sums_by_head(call: Call, x: jax.Array) -> jax.Array:
    """[B, H / abreast, T, D] -> [B, H, T]: the sum of each head's own lanes."""
    if call.abreast == 1:
        return x.sum(axis=3)
    lane, width = np.arange(x.shape[3]), x.shape[3] // call.abreast
    sums = [jnp.where(lane // width == head, x, 0).sum(axis=3) for head in range(call.abreast)]
    return jnp.stack(sums, axis=2).reshape(len(x), -1, x.shape[2])


def own_lanes(call: Call, x: jax.Array, head: int) -> jax.Array:
    """x [rows, D] with zeros in the lanes of the other heads; inside a kernel."""
    if call.abreast == 1:
        return x
    return jnp.where(_lane(x) // (x.shape[1] // call.abreast) == head, x, jnp.zeros_like(x))


def join_lanes(parts: Sequence[jax.Array]) -> jax.Array:
    """[rows, D] with the lanes of each head from its own part; inside a kernel."""
    joined, width = parts[0], parts[0].shape[1] // len(parts)
    for head, part in enumerate(parts[1:], start=1):
        joined = jnp.where(_lane(part) < head * width, joined, part)
    return joined


def _lane(x: jax.Array) -> jax.Array:
    return lax.broadcasted_iota(jnp.int32, x.shape, 1)
