"""Sliding-window attention for long context in JAX: patterns, models, adaptation, selection."""

from __future__ import annotations

import glob
import importlib.util
import os
import sys
from typing import TYPE_CHECKING

from swa_jax.base.exports import lazy

if TYPE_CHECKING:
    from swa_jax.base.errors import ConfigError
    from swa_jax.checkpoint.named import load_model, load_tokenizer
    from swa_jax.model.config import ModelConfig
    from swa_jax.model.generate import generate
    from swa_jax.model.pattern import AttentionPattern

__version__ = "0.1.0"
__all__ = ["AttentionPattern", "ConfigError", "ModelConfig", "generate", "load_model", "load_tokenizer"]

_HOMES = {
    "AttentionPattern": "model.pattern",
    "ConfigError": "base.errors",
    "ModelConfig": "model.config",
    "generate": "model.generate",
    "load_model": "checkpoint.named",
    "load_tokenizer": "checkpoint.named",
    **dict.fromkeys(("checkpoint", "evaluate", "model", "select", "train"), ""),
}
__getattr__ = lazy(__name__, _HOMES)

_ACCELERATORS = ("/dev/accel*", "/dev/vfio/[0-9]*", "/dev/nvidia[0-9]*", "/dev/kfd", "/dev/dxg")  # as Linux shows them


def _compile_only() -> None:
    """With libtpu installed to compile, and no accelerator, JAX looks for none: it would print many errors."""
    if "JAX_PLATFORMS" in os.environ or not importlib.util.find_spec("libtpu") or any(map(glob.glob, _ACCELERATORS)):
        return
    os.environ["JAX_PLATFORMS"] = "cpu"
    if "jax" in sys.modules and sys.modules["jax"].config.jax_platforms is None:
        sys.modules["jax"].config.update("jax_platforms", "cpu")


_compile_only()
