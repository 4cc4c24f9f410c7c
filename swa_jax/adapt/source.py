"""What a user names as the model to adapt: a bundled one, a Hugging Face folder, or a checkpoint folder."""

from __future__ import annotations

import dataclasses
import importlib.resources
from pathlib import Path
from typing import Any

from swa_jax.checkpoint.folder import (
    COMPANIONS,
    CONFIG_FILE,
    PATTERN_FILE,
    WEIGHTS,
    open_checkpoint,
    weights_sum,
)
from swa_jax.checkpoint.safetensors_files import read_headers
from swa_jax.errors import CheckpointError, ConfigError
from swa_jax.families import hf_pattern, model_config
from swa_jax.families.pattern_files import load_pattern
from swa_jax.files import check_local, read_json, sum_of_file, sum_of_json
from swa_jax.model.config import ModelConfig
from swa_jax.model.pattern import AttentionPattern

# The bundled models, each with the settings of its routed CPT.
RECALL = importlib.resources.files("swa_jax") / "recall"
CHAINS = importlib.resources.files("swa_jax") / "chains"
BUNDLED = {"chains": CHAINS, "recall": RECALL}  # by their names on the command line


@dataclasses.dataclass(frozen=True)
class Source:
    """The model to adapt, opened but for its weights.

    Attributes:
      name: as the user gave it.
      folder: where it lies.
      is_checkpoint: whether the folder is one of this library's, so that nothing has to be imported.
      bundled: the name of the bundled model that it is; None for any other.
      pattern: its own, with which it was trained.
      weight_bytes: what its weights take on the disk.
    """

    name: str
    folder: Path
    is_checkpoint: bool
    bundled: str | None
    hf_config: dict[str, Any]
    config: ModelConfig
    pattern: AttentionPattern
    weight_bytes: int

    def content_sum(self) -> str:
        """A sum of everything that decides what the model computes; of large models this reads every byte."""
        if self.is_checkpoint:
            weights = weights_sum(self.folder)
        else:
            files = sorted(self.folder.glob("*.safetensors"))
            weights = sum_of_json({file.name: sum_of_file(file) for file in files})
        names = (CONFIG_FILE, PATTERN_FILE, *COMPANIONS)
        small = {name: sum_of_file(file) for name in names if (file := self.folder / name).is_file()}
        return sum_of_json([weights, small])


def find_source(name: str) -> Source:
    """Open what a user named, from its small files and headers alone.

    Raises:
      ConfigError: it is nothing of the kind, or a model that this library does not read; the sentence says which.
    """
    check_local(name, "model")
    folder = Path(name).expanduser()
    if name in BUNDLED and not folder.exists():
        return _hugging_face(name, Path(str(BUNDLED[name])), bundled=name)
    if not folder.is_dir():
        route = (
            f"bring it here first with: swa-jax import {name} DST"
            if name.count("/") == 1 and not name.startswith((".", "/", "~"))
            else "name a Hugging Face folder, a checkpoint folder, or a bundled model: chains or recall"
        )
        raise ConfigError(f"{name} is no folder: {route}")
    if (folder / WEIGHTS).is_dir():
        checkpoint = open_checkpoint(folder)
        size = sum(_bytes(tensor) for tensor in checkpoint.tensors.values())
        return Source(
            name, folder, True, None, checkpoint.hf_config, checkpoint.config, checkpoint.pattern, size
        )
    return _hugging_face(name, folder, bundled=None)


def _hugging_face(name: str, folder: Path, *, bundled: str | None) -> Source:
    if not (folder / CONFIG_FILE).is_file():
        raise CheckpointError(
            f"{name} holds neither {CONFIG_FILE} nor {WEIGHTS}/: it is no model of Hugging Face's format, and no "
            "checkpoint folder"
        )
    hf = read_json(folder / CONFIG_FILE)
    config = model_config(hf)
    stored = folder / PATTERN_FILE
    pattern = load_pattern(stored, config) if stored.is_file() else hf_pattern(hf)
    read_headers(folder)  # a damaged file is found now
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return Source(name, folder, False, bundled, hf, config, pattern, size)


def _bytes(tensor: tuple[Any, tuple[int, ...]]) -> int:
    dtype, shape = tensor
    size = dtype.itemsize
    for length in shape:
        size *= length
    return size
