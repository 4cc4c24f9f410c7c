"""Sliding-window attention for long context in JAX: patterns, models, adaptation, selection."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swa_jax.exports import install_old_paths, lazy

if TYPE_CHECKING:
    from swa_jax.checkpoint.named import load_model
    from swa_jax.errors import ConfigError
    from swa_jax.model.config import ModelConfig
    from swa_jax.model.generate import generate
    from swa_jax.model.pattern import AttentionPattern

__all__ = ["AttentionPattern", "ConfigError", "ModelConfig", "generate", "load_model"]

install_old_paths()
_HOMES = {
    "AttentionPattern": "model.pattern",
    "ConfigError": "errors",
    "ModelConfig": "model.config",
    "generate": "model.generate",
    "evaluate": "",
    "load_model": "checkpoint.named",
    "select": "",
}
__getattr__ = lazy(__name__, _HOMES)
