"""Patterns by the letters of their layers, and a text."""

from pathlib import Path

from layer_letters import types_of

from swa_jax.model.layer_types import FULL, HYBRID
from swa_jax.model.pattern import AttentionPattern

LICENSE = Path(__file__).parents[3] / "LICENSE"  # a text
SINKS, DECODE = {"num_sink_tokens": 3}, {"full_attention_decode": True}


def made_pattern(letters: str, options: dict, layers: int, window: int) -> AttentionPattern:
    """With one full KV head in each layer `h`: by turns 0 and 1."""
    types = types_of(letters, layers)
    heads = tuple((layer // 2 % 2,) if kind == HYBRID else () for layer, kind in enumerate(types))
    return AttentionPattern(types, window if {*types} != {FULL} else None, full_kv_heads=heads, **options)
