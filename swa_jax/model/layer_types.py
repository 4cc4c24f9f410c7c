"""The names of layer types. Hugging Face has the first three, and the last."""

from __future__ import annotations

FULL, WINDOW, CHUNKED = ("full_attention", "sliding_attention", "chunked_attention")
HYBRID, SWITCH = ("head_hybrid_attention", "switch_attention")
LINEAR = "linear_attention"  # of a layer that has no attention; no pattern chooses it
LAYER_TYPES = (FULL, WINDOW, CHUNKED, HYBRID, SWITCH, LINEAR)
