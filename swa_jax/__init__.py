"""Sliding-window attention for long context in JAX: patterns, models, adaptation, selection."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from swa_jax.config import ConfigError, ModelConfig
from swa_jax.pattern import AttentionPattern

if TYPE_CHECKING:
    from swa_jax.checkpoint import load_model
    from swa_jax.generation import generate

__all__ = ["AttentionPattern", "ConfigError", "ModelConfig", "generate", "load_model"]


def __getattr__(name: str) -> Any:
    # These bring JAX, the model and Orbax with them: only when asked for.
    if name == "load_model":
        from swa_jax.checkpoint import load_model

        return load_model
    if name == "generate":
        from swa_jax.generation import generate

        return generate
    if name in ("evaluate", "select"):
        return importlib.import_module(f"swa_jax.{name}")
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
