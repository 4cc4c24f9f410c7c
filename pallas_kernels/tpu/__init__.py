"""Attention on TPUs: `attention`, `routed_attention` and `decode_attention`."""

import jax

from pallas_kernels.parts import join_sinks
from pallas_kernels.spec import AttentionSpec, Coordinates
from pallas_kernels.tpu.attend import attend
from pallas_kernels.tpu.decode import decode_attention
from pallas_kernels.tpu.passes import make_call
from pallas_kernels.tpu.routed import routed_attention

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
