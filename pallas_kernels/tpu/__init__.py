"""Attention on TPUs: `attention`, `routed_attention` and `decode_attention`."""

import jax

from pallas_kernels.parts import join_sinks
from pallas_kernels.ring import Ring, RowOrder, one_part
from pallas_kernels.spec import AttentionSpec, Coordinates, PerHead
from pallas_kernels.tpu.attend import attend
from pallas_kernels.tpu.decode import decode_attention
from pallas_kernels.tpu.passes import call_of
from pallas_kernels.tpu.routed import routed_attention

__all__ = ["attention", "decode_attention", "routed_attention"]


def attention(
    q: jax.Array,  # [B, T, H, D]
    k: jax.Array,  # [B, S, K, D]
    v: jax.Array,  # [B, S, K, D]
    spec: AttentionSpec,
    where: Coordinates,
    per_head: PerHead,
    ring: Ring | None = None,
    order: RowOrder | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns out [B, T, H, D] in q's dtype and lse [B, T, H] f32 (None for sigmoid)."""
    call = call_of(q, spec, one_part(ring, where), per_head, order)
    out, lse = attend(call, q, k, v, where, per_head, ring)
    return join_sinks(out, lse, per_head.sink_logits)
