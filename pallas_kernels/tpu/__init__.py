"""Attention on TPUs: `attention`, `routed_attention` and `decode_attention`."""

import jax

from pallas_kernels.math.parts import join_sinks
from pallas_kernels.math.ring import Ring, RowOrder, one_part
from pallas_kernels.math.rotary import Rotation
from pallas_kernels.math.spec import AttentionSpec, Coordinates, PerHead
from pallas_kernels.tpu.calls.attend import attend_to_keys
from pallas_kernels.tpu.calls.launches import call_of, with_pairs
from pallas_kernels.tpu.calls.routed import routed_attention
from pallas_kernels.tpu.decode.decode import decode_attention
from pallas_kernels.tpu.tile.pairs import side_by_side
from pallas_kernels.tpu.tile.rotation import left_to_kernels, rotated_by_xla, rotates_queries

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
    rotation: Rotation | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns out [B, T, H, D] in q's dtype and lse [B, T, H] f32 (None for sigmoid)."""
    here, shape, (heads, head_dim) = one_part(ring, where), q.shape, q.shape[2:]
    call = call_of(q, spec, here, per_head, order)
    call = with_pairs(call, here, heads, head_dim, k.shape[2], per_head.full_heads)
    if call.abreast > 1:
        q, k, v = side_by_side(q, k, v)
    if rotation is not None and not rotates_queries(q.shape[3]):
        q, rotation = rotated_by_xla(q, rotation), None
    call, where = left_to_kernels(call, where, rotation)
    out, lse = attend_to_keys(call, q, k, v, where, per_head, ring)
    return join_sinks(out.reshape(shape), lse, per_head.sink_logits)
