"""Full attention looked at row by row, in blocks of query rows, so that no T x T matrix ever exists.

Memory is `ROW_BYTES` for each array of logits a statistic holds, of which there are a few, whatever the length.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import AttentionSpec

ROW_BYTES = 64 * 2**20


class Heads(NamedTuple):
    """One layer's queries and keys, as attention sees them, and how the model makes logits of them."""

    q: jax.Array  # [B, T, H, D]
    k: jax.Array  # [B, T, K, D]
    lengths: jax.Array  # [B] int32: tokens of each row of the batch
    spec: AttentionSpec  # its scale and softcap are read
    slopes: jax.Array | None = None  # [H]: ALiBi's


class Rows(NamedTuple):
    """A block of R query rows against all T keys, everything in f32."""

    logits: jax.Array  # [B, K, G, R, T] the model's, -inf where a key is not visible
    lag: jax.Array  # [R, T] int32: query position - key position; the own key is at 0
    extra: Any  # the block's rows of what `sum_over_rows` was given, [B, R, ...] each

    @property
    def weights(self) -> jax.Array:
        """The attention probabilities [B, K, G, R, T]."""
        return jax.nn.softmax(self.logits, axis=-1)


def logits_of(heads: Heads, q: jax.Array, lag: jax.Array) -> jax.Array:
    """The model's logits [B, K, G, R, T] f32 of some of its queries, q [B, R, H, D], against all keys.

    `lag` [R, T] or [B, R, T]: query position - key position; keys after the query, below 0, are not visible.
    """
    (batch, rows, count, size), kv_heads = q.shape, heads.k.shape[2]
    grouped = q.reshape(batch, rows, kv_heads, count // kv_heads, size)
    logits = jnp.einsum("brkgd,btkd->bkgrt", grouped, heads.k, preferred_element_type=jnp.float32, precision="highest")
    logits *= heads.spec.scale_for(size)
    if heads.spec.logit_softcap is not None:
        logits = heads.spec.logit_softcap * jnp.tanh(logits / heads.spec.logit_softcap)
    lag = lag.reshape(-1, 1, 1, rows, lag.shape[-1])
    if heads.slopes is not None:
        logits += heads.slopes.reshape(kv_heads, -1, 1, 1) * lag
    return jnp.where(lag >= 0, logits, -jnp.inf)


def sum_over_rows(statistic: Callable[[Rows], jax.Array], heads: Heads, extra: Any = ()) -> jax.Array:
    """`statistic(rows)` [B, K, G, R] or with axes after R, summed over the real rows: [B, H, ...] f32.

    Args:
      heads: keys after a query are invisible, so right padding needs no other mask.
      extra: arrays [B, T, ...] that the statistic wants the block's rows of.
    """
    batch, length, count, _ = heads.q.shape
    block = max(1, min(length, ROW_BYTES // (4 * batch * count * length)))
    blocks = -(-length // block)

    def cut(x: jax.Array) -> jax.Array:  # [B, T, ...] -> [blocks, B, R, ...]
        x = jnp.pad(x, [(0, 0), (0, blocks * block - length)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(batch, blocks, block, *x.shape[2:]), 1, 0)

    def one_block(piece: tuple) -> jax.Array:
        first, q, extra = piece
        position = first + jnp.arange(block)
        lag = position[:, None] - jnp.arange(length)
        real = (position < heads.lengths[:, None])[:, None, None]  # [B, 1, 1, R]
        values = statistic(Rows(logits_of(heads, q, lag), lag, extra))
        keep = real.reshape(*real.shape, *[1] * (values.ndim - 4))
        return jnp.where(keep, values, 0).sum(3)

    blocks_of_rows = (jnp.arange(blocks) * block, cut(heads.q), jax.tree.map(cut, extra))
    total = jax.lax.map(one_block, blocks_of_rows).sum(0)
    return total.reshape(batch, count, *total.shape[3:])
