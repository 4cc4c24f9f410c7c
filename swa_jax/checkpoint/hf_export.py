"""Export: a checkpoint folder becomes a Hugging Face folder."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from swa_jax.base.files import check_destination, new_folder, write_json
from swa_jax.checkpoint.canary import write_canary
from swa_jax.checkpoint.families import apply_pattern, family_of, model_config
from swa_jax.checkpoint.folder import (
    CONFIG_FILE,
    PATTERN_FILE,
    Checkpoint,
    open_checkpoint,
    read_companions,
    write_companions,
)
from swa_jax.checkpoint.gguf.export import write_gguf
from swa_jax.checkpoint.gguf.graphs import FILE
from swa_jax.checkpoint.gguf.vocabulary import tokenizer_keys
from swa_jax.checkpoint.safetensors_files import Parts, TensorTable, write_model
from swa_jax.checkpoint.served_cache import Memory
from swa_jax.checkpoint.servers import SERVERS, served_config
from swa_jax.checkpoint.tensor_names import constants_of, hf_tensors, join_tensors, joined_parts
from swa_jax.model.config import ModelConfig
from swa_jax.model.parameters import EMBEDDING
from swa_jax.model.pattern import AttentionPattern

SHARD_BYTES = 5_000_000_000
log = logging.getLogger(__name__)


def export_model(
    checkpoint: str | Path,
    destination: str | Path,
    *,
    pattern: AttentionPattern | None = None,
    server: str | None = None,
    as_full: bool = False,
    serve_length: int | None = None,
    batched_tokens: int | None = None,
    device: str | None = None,
    canary: bool = True,
    describe: Callable[[str], Any] = lambda text: None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Path:
    """Write a checkpoint folder as a Hugging Face folder; importing that again gives the same bits.

    Args:
      destination: a folder that does not exist yet, or is empty; returned.
      pattern: in place of the folder's own; it is always in `pattern.json`, which `import_model` reads.
      server: for whom `config.json` says what the pattern says, one of `servers.TARGETS`. None: for whoever reads
        Hugging Face's keys; a pattern that these cannot express becomes full attention in every layer, with a logged
        notice.
      as_full: write full attention in every layer where the server cannot run the pattern.
      serve_length, batched_tokens, device: how the server is started, as in `Memory`. None: the model's context, and
        what suits it.
      canary: also write `canary.json` and `check_server.py`, by which a server's answers tell what it computes
        (`swa_jax.checkpoint.canary`). This loads the model in f32; one that is too large for it has none.
      describe: called with what a user should know, once the export is whole.
      progress: called with (passes done, passes in all) of the canary.

    Raises:
      CheckpointError: the checkpoint is damaged or is none, or the destination is in use.
      ConfigError: the server cannot run the pattern.
    """
    destination = check_destination(destination)
    source = open_checkpoint(checkpoint)
    if pattern is not None:
        pattern.validate(source.config)
        source = dataclasses.replace(source, pattern=pattern)
    source.config.refuse_linear("export")
    counted, notes, longest, served = "", list[str](), None, None
    if server is None:
        hf, notice = apply_pattern(source.hf_config, source.pattern)
        pattern = source.pattern
        written = model_config(hf)  # the same model, of the family that can say the pattern
    else:
        longest = serve_length or source.config.max_position_embeddings
        memory = Memory(source.config, source.hf_config, longest, server, batched_tokens, device)
        served = served_config(server, source.hf_config, source.pattern, as_full=as_full)
        counted, notes = memory.describe(served.pattern), memory.notes(served, destination)
        hf, notice, pattern = served.hf, None, served.pattern
        written = dataclasses.replace(source.config, model_type=served.model_type)
    if not hf.get("architectures"):  # by which servers choose their class; a GGUF file has none
        hf = {**hf, "architectures": [family_of(written).architecture]}
    companions = read_companions(source.folder)
    described = None if served is None else served.file
    keys = {} if described is None else tokenizer_keys(companions, source.folder, source.config.vocab_size)
    with new_folder(destination) as folder:
        source.pattern.to_json(folder / PATTERN_FILE)
        if described is not None:
            write_gguf(folder / FILE, described, source, keys)
        else:
            tensors, read = _exported(source, written)
            write_json(folder / CONFIG_FILE, hf)
            write_model(folder, tensors, read, shard_bytes=SHARD_BYTES)
            write_companions(folder, companions)
        if canary:
            write = functools.partial(write_canary, folder, source.folder, pattern, hf)
            notes.append(write(longest=longest, counted=counted, progress=progress))
    if notice:
        log.warning("%s: %s", destination, notice)
    for note in notes:
        describe(note)
    return destination


def check_tokenizer(server: str, folder: Path, vocab_size: int) -> None:
    """Raise `ConfigError` where a server's own file cannot hold the tokenizer of a checkpoint folder."""
    if server in SERVERS and SERVERS[server].describes is not None:
        tokenizer_keys(read_companions(folder), folder, vocab_size)


def _exported(source: Checkpoint, written: ModelConfig) -> tuple[TensorTable, Callable[[list[str]], Parts]]:
    """The tensors of an export, and what reads them from our folder."""
    joined, constants = joined_parts(written), constants_of(written)

    def dtype(name: str) -> np.dtype:
        own = joined[name][0].name if name in joined else EMBEDDING if name in constants else name
        return source.tensors[own][0]

    tensors = {name: (dtype(name), shape) for name, shape in hf_tensors(written, routers=source.has_routers).items()}
    numbers = {name: np.asarray(value, dtype(name)) for name, value in constants.items()}
    return tensors, lambda names: join_tensors(names, joined, source.read, numbers)
