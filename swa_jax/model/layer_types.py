"""The names of layer types. The first two are Hugging Face's."""

from __future__ import annotations

FULL, WINDOW, HYBRID, SWITCH = ("full_attention", "sliding_attention", "head_hybrid_attention", "switch_attention")
LAYER_TYPES = (FULL, WINDOW, HYBRID, SWITCH)
