"""Patterns by the letters of their layers, and a text."""

from pathlib import Path

from swa_jax.model.layer_types import FULL, HYBRID, WINDOW
from swa_jax.model.pattern import AttentionPattern

LICENSE = Path(__file__).parents[3] / "LICENSE"  # a text
KINDS = {"F": FULL, "w": WINDOW, "h": HYBRID}
SINKS, DECODE = {"num_sink_tokens": 3}, {"full_attention_decode": True}


def types_of(letters: str, layers: int) -> tuple[str, ...]:
    """The letters again and again, until every layer has one."""
    return tuple(KINDS[letter] for letter in (letters * layers)[:layers])


def made_pattern(letters: str, options: dict, layers: int, window: int) -> AttentionPattern:
    """With one full KV head in each layer `h`: by turns 0 and 1."""
    types = types_of(letters, layers)
    heads = tuple((layer // 2 % 2,) if kind == HYBRID else () for layer, kind in enumerate(types))
    return AttentionPattern(types, window if {*types} != {FULL} else None, full_kv_heads=heads, **options)
