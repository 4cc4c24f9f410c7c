"""The checkpoint folder: `config.json`, `pattern.json`, `weights/`, `manifest.json` and the tokenizer's files.

`config.json` says what the weights are, `pattern.json` how they attend; export joins the two. `weights/` is an
Orbax checkpoint, a flat dict with one leaf for each Hugging Face tensor; layers and experts are stacked when a model is
loaded. Orbax takes time quadratic in the number of leaves, so a model of many tensors has several: `weights-2/` and on.
A folder is written beside its destination and renamed into place, so it is there whole or not at all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from orbax.checkpoint import v1 as ocp

from swa_jax.checkpoint.tensor_names import TensorName, expected_tensors, is_router, tensor_names
from swa_jax.errors import CheckpointError, ConfigError
from swa_jax.families import hf_config as make_hf_config
from swa_jax.families import model_config
from swa_jax.families.pattern_files import load_pattern
from swa_jax.files import (
    check_destination,
    check_local,
    new_folder,
    partial_folder,
    read_json,
    sum_of_file,
    sum_of_json,
    write_json,
)
from swa_jax.model.attention import Router
from swa_jax.model.config import ModelConfig
from swa_jax.model.decoder import Decoder
from swa_jax.model.layer_types import SWITCH
from swa_jax.model.pattern import AttentionPattern
from swa_jax.model.sharding import Partition, state_shardings

CONFIG_FILE, PATTERN_FILE, MANIFEST_FILE, WEIGHTS = "config.json", "pattern.json", "manifest.json", "weights"
COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
)
PART_LEAVES = 256  # of one Orbax checkpoint: finalizing 200, 400, 800, 1600 takes 0.1, 0.3, 2.7, 13 s
BATCH_BYTES = 64 * 2**20  # small tensors go to and from the disk together, up to this much
ROUTER_SEED = 0  # of the routers that a pattern asks for and the checkpoint does not have


# ---- models ----


def save_model(
    model: Decoder,
    destination: str | Path,
    *,
    hf_config: Mapping[str, Any] | None = None,
    tokenizer_from: str | Path | None = None,
) -> Path:
    """Write a model as a checkpoint folder. With several processes all call it; process 0 writes.

    Args:
      destination: a folder that does not exist yet, or is empty.
      hf_config: the `config.json` to keep, such as that of the model this one was trained from; it must describe
        `model.config`. None: written from `model.config`.
      tokenizer_from: a folder whose tokenizer files are copied.

    Raises `ConfigError` if `hf_config` describes another model or the model has LoRA adapters, `CheckpointError` if the
    destination is in use.
    """
    if model.lora is not None:
        raise ConfigError(
            "a checkpoint has no place for LoRA adapters: save merge_lora(model), and the adapters with save_adapter"
        )
    destination = check_destination(destination)
    dtype = model.embedding[...].dtype.name
    if hf_config is None:
        hf = make_hf_config(model.config, dtype=dtype)
    else:
        hf = {key: value for key, value in hf_config.items() if key != "torch_dtype"} | {"dtype": dtype}
        _check_same_model(model_config(hf), model.config)
    routers = hasattr(model.layers.attention, "router")
    table = tensor_names(model_config(hf), routers=routers)  # the names of the family that is written
    companions = None if tokenizer_from is None else Path(tokenizer_from)
    write_checkpoint(destination, hf, model.pattern, _unstack(model, table), companions=companions)
    return destination


def load_model(
    path: str | Path,
    pattern: AttentionPattern | str | Path | None = None,
    *,
    dtype: jax.typing.DTypeLike | None = None,
    config: ModelConfig | None = None,
    partition: Partition | None = None,
    router_seed: int = ROUTER_SEED,
) -> Decoder:
    """Read a checkpoint folder.

    Args:
      path: a folder written by `swa-jax import`, `save_model` or training.
      pattern: an AttentionPattern, the path of a pattern JSON, or a recipe, which takes the window of the folder's own
        pattern, or 2048 if that has none; None: the folder's own. Routers that it asks for and the checkpoint lacks
        are drawn from `router_seed`.
      dtype: of all parameters but the routers, which are f32; None: the stored one (the widest, if several are stored).
      config: in place of the folder's own, for changes that no weight depends on, such as YaRN.
      partition: lay the parameters out on this mesh; the host holds one of them at a time.

    Raises:
      CheckpointError: not a checkpoint folder, or a damaged one; the sentence names the file.
      ConfigError: a pattern that does not fit the model.
    """
    source = open_checkpoint(path)
    config = config or source.config
    own = source.pattern
    chosen = own if pattern is None else load_pattern(pattern, config, default_window=own.sliding_window)
    routed = SWITCH in chosen.layer_types
    kind = source.dtype if dtype is None else jnp.dtype(dtype)
    skeleton = nnx.eval_shape(lambda: Decoder(config, chosen, dtype=kind, rngs=nnx.Rngs(0)))
    graph, wanted = nnx.split(skeleton)
    table = tensor_names(config, routers=routed and source.has_routers)
    places: dict[tuple[str, ...], jax.sharding.Sharding] = {}
    if partition is not None:
        shardings = nnx.to_flat_state(state_shardings(wanted, partition, config))
        places = {_names(path): sharding.get_value() for path, sharding in shardings}
    dtypes = {_names(path): variable.dtype for path, variable in nnx.to_flat_state(wanted)}
    shapes = {_names(path): variable.shape for path, variable in nnx.to_flat_state(wanted)}
    arrays = dict(_stack(source, table, shapes, dtypes, places))
    if routed and not source.has_routers:
        routers = fresh_routers(config, router_seed)
        arrays |= {path: jax.device_put(router, places.get(path)) for path, router in routers.items()}
    state = {path: variable.replace(arrays[_names(path)]) for path, variable in nnx.to_flat_state(wanted)}
    return nnx.merge(graph, nnx.from_flat_state(state))


def fresh_routers(config: ModelConfig, seed: int = ROUTER_SEED) -> dict[tuple[str, ...], jax.Array]:
    """Stacked router parameters, f32, by their path in the decoder."""

    @nnx.split_rngs(splits=config.num_hidden_layers)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def stack(rngs: nnx.Rngs) -> Router:
        return Router(config, rngs)

    flat = nnx.to_flat_state(nnx.state(stack(nnx.Rngs(seed))))
    return {("layers", "attention", "router", *_names(path)): variable[...] for path, variable in flat}


def _names(path: tuple[Any, ...]) -> tuple[str, ...]:
    return tuple(map(str, path))


def _check_same_model(described: ModelConfig, actual: ModelConfig) -> None:
    for field in dataclasses.fields(ModelConfig):
        theirs, ours = getattr(described, field.name), getattr(actual, field.name)
        if theirs != ours:
            raise ConfigError(
                f"hf_config describes another model: {field.name} is {theirs!r} there, {ours!r} in the model"
            )


def _unstack(model: Decoder, table: list[TensorName]) -> Iterator[tuple[str, np.ndarray]]:
    parameters = dict(nnx.to_flat_state(nnx.state(model)))
    for tensor in table:
        stacked = parameters[tensor.path][...]
        array = fetch(stacked[tensor.place] if tensor.place else stacked)
        yield tensor.name, np.ascontiguousarray(array.T if tensor.transposed else array)


def fetch(x: jax.Array) -> np.ndarray:
    """The whole array on this host, also when other processes hold parts of it (all of them must then call this)."""
    if not x.is_fully_addressable:
        assert isinstance(x.sharding, jax.sharding.NamedSharding)
        x = jax.device_put(x, jax.sharding.NamedSharding(x.sharding.mesh, jax.sharding.PartitionSpec()))
    return np.asarray(x)


def _stack(
    source: Checkpoint,
    table: list[TensorName],
    shapes: Mapping[tuple[str, ...], tuple[int, ...]],
    dtypes: Mapping[tuple[str, ...], np.dtype],
    places: Mapping[tuple[str, ...], jax.sharding.Sharding],
) -> Iterator[tuple[tuple[str, ...], jax.Array]]:
    """(path, parameter) for each parameter of the decoder; the host holds one of them at a time."""
    for path, group in itertools.groupby(table, lambda tensor: tensor.path):
        tensors = {tensor.name: tensor for tensor in group}
        buffer = np.empty(shapes[path], dtypes[path])
        for name, array in source.read(list(tensors)):
            buffer[tensors[name].place] = array.T if tensors[name].transposed else array
        yield path, jax.device_put(buffer, places.get(path))


# ---- folders ----


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint folder: everything but the weights, which `read` fetches."""

    folder: Path
    hf_config: dict[str, Any]
    config: ModelConfig
    pattern: AttentionPattern
    tensors: dict[str, tuple[np.dtype, tuple[int, ...]]]  # dtype and shape by Hugging Face's name
    parts: dict[str, Path]  # the Orbax checkpoint that holds each

    @functools.cached_property
    def has_routers(self) -> bool:
        return any(map(is_router, self.tensors))

    @property
    def dtype(self) -> np.dtype:
        """The dtype of all tensors but the routers', or the widest needed to hold them."""
        dtypes = {dtype for name, (dtype, _) in self.tensors.items() if not is_router(name)}
        return np.dtype(jnp.result_type(*dtypes))

    def read(self, names: list[str]) -> Iterator[tuple[str, np.ndarray]]:
        """(name, array) in the order of `names`, with at most `BATCH_BYTES` or one tensor in memory."""
        batch: list[str] = []
        size = 0
        for name in names:
            dtype, shape = self.tensors[name]
            nbytes = dtype.itemsize * int(np.prod(shape))
            if batch and (size + nbytes > BATCH_BYTES or self.parts[name] != self.parts[batch[0]]):
                yield from self._read_batch(batch)
                batch, size = [], 0
            batch.append(name)
            size += nbytes
        if batch:
            yield from self._read_batch(batch)

    def _read_batch(self, names: list[str]) -> Iterator[tuple[str, np.ndarray]]:
        part = self.parts[names[0]]
        abstract: dict[str, Any] = {
            name: ocp.PLACEHOLDER for name, where in self.parts.items() if where == part
        }
        for name in names:
            dtype, shape = self.tensors[name]
            abstract[name] = np.broadcast_to(np.zeros((), dtype), shape)  # a description: no memory behind it
        arrays = ocp.load(part, abstract)
        for name in names:
            yield name, arrays.pop(name)


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a checkpoint folder after comparing its weights' files with their SHA-256 sums.

    Raises `CheckpointError` naming the file that is missing or damaged, `ConfigError` for a damaged configuration.
    """
    check_local(path, "checkpoint folder")
    folder = Path(path).expanduser().resolve()
    if not folder.is_dir():
        raise CheckpointError(f"checkpoint folder {path} does not exist")
    if not (folder / WEIGHTS).is_dir():
        if (folder / CONFIG_FILE).is_file():
            raise CheckpointError(
                f"{path} is a Hugging Face folder, not a checkpoint; turn it into one with: swa-jax import {path} DST"
            )
        raise CheckpointError(f"{path} is not a checkpoint folder: it holds no {WEIGHTS}/")
    hf = _read_json(folder / CONFIG_FILE)
    config = model_config(hf)
    pattern = AttentionPattern.from_json(folder / PATTERN_FILE)
    pattern.validate(config)
    _verify(folder)
    stored = {part: ocp.metadata(part).metadata for part in _parts(folder)}
    parts = {name: part for part, leaves in stored.items() for name in leaves}
    tensors = {
        name: (np.dtype(leaf.dtype), tuple(leaf.shape))
        for leaves in stored.values()
        for name, leaf in leaves.items()
    }
    expected = expected_tensors(config, routers=any(map(is_router, tensors)))
    if {name: shape for name, (_, shape) in tensors.items()} != expected:
        raise CheckpointError(f"the tensors in {folder / WEIGHTS} are not those that {CONFIG_FILE} asks for")
    return Checkpoint(folder, hf, config, pattern, tensors, parts)


def _parts(folder: Path) -> list[Path]:
    """The Orbax checkpoints of a folder, in order."""
    others = {int(part.name.removeprefix(f"{WEIGHTS}-")): part for part in folder.glob(f"{WEIGHTS}-[0-9]*")}
    return [folder / WEIGHTS, *(others[number] for number in sorted(others))]


def write_checkpoint(
    destination: Path,
    hf_config: Mapping[str, Any],
    pattern: AttentionPattern,
    tensors: Iterable[tuple[str, np.ndarray]],
    *,
    companions: Path | None = None,
) -> None:
    """Write a checkpoint folder from a stream of (Hugging Face name, array); `companions`: copy tokenizer files from.

    Orbax's partial save writes each leaf once, so no more than `BATCH_BYTES` and one tensor are in memory. With several
    processes all call this with the same whole tensors, because Orbax waits for all; process 0 writes.
    """
    context = ocp.Context()
    context.memory.deepcopy_host_arrays = False  # nothing changes our arrays while Orbax writes them
    context.array.saving.use_compression = False  # weights hardly compress
    first = jax.process_index() == 0
    made = new_folder(destination) if first else contextlib.nullcontext(partial_folder(destination))
    with made as folder, context:
        stream = iter(tensors)
        for number in itertools.count(1):
            part = folder / (WEIGHTS if number == 1 else f"{WEIGHTS}-{number}")
            if not _write_part(part, itertools.islice(stream, PART_LEAVES)):
                break
        if not first:
            return
        write_json(folder / CONFIG_FILE, hf_config)
        pattern.to_json(folder / PATTERN_FILE)
        write_json(folder / MANIFEST_FILE, {"sha256": _sums(folder)})
        if companions is not None:
            copy_companions(companions, folder)


def _write_part(part: Path, tensors: Iterable[tuple[str, np.ndarray]]) -> bool:
    """Write one of the Orbax checkpoints of a folder; False if there was nothing to write."""
    batch: dict[str, np.ndarray] = {}
    written = False
    for name, array in tensors:
        batch[name] = array
        if sum(a.nbytes for a in batch.values()) >= BATCH_BYTES:
            ocp.partial.save(part, batch)
            batch.clear()
            written = True
    if batch:
        ocp.partial.save(part, batch)
        written = True
    if written:
        ocp.partial.finalize(part)
    return written


def copy_companions(source: Path, folder: Path) -> None:
    for name in COMPANIONS:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return read_json(file, CheckpointError)
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing: the checkpoint is not complete") from None


def _sums(folder: Path) -> dict[str, str]:
    """SHA-256 of every file of the weights, by its path in the folder."""
    files = sorted(file for part in _parts(folder) for file in part.rglob("*") if file.is_file())
    return {file.relative_to(folder).as_posix(): sum_of_file(file) for file in files}


def weights_sum(path: str | Path) -> str:
    """One SHA-256 for a checkpoint folder's weights: of the sums of their files that its manifest has.

    Raises `CheckpointError` where there is no manifest. That the files have these sums is for `open_checkpoint` to see.
    """
    sums = _manifest(Path(path).expanduser())
    return sum_of_json(sums)


def _manifest(folder: Path) -> dict[str, str]:
    sums = _read_json(folder / MANIFEST_FILE).get("sha256")
    if not isinstance(sums, dict):
        raise CheckpointError(f"{folder / MANIFEST_FILE} has no 'sha256' sums")
    return sums


def _verify(folder: Path) -> None:
    sums = _manifest(folder)
    for name, expected in sums.items():
        file = folder / name
        if not file.is_file():
            raise CheckpointError(f"{file} is missing: the checkpoint is not complete")
        if sum_of_file(file) != expected:
            raise CheckpointError(f"{file} is damaged: its SHA-256 is not the one in {MANIFEST_FILE}")
