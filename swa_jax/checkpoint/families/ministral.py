"""Ministral: Mistral with `layer_types`, so that some layers may be full."""

from __future__ import annotations

from swa_jax.checkpoint.families.common import Family, write_dense
from swa_jax.checkpoint.families.mistral import DEFAULT_WINDOW, from_hf
from swa_jax.checkpoint.families.windows import window_always, windows_alike

FAMILY = Family(
    "ministral",
    "MinistralForCausalLM",
    from_hf,
    write_dense,
    windows_alike(DEFAULT_WINDOW, by_type=True),
    window_always,
)
