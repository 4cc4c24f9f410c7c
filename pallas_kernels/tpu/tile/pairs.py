"""Heads of 64 in pairs: two query heads lie side by side in the 128 lanes of a register, from projection to projection.

For the kernels each of the two has zeros in the other's lanes. Keys and values lie beside those of the next KV head
where every query head has its own, and beside themselves where several query heads share them. So products with
128 lanes are a head's own, and its results lie in its own lanes. The matrix units take as long for 64 lanes as for
128, but moving arrays of 64 lanes into the kernels' layout and back costs more than a short window. The backward pass
takes longer with 128 lanes (1.36 times on v5e, with a window of 256), which long windows do not repay.
"""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.math.spec import AttentionSpec, PerHead

LANES = 128
LONGEST_WINDOW = 2048


def in_pairs(q: jax.Array, k: jax.Array, spec: AttentionSpec, per_head: PerHead) -> bool:
    """Whether a call's heads are taken in pairs: q [B, T, H, D], k [B, S, K, D]."""
    one_kind = per_head.full_heads is None  # KV heads of a pair might differ
    return one_kind and pairs_pay(q.shape[2], k.shape[2], q.shape[3], spec.window)


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


@jax.custom_vjp
def spread(x: jax.Array) -> jax.Array:
    """[B, H / 2, T, 128] -> [B, H, T, 128]: each head with zeros in the other's lanes."""
    batch, pairs, length, _ = x.shape
    own = np.arange(LANES) // (LANES // 2) == np.arange(2)[:, None, None]  # [2, 1, 128]
    return jnp.where(own, x[:, :, None], 0).reshape(batch, 2 * pairs, length, LANES)


@jax.custom_vjp
def gather(x: jax.Array) -> jax.Array:
    """[B, H, T, 128] -> [B, H / 2, T, 128]: of each head its own lanes."""
    batch, heads, length, _ = x.shape
    x = x.reshape(batch, heads // 2, 2, length, LANES)
    return jnp.where(np.arange(LANES) < LANES // 2, x[:, :, 0], x[:, :, 1])


# Each is the other's transpose. Told so, XLA neither adds up zeros nor pads halves.
spread.defvjp(lambda x: (spread(x), None), lambda _, cotangent: (gather(cotangent),))
gather.defvjp(lambda x: (gather(x), None), lambda _, cotangent: (spread(cotangent),))
