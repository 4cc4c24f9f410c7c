"""What an import of a GGUF file reads and writes, after all its checks."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from swa_jax.checkpoint.companions import check_companions
from swa_jax.checkpoint.finite import check_finite
from swa_jax.checkpoint.folder import CONFIG_FILE
from swa_jax.checkpoint.gguf.header import GgufTensor, read_gguf
from swa_jax.checkpoint.gguf.hyperparameters import ARCHITECTURES, Metadata, hf_config
from swa_jax.checkpoint.gguf.rope import FACTORS, rope_keys
from swa_jax.checkpoint.gguf.tokenizer import tokenizer_files
from swa_jax.checkpoint.gguf.weights import TensorPlace, check_kinds, find_places, model_dtype, read_place, read_whole
from swa_jax.checkpoint.safetensors_files import Parts, TensorReader
from swa_jax.checkpoint.sources import ModelFile, stamp
from swa_jax.errors import CheckpointError, ConfigError
from swa_jax.families import hf_pattern, model_config
from swa_jax.families.pattern_files import load_pattern
from swa_jax.files import sum_of, sum_of_json
from swa_jax.model.pattern import AttentionPattern


@dataclasses.dataclass(frozen=True)
class GgufPlan:
    """An import after all its checks, before its first byte; `hf_import.ImportPlan` is the same for safetensors."""

    hf_config: dict[str, Any]
    pattern: AttentionPattern
    companions: dict[str, bytes]
    notes: list[str]
    places: dict[str, TensorPlace]  # by our name, in the order in which they lie in the file
    dtype: np.dtype
    identity: str  # changes with all that the result depends on

    @property
    def tensors(self) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
        """dtype and shape by our name."""
        return {name: (self.dtype, place.shape) for name, place in self.places.items()}

    def read(self, names: list[str]) -> Parts:
        """The named tensors in that order, in parts along their first axis."""
        with TensorReader() as reader:
            for name in names:
                for part in read_place(reader, self.places[name], self.dtype):
                    yield name, part

    def check(self, name: str, part: np.ndarray) -> None:
        """Raises `CheckpointError` for weights that are NaN or infinite."""
        place = self.places[name]
        check_finite(part, place.name, place.tensor.file.name)


def plan_gguf(file: ModelFile, pattern: AttentionPattern | str | Path | None, version: int) -> GgufPlan:
    """Read and check everything of a file but its weights' values; `version` is of what an import writes.

    Raises as `hf_import.import_model`.
    """
    header = read_gguf(file)
    metadata = Metadata(header, file)
    check_kinds(header.tensors)
    if "token_embd.weight" not in header.tensors or len(header.tensors["token_embd.weight"].shape) != 2:
        raise CheckpointError(f"{file} holds no embedding (token_embd.weight): it is not a whole language model")

    def factors(name: str) -> np.ndarray:
        with TensorReader() as reader:
            return read_whole(reader, header.tensors[name])

    hf = hf_config(metadata, header.tensors["token_embd.weight"])
    hf |= rope_keys(metadata, hf, factors)
    tensors = {
        name: tensor
        for name, tensor in header.tensors.items()
        if name not in FACTORS.values() and not metadata.is_left_out(name)
    }
    dtype = model_dtype(tensors)
    files, tokens = tokenizer_files(metadata)
    hf |= {"dtype": dtype.name, **tokens}
    try:
        config, own = model_config(hf), hf_pattern(hf)
    except ConfigError as error:
        raise ConfigError(f"{file}, as a Hugging Face {error}") from None
    chosen = load_pattern(own if pattern is None else pattern, config, default_window=own.sliding_window)
    places = find_places(config, tensors, ARCHITECTURES[metadata.architecture].permuted, file)
    described = {**files, CONFIG_FILE: json.dumps(hf).encode()}
    notes = _notes(file, tensors, dtype) + check_companions(Path(str(file)), described, config.vocab_size)
    identity = {
        "version": version,
        "config": hf,
        "pattern": chosen.to_json(),
        "companions": {name: sum_of(data) for name, data in files.items()},
        "tensors": {name: [t.file.name, t.kind.name, t.shape, t.start] for name, t in tensors.items()},
        "files": {str(part): stamp(part) for part in {tensor.file for tensor in tensors.values()}},
    }
    return GgufPlan(hf, chosen, files, notes, places, dtype, sum_of_json(identity))


def _notes(file: ModelFile, tensors: dict[str, GgufTensor], dtype: np.dtype) -> list[str]:
    kinds = sorted({tensor.kind.name for tensor in tensors.values() if len(tensor.shape) > 1})
    return [f"{file.name}: weights of type {', '.join(kinds)} become {dtype.name}"]
