"""The decoder: its configuration and pattern, layers, attention, caches, generation, and how it lies on a mesh."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swa_jax.base.exports import lazy

if TYPE_CHECKING:
    from swa_jax.model.config import ModelConfig, RopeScaling
    from swa_jax.model.decoder import Decoder
    from swa_jax.model.engine import Engine
    from swa_jax.model.lora import LoraConfig
    from swa_jax.model.pattern import AttentionPattern

__all__ = ["AttentionPattern", "Decoder", "Engine", "LoraConfig", "ModelConfig", "RopeScaling"]

__getattr__ = lazy(
    __name__,
    {
        "AttentionPattern": "pattern",
        "Decoder": "decoder",
        "Engine": "engine",
        "ModelConfig": "config",
        "RopeScaling": "config",
        "LoraConfig": "lora",
    },
)
