"""The model to adapt, opened but for its weights."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from swa_jax.checkpoint.folder import open_checkpoint
from swa_jax.checkpoint.named import BUNDLED, model_folder
from swa_jax.model.config import ModelConfig
from swa_jax.model.pattern import AttentionPattern


@dataclasses.dataclass(frozen=True)
class OriginalModel:
    """The model to adapt.

    Attributes:
      name: as the user gave it.
      folder: its checkpoint folder.
      bundled: the name of the bundled model that it is; None for any other.
      pattern: its own, with which it was trained.
      weight_bytes: what its weights take on the disk.
    """

    name: str
    folder: Path
    bundled: str | None
    hf_config: dict[str, Any]
    config: ModelConfig
    pattern: AttentionPattern
    weight_bytes: int


def find_source(name: str) -> OriginalModel:
    """Open what a user named in any of the ways of `checkpoint.named`, whose errors it has."""
    checkpoint = open_checkpoint(model_folder(name))
    size = sum(file.stat().st_size for file in checkpoint.folder.glob("weights/*"))
    bundled = name if name in BUNDLED and not Path(name).exists() else None
    return OriginalModel(
        name, checkpoint.folder, bundled, checkpoint.hf_config, checkpoint.config, checkpoint.pattern, size
    )
