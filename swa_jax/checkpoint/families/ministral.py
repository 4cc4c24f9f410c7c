"""Ministral: Mistral with `layer_types`, so that some layers may be full."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swa_jax.checkpoint.families.common import Family, Windows, layer_types, write_dense
from swa_jax.checkpoint.families.mistral import DEFAULT_WINDOW, from_hf
from swa_jax.checkpoint.families.rope import window_always
from swa_jax.model.layer_types import FULL, WINDOW


def read_windows(hf: Mapping[str, Any], layers: int) -> Windows:
    window = hf.get("sliding_window", DEFAULT_WINDOW)
    return window, layer_types(hf, [FULL if window is None else WINDOW] * layers)


FAMILY = Family("ministral", "MinistralForCausalLM", from_hf, write_dense, read_windows, window_always)
