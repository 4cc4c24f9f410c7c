"""Attention on TPUs: `attention`, `routed_attention` and `decode_attention`."""

import jax
import jax.numpy as jnp

from pallas_kernels.parts import join_sinks
from pallas_kernels.routed import routed_attention
from pallas_kernels.spec import AttentionSpec, Coordinates
from pallas_kernels.tpu_attend import attend
from pallas_kernels.tpu_passes import make_call

__all__ = ["attention", "decode_attention", "routed_attention"]


def attention(
    q: jax.Array,  # [B, T, H, D]
    k: jax.Array,  # [B, S, K, D]
    v: jax.Array,  # [B, S, K, D]
    spec: AttentionSpec,
    where: Coordinates,
    *,
    alibi_slopes: jax.Array | None = None,  # [H]
    sigmoid_bias: jax.Array | None = None,  # [H]
    sink_logits: jax.Array | None = None,  # [H]
    full_heads: jax.Array | None = None,  # [K] bool
) -> tuple[jax.Array, jax.Array | None]:
    """Returns out [B, T, H, D] in q's dtype and lse [B, T, H] f32 (None for sigmoid)."""
    call = make_call(q, k, spec, where, alibi_slopes, sigmoid_bias)
    out, lse = attend(call, q, k, v, where, alibi_slopes, sigmoid_bias, full_heads)
    return join_sinks(out, lse, sink_logits)


def decode_attention(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    spec: AttentionSpec,
    where: Coordinates,
    *,
    alibi_slopes: jax.Array | None = None,
    sigmoid_bias: jax.Array | None = None,
    sink_logits: jax.Array | None = None,
    full_heads: jax.Array | None = None,
) -> jax.Array:
    """Attention of a few queries over a cache, the query heads of a KV head folded into rows of one tile.

    ALiBi and biases differ by head; with those, each head has its own tile.
    """
    batch, length, heads, head_dim = q.shape
    group = heads // k_cache.shape[2] if alibi_slopes is None and sigmoid_bias is None else 1
    rows = q.reshape(batch, length, heads // group, group, head_dim).swapaxes(2, 3)
    rows = rows.reshape(batch, length * group, heads // group, head_dim)
    call = make_call(rows, k_cache, spec, where, alibi_slopes, sigmoid_bias)
    repeated = {name: getattr(where, name) for name in ("q_pos", "q_order", "q_seg", "full_rows")}
    repeated = jax.tree.map(lambda x: jnp.repeat(x, group, axis=1), repeated)
    out, lse = attend(
        call, rows, k_cache, v_cache, where._replace(**repeated), alibi_slopes, sigmoid_bias, full_heads
    )

    def unfold(x):  # [B, T * G, K, ...] -> [B, T, H, ...]
        x = x.reshape(batch, length, group, heads // group, *x.shape[3:]).swapaxes(2, 3)
        return x.reshape(batch, length, heads, *x.shape[4:])

    return join_sinks(unfold(out), None if lse is None else unfold(lse), sink_logits)[0]
