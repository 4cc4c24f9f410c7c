"""The names of layer types. The first three are Hugging Face's."""

from __future__ import annotations

FULL, WINDOW, CHUNKED = ("full_attention", "sliding_attention", "chunked_attention")
HYBRID, SWITCH = ("head_hybrid_attention", "switch_attention")
LAYER_TYPES = (FULL, WINDOW, CHUNKED, HYBRID, SWITCH)
