"""What an import has read and checked of a source before it writes the first byte."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from swa_jax.base.files import sum_of, sum_of_json
from swa_jax.checkpoint.finite import check_finite
from swa_jax.checkpoint.safetensors_files import Parts, TensorTable
from swa_jax.checkpoint.sources import ModelFile, stamp
from swa_jax.model.pattern import AttentionPattern

VERSION = 1  # of what an import writes: an interrupted import of another version is not continued


@dataclasses.dataclass(frozen=True)
class CheckedSource:
    """A folder of safetensors or a GGUF file, and what its import writes."""

    hf_config: dict[str, Any]
    pattern: AttentionPattern
    companions: dict[str, bytes]
    notes: list[str]  # what a user should know of the model, in sentences
    tensors: TensorTable  # by our name, in the order in which they lie in the source
    origins: dict[str, tuple[str, str]]  # by our name: that of the tensor in the source, and its file's
    read: Callable[[list[str]], Parts]  # the named tensors in that order, in parts along their first axis
    identity: str  # changes with all that the result depends on

    def check(self, name: str, part: np.ndarray) -> None:
        """Raises `CheckpointError` for weights that are NaN or infinite."""
        check_finite(part, *self.origins[name])


def import_identity(
    hf_config: dict[str, Any],
    pattern: AttentionPattern,
    companions: Mapping[str, bytes],
    tensors: Mapping[str, tuple[ModelFile, str, tuple[int, ...], int]],
) -> str:
    """A sum of all that an import depends on; `tensors`: file, dtype, shape and first byte by name in the source."""
    identity = {
        "version": VERSION,
        "config": hf_config,
        "pattern": pattern.to_json(),
        "companions": {name: sum_of(data) for name, data in companions.items()},
        "tensors": {name: [file.name, *rest] for name, (file, *rest) in tensors.items()},
        "files": {str(file): stamp(file) for file in {file for file, *_ in tensors.values()}},
    }
    return sum_of_json(identity)
