"""The checkpoint folder: `config.json`, `pattern.json`, `weights/`, `manifest.json` and the tokenizer's files.

`config.json` says what the weights are, `pattern.json` how they attend; export joins the two. `weights/` holds
safetensors with one tensor for each Hugging Face tensor; layers and experts are stacked when a model is loaded.
`manifest.json` has the SHA-256 sum of every file of the weights and of what `config.json` says. A folder is written
beside its destination and renamed into place, so it is there whole or not at all.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import itertools
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from swa_jax.base.errors import CheckpointError, ConfigError
from swa_jax.base.files import (
    check_destination,
    check_local,
    new_folder,
    read_json,
    sum_of_file,
    sum_of_json,
    sync_folder,
    write_bytes,
    write_json,
)
from swa_jax.checkpoint.families import hf_config as make_hf_config
from swa_jax.checkpoint.families import model_config
from swa_jax.checkpoint.families.pattern_files import choose_pattern, no_window
from swa_jax.checkpoint.safetensors_files import (
    DTYPES,
    Parts,
    StoredTensor,
    TensorReader,
    TensorTable,
    read_headers,
    write_model,
    write_order,
)
from swa_jax.checkpoint.sources import ModelFolder, companion, named_templates
from swa_jax.checkpoint.tensor_names import TensorName, expected_tensors, is_router, tensor_names
from swa_jax.model.attention import Router
from swa_jax.model.config import ModelConfig
from swa_jax.model.decoder import Decoder
from swa_jax.model.layer_stacks import layer_stacks
from swa_jax.model.layer_types import SWITCH
from swa_jax.model.parameters import ROUTERS
from swa_jax.model.pattern import AttentionPattern
from swa_jax.model.sharding import Partition, laid_out, state_shardings
from swa_jax.model.window import OWN, Window

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
SHARD_BYTES = 500_000_000  # an interrupted import loses no more than one such file
TRANSPOSED_ROWS = 16  # at a time: more do not stay in the processor's cache
ALIGNMENT = 64  # bytes: XLA's on a CPU
log = logging.getLogger(__name__)
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
      tokenizer_from: a folder whose tokenizer files are copied; or a tokenizer.json, whatever its name.

    Raises `ConfigError` if `hf_config` describes another model or the model has LoRA adapters, `CheckpointError` if the
    destination is in use.
    """
    if model.lora is not None:
        raise ConfigError(
            "a checkpoint has no place for LoRA adapters: save merge_lora(model), and the adapters with save_adapter"
        )
    destination = Path(destination)
    if jax.process_index() == 0:  # it may be there already when the others come here
        destination = check_destination(destination)
    dtype = model.embedding[...].dtype.name
    if hf_config is None:
        hf = make_hf_config(model.config, dtype=dtype)
    else:
        hf = {key: value for key, value in hf_config.items() if key != "torch_dtype"} | {"dtype": dtype}
        _check_same_model(dataclasses.replace(model_config(hf), model_type=model.config.model_type), model.config)
    table = tensor_names(model_config(hf), routers=model.routed)  # the names of the family that is written
    companions = {} if tokenizer_from is None else _tokenizer_files(Path(tokenizer_from))
    tensors, read = _unstack(model, table)
    write_checkpoint(destination, hf, model.pattern, tensors, read, companions=companions)
    return destination


def load_model(
    path: str | Path | Checkpoint,
    pattern: AttentionPattern | str | Path | None = None,
    window: Window = OWN,
    *,
    dtype: jax.typing.DTypeLike | None = None,
    config: ModelConfig | None = None,
    partition: Partition | None = None,
    router_seed: int = ROUTER_SEED,
) -> Decoder:
    """Read a checkpoint folder.

    Args:
      path: a folder written by `swa-jax import`, `save_model` or training, or what `open_checkpoint` made of one.
      pattern: an AttentionPattern, the path of a pattern JSON, or a recipe; None: the folder's own. Routers that it
        asks for and the checkpoint lacks are drawn from `router_seed`.
      window: what is not given is the pattern's; a recipe takes the size of the folder's own pattern, or 2048.
      dtype: of all parameters but the routers, which are f32; None: the stored one (the widest, if several are stored).
      config: in place of the folder's own, for changes that no weight depends on, such as YaRN.
      partition: lay the parameters out on this mesh; the host holds one of them at a time.

    Raises:
      CheckpointError: not a checkpoint folder, or a damaged one; the sentence names the file.
      ConfigError: a pattern that does not fit the model, or a dtype that parameters cannot have.
    """
    source = path if isinstance(path, Checkpoint) else open_checkpoint(path)
    config = config or source.config
    chosen = choose_pattern(source.pattern, pattern, config, window)
    if chosen not in (source.pattern, pattern) and (note := no_window(chosen, config)):
        warnings.warn(f"{note}: give a smaller window=", skip_file_prefixes=(str(Path(__file__).parents[1]),))
    routed = SWITCH in chosen.layer_types
    kind = source.dtype if dtype is None else _floating(dtype)
    skeleton = nnx.eval_shape(lambda: Decoder(config, chosen, dtype=kind, rngs=nnx.Rngs(0)))
    graph, wanted = nnx.split(skeleton)
    table = tensor_names(config, routers=routed and source.has_routers)
    places: dict[tuple[str, ...], jax.sharding.Sharding] = {}
    if partition is not None:
        shardings = nnx.to_flat_state(state_shardings(wanted, partition, config))
        places = {_names(path): sharding.get_value() for path, sharding in shardings}
    variables = {_names(path): variable for path, variable in nnx.to_flat_state(wanted)}
    arrays = dict(_stack(source, table, variables, places))
    if routed and not source.has_routers:
        routers = _fresh_routers(config, router_seed)
        arrays |= {path: laid_out(router, places.get(path)) for path, router in routers.items()}
    state = {path: variable.replace(arrays[_names(path)]) for path, variable in nnx.to_flat_state(wanted)}
    return nnx.merge(graph, nnx.from_flat_state(state))


def _floating(dtype: jax.typing.DTypeLike) -> np.dtype:
    try:
        kind = jnp.dtype(dtype)
    except TypeError:
        kind = None
    if kind is None or not jnp.issubdtype(kind, jnp.floating):
        raise ConfigError(f"dtype must be a floating-point type such as float32 or bfloat16, got {dtype!r:.40}")
    return kind


def _fresh_routers(config: ModelConfig, seed: int) -> dict[tuple[str, ...], jax.Array]:
    """Stacked router parameters, f32, by their path in the decoder."""
    rngs, found = nnx.Rngs(seed), {}
    for stack in layer_stacks(config):
        place = ("layers", *([stack.name] if stack.name else []), "attention", "router")
        many = nnx.split_rngs(splits=len(stack.layers))(nnx.vmap(functools.partial(Router, stack.config)))
        for path, variable in nnx.to_flat_state(nnx.state(many(rngs))):
            found[*place, *_names(path)] = variable[...]
    return found


def _names(path: tuple[Any, ...]) -> tuple[str, ...]:
    return tuple(map(str, path))


def _check_same_model(described: ModelConfig, actual: ModelConfig) -> None:
    for field in dataclasses.fields(ModelConfig):
        theirs, ours = getattr(described, field.name), getattr(actual, field.name)
        if theirs != ours:
            raise ConfigError(
                f"hf_config describes another model: {field.name} is {theirs!r} there, {ours!r} in the model"
            )


def _unstack(model: Decoder, table: list[TensorName]) -> tuple[TensorTable, Callable[[list[str]], Parts]]:
    """What a checkpoint of the model holds, and what reads it."""
    parameters = dict(nnx.to_flat_state(nnx.state(model)))
    places = {tensor.name: tensor for tensor in table}

    def read(names: list[str]) -> Parts:
        for tensor in map(places.__getitem__, names):
            stacked = parameters[tensor.path][...]
            array = fetch(stacked[tensor.place] if tensor.place else stacked)
            yield tensor.name, np.ascontiguousarray(array.T if tensor.transposed else array)

    return {name: (parameters[t.path][...].dtype, t.shape) for name, t in places.items()}, read


def fetch(x: jax.Array) -> np.ndarray:
    """The whole array on this host, also when other processes hold parts of it (all of them must then call this)."""
    if not x.is_fully_addressable:
        assert isinstance(x.sharding, jax.sharding.NamedSharding)
        x = jax.device_put(x, jax.sharding.NamedSharding(x.sharding.mesh, jax.sharding.PartitionSpec()))
    return np.asarray(x)


def _stack(
    source: Checkpoint,
    table: list[TensorName],
    variables: Mapping[tuple[str, ...], Any],
    places: Mapping[tuple[str, ...], jax.sharding.Sharding],
) -> Iterator[tuple[tuple[str, ...], jax.Array]]:
    """(path, parameter) for each parameter of the decoder; the host holds one of them at a time."""
    with TensorReader() as reader:
        for path, tensors in itertools.groupby(table, lambda tensor: tensor.path):
            buffer = _aligned(variables[path].shape, variables[path].dtype)
            for tensor in tensors:
                target = buffer[tensor.place]
                for row, part in reader.parts(source.stored[tensor.name]):
                    if not tensor.transposed:
                        target[row : row + len(part)] = part
                        continue
                    for i in range(0, len(part), TRANSPOSED_ROWS):
                        piece = part[i : i + TRANSPOSED_ROWS]
                        target[..., row + i : row + i + len(piece)] = piece.T
            yield path, laid_out(buffer, places.get(path), may_alias=True)


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An empty array that JAX on a CPU uses where it is, and does not copy."""
    size = int(np.prod(shape)) * dtype.itemsize
    data = np.empty(size + ALIGNMENT, np.uint8)
    start = -data.ctypes.data % ALIGNMENT
    return data[start : start + size].view(dtype).reshape(shape)


# ---- folders ----


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint folder: everything but the weights, which `read` fetches."""

    folder: Path
    hf_config: dict[str, Any]
    config: ModelConfig
    pattern: AttentionPattern
    stored: dict[str, StoredTensor]  # by Hugging Face's name

    @functools.cached_property
    def tensors(self) -> TensorTable:
        """dtype and shape by Hugging Face's name."""
        return {name: (DTYPES[tensor.dtype], tensor.shape) for name, tensor in self.stored.items()}

    @functools.cached_property
    def has_routers(self) -> bool:
        return any(map(is_router, self.stored))

    @property
    def dtype(self) -> np.dtype:
        """The dtype of all tensors but the routers', or the widest needed to hold them."""
        table = tensor_names(self.config, routers=self.has_routers)
        routers = {tensor.name for tensor in table if ROUTERS & {*tensor.path}}
        dtypes = {dtype for name, (dtype, _) in self.tensors.items() if name not in routers}
        return np.dtype(jnp.result_type(*dtypes))

    def read(self, names: list[str]) -> Iterator[tuple[str, np.ndarray]]:
        """(name, array) in the order of `names`, one at a time."""
        with TensorReader() as reader:
            for name in names:
                yield name, reader.whole(self.stored[name])


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
    for name in (CONFIG_FILE, PATTERN_FILE, MANIFEST_FILE):
        _check_regular(folder / name)
    hf = _read_json(folder / CONFIG_FILE)
    config = model_config(hf)
    pattern = AttentionPattern.from_json(folder / PATTERN_FILE)
    try:
        pattern.validate(config)
    except ConfigError as error:
        raise ConfigError(f"{folder / PATTERN_FILE} does not fit {folder / CONFIG_FILE}: {error}") from None
    _verify(folder, hf)
    stored = read_headers(folder / WEIGHTS)
    expected = expected_tensors(config, routers=any(map(is_router, stored)))
    if {name: tensor.shape for name, tensor in stored.items()} != expected:
        raise CheckpointError(f"the tensors in {folder / WEIGHTS} are not those that {CONFIG_FILE} asks for")
    for name, tensor in stored.items():
        if tensor.dtype not in DTYPES:
            raise CheckpointError(f"tensor {name} in {folder / WEIGHTS} has dtype {tensor.dtype}")
    return Checkpoint(folder, hf, config, pattern, stored)


def write_checkpoint(
    destination: Path,
    hf_config: Mapping[str, Any],
    pattern: AttentionPattern,
    tensors: TensorTable,
    read: Callable[[list[str]], Parts],
    *,
    companions: Mapping[str, bytes] | None = None,
    check: Callable[[str, np.ndarray], None] = lambda name, part: None,
    identity: str = "",
) -> None:
    """Write a checkpoint folder; no more than one tensor, or the part of it that `read` yields, is in memory.

    With several processes all call this: they read the same tensors in the same order, and process 0 writes them.

    Args:
      tensors: dtype and shape by Hugging Face's name.
      read, check: as in `write_model`.
      companions: files to put beside the weights.
      identity: of what is written, for a run that goes on after an interruption (`new_folder`).
    """
    if jax.process_index() != 0:
        for names in write_order(tensors, SHARD_BYTES):
            for _ in read(names):
                pass
        return
    for name, (dtype, _) in tensors.items():
        if dtype not in DTYPES.values():
            kinds = ", ".join(kind.name for kind in DTYPES.values())
            raise CheckpointError(f"tensor {name} has dtype {dtype}; a checkpoint holds {kinds}")
    with new_folder(destination, identity) as folder:
        (folder / WEIGHTS).mkdir(exist_ok=True)
        sums = write_model(folder / WEIGHTS, tensors, read, shard_bytes=SHARD_BYTES, check=check)
        write_json(folder / CONFIG_FILE, hf_config)
        pattern.to_json(folder / PATTERN_FILE)
        listed = {f"{WEIGHTS}/{name}": total for name, total in sums.items()}
        listed[CONFIG_FILE] = sum_of_json(hf_config)
        write_json(folder / MANIFEST_FILE, {"sha256": listed} | ({"import": identity} if identity else {}))
        write_companions(folder, companions or {})
        sync_folder(folder / WEIGHTS)


def _check_regular(file: Path) -> None:
    """A folder has no bytes to read, and reading a pipe would never end."""
    if file.exists() and not file.is_file():
        raise CheckpointError(f"{file} is no regular file: the checkpoint is damaged")


def written_from(destination: str | Path) -> str | None:
    """The identity that a checkpoint folder was written with; None: there is no such folder, or it has none."""
    try:
        file = Path(destination).expanduser() / MANIFEST_FILE
        _check_regular(file)
        manifest = read_json(file, CheckpointError)
        identity = manifest.get("import")
    except (OSError, CheckpointError):
        return None
    return identity if isinstance(identity, str) else None


def read_companions(folder: ModelFolder) -> dict[str, bytes]:
    """The tokenizer's files of a folder and others of their kind. Raises as `sources.companion`."""
    found = {name: companion(folder, name) for name in (*COMPANIONS, *named_templates(folder))}
    return {name: file.read_bytes() for name, file in found.items() if file is not None}


def _tokenizer_files(path: Path) -> dict[str, bytes]:
    """Those of a folder, or of a file and what lies beside it."""
    if not path.is_file():
        return read_companions(path)
    return read_companions(path.parent) | {"tokenizer.json": path.read_bytes()}


def write_companions(folder: Path, companions: Mapping[str, bytes]) -> None:
    for name, data in companions.items():
        (folder / name).parent.mkdir(exist_ok=True)
        write_bytes(folder / name, data)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return read_json(file, CheckpointError)
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing: the checkpoint is not complete") from None


def weights_sum(path: str | Path) -> str:
    """One SHA-256 for a checkpoint folder's weights: of the sums of their files that its manifest has.

    Raises `CheckpointError` where there is no manifest. That the files have these sums is for `open_checkpoint` to see.
    """
    sums = _manifest(Path(path).expanduser())
    return sum_of_json({name: total for name, total in sums.items() if name != CONFIG_FILE})


def content_sum(folder: Path) -> str:
    """A sum of all that decides what the model of a checkpoint folder computes, says and reads."""
    names = (CONFIG_FILE, PATTERN_FILE, *COMPANIONS)
    small = {name: sum_of_file(file) for name in names if (file := folder / name).is_file()}
    return sum_of_json([weights_sum(folder), small])


def _manifest(folder: Path) -> dict[str, str]:
    sums = _read_json(folder / MANIFEST_FILE).get("sha256")
    if not isinstance(sums, dict) or not all(isinstance(total, str) for total in sums.values()):
        raise CheckpointError(f"{folder / MANIFEST_FILE} has no 'sha256' sums")
    return sums


def _verify(folder: Path, hf: Mapping[str, Any]) -> None:
    """Compare a folder with its manifest, which names every file of the weights and no other."""
    sums = _manifest(folder)
    configured = sums.pop(CONFIG_FILE, None)
    there = {f"{WEIGHTS}/{path.name}" for path in (folder / WEIGHTS).iterdir()}
    for name in sorted(sums.keys() | there):
        if name not in there and Path(name).parent != Path(WEIGHTS):
            raise CheckpointError(f"{folder / MANIFEST_FILE} lists {name!r}, which is no file of {WEIGHTS}/")
        if name not in there:
            raise CheckpointError(f"{folder / name} is missing: the checkpoint is not complete")
        if name not in sums:
            raise CheckpointError(
                f"{folder / name} is not in {MANIFEST_FILE}, which lists all files of the weights: remove it"
            )

        _check_regular(folder / name)

    def damaged(name: str) -> bool:
        return sum_of_file(folder / name) != sums[name]

    with concurrent.futures.ThreadPoolExecutor() as beside:
        for name, wrong in zip(sums, beside.map(damaged, sums), strict=True):
            if wrong:
                raise CheckpointError(
                    f"{folder / name} is damaged: its SHA-256 is not the one in {MANIFEST_FILE}: import it again"
                )
    if configured is not None and configured != sum_of_json(hf):
        log.warning("%s was edited after it was written: the weights are read as it says now", folder / CONFIG_FILE)
