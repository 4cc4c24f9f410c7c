"""Sliding-window attention for long context in JAX: patterns, models, adaptation, selection."""

from swa_jax.config import ConfigError, ModelConfig
from swa_jax.pattern import AttentionPattern

__all__ = ["AttentionPattern", "ConfigError", "ModelConfig"]
