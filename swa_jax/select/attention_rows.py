"""Full attention looked at row by row, in blocks of query rows, so that no T x T matrix ever exists.

Memory is `ROW_BYTES` for each array of logits a statistic holds, of which there are a few, whatever the length.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

ROW_BYTES = 64 * 2**20


class Rows(NamedTuple):
    """A block of R query rows against all T keys, everything in f32."""

    logits: jax.Array  # [B, K, G, R, T] scaled, -inf where a key is not visible
    lag: jax.Array  # [R, T] int32: query position - key position; the own key is at 0
    extra: Any  # the block's rows of what `sum_over_rows` was given, [B, R, ...] each

    @property
    def weights(self) -> jax.Array:
        """The attention probabilities [B, K, G, R, T]."""
        return jax.nn.softmax(self.logits, axis=-1)


def logits_of(q: jax.Array, k: jax.Array, visible: jax.Array) -> jax.Array:
    """q [B, R, H, D], k [B, T, K, D], visible [R, T] or [B, 1, 1, R, T] -> logits [B, K, G, R, T] f32."""
    batch, rows, heads, size = q.shape
    grouped = q.reshape(batch, rows, k.shape[2], heads // k.shape[2], size)
    logits = jnp.einsum(
        "brkgd,btkd->bkgrt", grouped, k, preferred_element_type=jnp.float32, precision="highest"
    )
    return jnp.where(visible, logits * size**-0.5, -jnp.inf)


def sum_over_rows(
    statistic: Callable[[Rows], jax.Array],
    q: jax.Array,
    k: jax.Array,
    lengths: jax.Array,
    extra: Any = (),
) -> jax.Array:
    """`statistic(rows)` [B, K, G, R] or with axes after R, summed over the real rows: [B, H, ...] f32.

    Args:
      q: [B, T, H, D]; k: [B, T, K, D]; keys after a query are invisible, so right padding needs no other mask.
      lengths: [B] int32, tokens of each row of the batch.
      extra: arrays [B, T, ...] that the statistic wants the block's rows of.
    """
    batch, length, heads, _ = q.shape
    block = max(1, min(length, ROW_BYTES // (4 * batch * heads * length)))
    blocks = -(-length // block)

    def cut(x: jax.Array) -> jax.Array:  # [B, T, ...] -> [blocks, B, R, ...]
        x = jnp.pad(x, [(0, 0), (0, blocks * block - length)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(batch, blocks, block, *x.shape[2:]), 1, 0)

    def one_block(piece: tuple) -> jax.Array:
        first, q, extra = piece
        position = first + jnp.arange(block)
        lag = position[:, None] - jnp.arange(length)
        real = (position < lengths[:, None])[:, None, None]  # [B, 1, 1, R]
        values = statistic(Rows(logits_of(q, k, lag >= 0), lag, extra))
        keep = real.reshape(*real.shape, *[1] * (values.ndim - 4))
        return jnp.where(keep, values, 0).sum(3)

    total = jax.lax.map(one_block, (jnp.arange(blocks) * block, cut(q), jax.tree.map(cut, extra))).sum(0)
    return total.reshape(batch, heads, *total.shape[3:])
