"""Windowed, routed and sigmoid attention: one op, one oracle, one implementation per kind of device."""

from pallas_kernels.api import alibi_slopes, attention, decode_attention, routed_attention
from pallas_kernels.math.spec import AttentionSpec, segment_positions

__all__ = ["AttentionSpec", "alibi_slopes", "attention", "decode_attention", "routed_attention", "segment_positions"]
