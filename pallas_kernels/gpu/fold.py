"""A decoding step's queries as one block of rows for each KV head, and back."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.math import parts
from pallas_kernels.math.spec import PerHead


class Fold(NamedTuple):
    """Row t * G + g of a KV head's block is query head g of its group at token t; what fills the block up is zero."""

    tokens: int
    heads: int
    kv_heads: int

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def rows(self) -> int:
        """Those of a block: a power of two, 16 at least, as the products of tiles need it."""
        return max(16, pl.next_power_of_2(self.tokens * self.group))

    def _filled(self, x):
        return jnp.pad(x, [(0, self.rows - self.tokens * self.group if i == 1 else 0) for i in range(x.ndim)])

    def queries(self, q: jax.Array) -> jax.Array:
        """[B, T, H, D] -> [B, rows, K, D]."""
        batch, _, _, head_dim = q.shape
        q = q.reshape(batch, self.tokens, self.kv_heads, self.group, head_dim).swapaxes(2, 3)
        return self._filled(q.reshape(batch, -1, self.kv_heads, head_dim))

    def per_head(self, options: PerHead) -> PerHead:
        """Slopes and bias by row."""
        return options._replace(
            alibi_slopes=self._by_row(options.alibi_slopes), sigmoid_bias=self._by_row(options.sigmoid_bias)
        )

    def _by_row(self, x: jax.Array | None) -> jax.Array | None:  # [H] -> [K * rows]
        if x is None:
            return None
        return self._filled(jnp.tile(x.reshape(self.kv_heads, self.group), (1, self.tokens))).ravel()

    def merged(self, out: jax.Array, lse: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
        """Shares [B, K, shares, rows, D] and their lse in base 2 -> out [B, T, H, D] and the natural lse [B, T, H]."""
        if lse is None:
            return self._unfold(out.sum(axis=2)), None
        top = lse.max(axis=2, keepdims=True)
        top = jnp.where(top == -jnp.inf, 0, top)
        weights = jnp.exp2(lse - top)  # [B, K, shares, rows]
        total = weights.sum(axis=2)
        sees_any = total != 0  # NaN is not to be hidden
        total = jnp.where(sees_any, total, 1)
        out = (out * weights[..., None]).sum(axis=2) / total[..., None]
        lse = jnp.where(sees_any, top[:, :, 0] + jnp.log2(total), -jnp.inf)
        return self._unfold(out), self._unfold(parts.natural_lse(lse))

    def _unfold(self, x):  # [B, K, rows, ...] -> [B, T, H, ...]
        batch = x.shape[0]
        x = x[:, :, : self.tokens * self.group]
        x = x.reshape(batch, self.kv_heads, self.tokens, self.group, *x.shape[3:]).swapaxes(1, 2)
        return x.reshape(batch, self.tokens, self.heads, *x.shape[4:])
