"""One way to name a model: whatever a user calls by name becomes a checkpoint folder.

| name | the checkpoint folder |
|---|---|
| a checkpoint folder | itself |
| a folder in Hugging Face's format, or a GGUF file | imported into the user's cache |
| `owner/model`, the id of a model in Hugging Face's cache | that copy, imported likewise |
| a folder of PEFT's LoRA adapters | merged onto its base, which is named in the same way, into the cache |
| `chains`, `recall` | the bundled model, imported likewise |

What is in the cache has its name from the content that it was made of, so that it is made once, and anew when a file
changes.
"""

from __future__ import annotations

import importlib.resources
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from swa_jax.base.errors import CheckpointError
from swa_jax.base.files import cache_folder, check_local, read_json, sum_of, sum_of_file, sum_of_json
from swa_jax.base.settings import nearest
from swa_jax.checkpoint import folder
from swa_jax.checkpoint.adapter import ADAPTER_CONFIG, merge_adapter
from swa_jax.checkpoint.checked_source import VERSION
from swa_jax.checkpoint.folder import CONFIG_FILE, WEIGHTS, content_sum, open_checkpoint
from swa_jax.checkpoint.hf_import import import_model
from swa_jax.checkpoint.safetensors_files import INDEX_FILE, SINGLE_FILE
from swa_jax.checkpoint.sources import GGUF, GGUF_PART, HUB_ID, cached_snapshot
from swa_jax.data import tokenizer
from swa_jax.data.chat import NAMED_TEMPLATES
from swa_jax.data.tokenizer import Tokenizer
from swa_jax.model.config import ModelConfig
from swa_jax.model.decoder import Decoder
from swa_jax.model.pattern import AttentionPattern
from swa_jax.model.sharding import Partition
from swa_jax.model.window import Window
from swa_jax.report.progress import Progress

BUNDLED = ("chains", "recall")
NAMES = (
    "a checkpoint folder, a Hugging Face folder, a GGUF file, the id of a model in Hugging Face's cache, a PEFT "
    "adapter folder, or a bundled model: chains or recall"
)
# What decides about a model, in its folder.
_READ = ("*.json", "*.jinja", f"{NAMED_TEMPLATES}/*.jinja", "*.txt", "*.safetensors")


def load_model(
    name: str | Path,
    pattern: AttentionPattern | str | Path | None = None,
    *,
    window: int | None = None,
    sink_tokens: int | None = None,
    full_decode: bool | None = None,
    last_tokens: int | None = None,
    dtype: jax.typing.DTypeLike | None = None,
    config: ModelConfig | None = None,
    partition: Partition | None = None,
) -> Decoder:
    """The model that is named in any of the ways above.

    Args:
      pattern: an AttentionPattern, the path of a pattern JSON, or a recipe; None: the model's own.
      window: visible keys of a windowed query, its own included. None: the pattern's; a recipe takes the window of the
        model's own pattern, or 2048 if that has none.
      sink_tokens: first tokens that stay visible beside the window. None: the pattern's.
      full_decode: whether the tokens of an answer see everything. None: as the pattern says.
      last_tokens: last tokens of a prompt that see everything then, too. None: the pattern's.
      dtype: of all parameters but the routers, which are f32; None: the stored one.
      config: in place of the model's own, for changes that no weight depends on, such as YaRN.
      partition: lay the parameters out on this mesh.

    Raises as `model_folder` and `folder.load_model`.
    """
    return folder.load_model(
        model_folder(name),
        pattern,
        Window(window, sink_tokens, full_decode, last_tokens),
        dtype=dtype,
        config=config,
        partition=partition,
    )


def load_tokenizer(name: str | Path) -> Tokenizer:
    """The tokenizer of a model that is named in any of the ways above, or of a `tokenizer.json`.

    Raises `ConfigError` where there is none.
    """
    return tokenizer.load_tokenizer(tokenizer_folder(name))


def tokenizer_folder(name: str | Path) -> Path:
    """Where the tokenizer lies of what `load_tokenizer` takes: a folder, or the file itself."""
    path = Path(name).expanduser()
    return path if path.exists() and path.suffix.lower() != GGUF else model_folder(name)


def model_folder(name: str | Path, describe: Callable[[str], Any] | None = None) -> Path:
    """The checkpoint folder of a model that is named in any of the ways above.

    Args:
      describe: called with a line where something is imported, and with what a user should know of it. None: the lines
        go to standard error.

    Raises:
      CheckpointError: there is no such model, or its files are damaged, as `import_model`.
      ConfigError: a model that this library does not read.
    """
    check_local(name, "model")
    source = _find(name)
    if (source / WEIGHTS).is_dir():
        return source
    base = _base(source, describe)
    key = sum_of_json([VERSION, {file.name: _sum(file) for file in _files(source)}, base and content_sum(base)])
    made = cache_folder("models") / f"{_title(name, source)}-{key[:12]}"
    if not made.exists():
        _import(source, base, made, None, describe or (lambda line: print(line, file=sys.stderr)))
    return made


def import_named(
    name: str | Path,
    destination: Path,
    *,
    pattern: AttentionPattern | str | Path | None = None,
    describe: Callable[[str], Any],
) -> Path:
    """Make a checkpoint folder of a model that is named as for `model_folder`, or that another place holds.

    Arguments and errors are those of `import_model`.
    """
    try:
        source: str | Path = _find(name)
    except CheckpointError:
        source = name  # an address, or a model of the hub that is not in the cache
    base = _base(source, describe) if isinstance(source, Path) else None
    return _import(source, base, destination, pattern, describe)


def bundled(name: str) -> Path:
    """The folder of a bundled model, in Hugging Face's format."""
    return Path(str(importlib.resources.files("swa_jax") / name))


def _find(name: str | Path) -> Path:
    """Where a model lies on this machine."""
    path = Path(name).expanduser()
    if path.is_dir() or (path.suffix.lower() == GGUF and path.is_file()):
        return path
    if str(name) in BUNDLED:
        return bundled(str(name))
    hub = HUB_ID.fullmatch(str(name))
    if hub is None or path.exists() or str(name).startswith((".", "/", "~")):
        if path.suffix == ".safetensors" and (path.parent / CONFIG_FILE).is_file():
            raise CheckpointError(f"{name} is one file of a model: give its folder, {path.parent}")
        meant = nearest(str(name), BUNDLED, listed=False)
        raise CheckpointError(f"{name} is no model{meant or f': give {NAMES}'}")
    snapshot = cached_snapshot(hub[1], hub[2])
    if snapshot is None:
        raise CheckpointError(
            f"{name} is no folder here and not in Hugging Face's cache: bring it there with 'hf download {name}', or "
            f"here with 'swa-jax import {name} DST'"
        )
    return snapshot


def _base(source: Path, describe: Callable[[str], Any] | None) -> Path | None:
    """The checkpoint folder of the model that adapters are for; None for what is a model by itself."""
    file = source / ADAPTER_CONFIG
    if not file.is_file() or any((source / name).is_file() for name in (SINGLE_FILE, INDEX_FILE)):
        return None
    base = read_json(file).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise CheckpointError(f"{file} has no base_model_name_or_path: write there the model that it adapts")
    try:
        return model_folder(base, describe)
    except CheckpointError as error:
        raise CheckpointError(f"the base of {source} (base_model_name_or_path): {error}") from None


def _import(
    source: str | Path,
    base: Path | None,
    destination: Path,
    pattern: AttentionPattern | str | Path | None,
    describe: Callable[[str], Any],
) -> Path:
    if base is None:
        with Progress("MiB imported", at_once=False) as progress:
            return import_model(source, destination, pattern=pattern, describe=describe, progress=progress.update)
    return merge_adapter(Path(source), open_checkpoint(base), destination, pattern=pattern, describe=describe)


def _title(name: str | Path, source: Path) -> str:
    """Of a folder in the cache: what a person would call the model."""
    if HUB_ID.fullmatch(str(name)) and source != Path(name).expanduser():
        return str(name).replace("/", "--")
    part = GGUF_PART.fullmatch(source.name)
    return part[1] if part else source.resolve().name.removesuffix(GGUF)


def _files(source: Path) -> list[Path]:
    """The files that decide what a model computes."""
    if source.is_dir():
        return sorted(file for kind in _READ for file in source.glob(kind))
    part = GGUF_PART.fullmatch(source.name)
    return sorted(source.parent.glob(f"{part[1]}-*-of-{part[3]}{GGUF}")) if part else [source]


def _sum(file: Path) -> str:
    """The sum of a file's bytes, kept for as long as its size and time stay."""
    found = file.stat()
    kept = cache_folder("sums") / sum_of(repr([str(file.resolve()), found.st_size, found.st_mtime_ns]))
    if not (kept.is_file() and len(total := kept.read_text()) == 64):
        total = sum_of_file(file)
        kept.write_text(total)
    return total
