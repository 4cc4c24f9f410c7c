"""Training: the loop, its configuration, optimizers, objectives, checkpoints of runs, and processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swa_jax.base.exports import lazy

if TYPE_CHECKING:
    from swa_jax.train.config import StageConfig, TrainConfig
    from swa_jax.train.loop import train

__all__ = ["StageConfig", "TrainConfig", "train"]

__getattr__ = lazy(__name__, {"TrainConfig": "config", "StageConfig": "config", "train": "loop"})
