"""A GGUF file, read and checked for an import."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from swa_jax.base.errors import CheckpointError, ConfigError
from swa_jax.checkpoint.checked_source import CheckedSource, import_identity
from swa_jax.checkpoint.companions import check_companions
from swa_jax.checkpoint.families import hf_pattern, model_config
from swa_jax.checkpoint.families.pattern_files import load_pattern
from swa_jax.checkpoint.folder import CONFIG_FILE
from swa_jax.checkpoint.gguf.header import read_gguf
from swa_jax.checkpoint.gguf.hyperparameters import ARCHITECTURES, Metadata, hf_config
from swa_jax.checkpoint.gguf.rope import FACTORS, rope_keys
from swa_jax.checkpoint.gguf.tokenizer import tokenizer_files
from swa_jax.checkpoint.gguf.weights import check_kinds, find_places, model_dtype, read_place, read_whole
from swa_jax.checkpoint.safetensors_files import Parts, TensorReader
from swa_jax.checkpoint.sources import ModelFile
from swa_jax.model.pattern import AttentionPattern


def check_gguf(file: ModelFile, pattern: AttentionPattern | str | Path | None) -> CheckedSource:
    """Read and check everything of a file but its weights' values.

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
    kinds = sorted({tensor.kind.name for tensor in tensors.values() if len(tensor.shape) > 1})
    notes = [f"{file.name}: weights of type {', '.join(kinds)} become {dtype.name}"]
    notes += check_companions(Path(str(file)), described, config.vocab_size)

    def read(names: list[str]) -> Parts:
        with TensorReader() as reader:
            for name in names:
                yield from ((name, part) for part in read_place(reader, places[name], dtype))

    return CheckedSource(
        hf,
        chosen,
        files,
        notes,
        {name: (dtype, place.shape) for name, place in places.items()},
        {name: (place.name, place.tensor.file.name) for name, place in places.items()},
        read,
        import_identity(hf, chosen, files, {name: (t.file, t.kind.name, *t[2:]) for name, t in tensors.items()}),
    )
