"""Safetensors files: headers of a model folder, one tensor at a time, and writing shards without holding them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, NamedTuple

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from swa_jax.errors import CheckpointError
from swa_jax.files import write_json

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
FP8 = "F8_E4M3"  # of quantised checkpoints, where it means something only with its scales
_READ = DTYPES | {FP8: np.dtype(ml_dtypes.float8_e4m3fn)}
MAX_SHARD_BYTES = 5_000_000_000


class StoredTensor(NamedTuple):
    file: Path
    dtype: str  # safetensors' name, such as "BF16"
    shape: tuple[int, ...]


# ---- reading ----


def read_headers(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of a model folder, from the headers of `model.safetensors` or of the shards its index names.

    Raises `CheckpointError` for a folder without safetensors, a shard that is missing or cut short, an index that
    does not match its shards, and a tensor stored twice.
    """
    index = folder / INDEX_FILE
    if index.is_file():
        places = _read_index(index)
        files = [folder / name for name in sorted(set(places.values()))]
    elif (folder / SINGLE_FILE).is_file():
        places, files = {}, [folder / SINGLE_FILE]
    else:
        raise CheckpointError(_no_weights(folder))
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"{index} names the shard {file.name}, which is not in {folder}")
        for name, tensor in _read_header(file).items():
            if name in tensors:
                raise CheckpointError(
                    f"tensor {name} is stored twice: in {tensors[name].file.name} and {file.name}"
                )
            tensors[name] = tensor
    for name, shard in places.items():
        if name not in tensors or tensors[name].file.name != shard:
            raise CheckpointError(f"{index} places tensor {name} in {shard}, which does not hold it")
    return tensors


def _read_index(index: Path) -> dict[str, str]:
    try:
        places = json.loads(index.read_text())["weight_map"]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError):
        raise CheckpointError(
            f"{index} is not a safetensors index: it must be JSON with a 'weight_map'"
        ) from None
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise CheckpointError(f"{index}: 'weight_map' must map tensor names to file names")
    for name in places.values():
        if Path(name).name != name:
            raise CheckpointError(f"{index} names the shard '{name}': a shard must lie beside its index")
    return places


def _read_header(file: Path) -> dict[str, StoredTensor]:
    try:
        with safe_open(file, "np") as tensors:
            views = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118
            return {
                name: StoredTensor(file, v.get_dtype(), tuple(v.get_shape())) for name, v in views.items()
            }
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file} is not a complete safetensors file ({error}); it may be cut short or a git-lfs pointer: "
            "fetch it again"
        ) from None


def _no_weights(folder: Path) -> str:
    wanted = f"{SINGLE_FILE} or {INDEX_FILE}"
    pickles = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt"))
    if pickles:
        return f"{folder} holds pickled weights only ({pickles[0]}), which are never read; give {wanted}"
    others = sorted(p.name for p in folder.glob("*.safetensors"))
    if others:
        return f"{folder} holds {others[0]}, but neither {wanted}, which are the names read"
    return f"{folder} holds no weights: expected {wanted} (pickled weights are never read)"


def stream_tensors(tensors: Mapping[str, StoredTensor]) -> Iterator[tuple[str, np.ndarray]]:
    """(name, array) for each tensor, one at a time, file by file; arrays in the stored dtype and shape.

    They are read, not mapped: the pages of a mapped shard would count as memory of this process.
    """
    by_file: dict[Path, list[str]] = {}
    for name, tensor in tensors.items():
        by_file.setdefault(tensor.file, []).append(name)
    for file in sorted(by_file):
        with file.open("rb") as opened:
            starts = _starts(opened)
            for name in by_file[file]:
                array = np.empty(tensors[name].shape, _READ[tensors[name].dtype])
                opened.seek(starts[name])
                opened.readinto(array.reshape(-1).view(np.uint8))
                yield name, array


def _starts(opened: BinaryIO) -> dict[str, int]:
    """Where each tensor's bytes begin in a file whose header has been checked."""
    size = int.from_bytes(opened.read(8), "little")
    header = json.loads(opened.read(size))
    return {
        name: 8 + size + entry["data_offsets"][0] for name, entry in header.items() if name != "__metadata__"
    }


# ---- writing ----


def write_model(
    folder: Path,
    tensors: Mapping[str, tuple[np.dtype, tuple[int, ...]]],
    read: Callable[[list[str]], Iterable[tuple[str, np.ndarray]]],
) -> None:
    """Write `model.safetensors`, or shards of at most `MAX_SHARD_BYTES` with their index, one tensor at a time.

    `read(names)` yields the named tensors in that order.
    """
    shards = _plan_shards({name: _size(*tensor) for name, tensor in tensors.items()})
    if len(shards) == 1:
        _write_file(folder / SINGLE_FILE, shards[0], tensors, read)
        return
    places: dict[str, str] = {}
    for i, names in enumerate(shards, start=1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        _write_file(folder / file, names, tensors, read)
        places |= dict.fromkeys(names, file)
    total = sum(_size(*tensor) for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    write_json(folder / INDEX_FILE, index)


def _size(dtype: np.dtype, shape: tuple[int, ...]) -> int:
    return dtype.itemsize * math.prod(shape)


def _plan_shards(sizes: Mapping[str, int]) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    room = MAX_SHARD_BYTES
    for name, size in sizes.items():
        if shards[-1] and size > room:
            shards.append([])
            room = MAX_SHARD_BYTES
        shards[-1].append(name)
        room -= size
    return shards


def _write_file(
    file: Path,
    names: list[str],
    tensors: Mapping[str, tuple[np.dtype, tuple[int, ...]]],
    read: Callable[[list[str]], Iterable[tuple[str, np.ndarray]]],
) -> None:
    codes = {dtype: code for code, dtype in DTYPES.items()}
    names = sorted(names, key=lambda name: -tensors[name][0].itemsize)  # wide dtypes first: all stay aligned
    # "format" is what transformers asks for before it reads a file.
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        dtype, shape = tensors[name]
        start, end = end, end + _size(dtype, shape)
        header[name] = {"dtype": codes[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little"))
        out.write(text)
        for _, array in read(names):
            out.write(np.ascontiguousarray(array).view(np.uint8).data)
