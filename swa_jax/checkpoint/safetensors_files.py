"""Safetensors files: their headers, checked before anything is read, and tensors in and out a part at a time."""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from swa_jax.base.errors import CheckpointError
from swa_jax.base.files import new_file, parse_json, sum_of_file, write_json
from swa_jax.checkpoint.sources import ModelFile, ModelFolder, OpenedFile

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
FP8 = "F8_E4M3"  # of quantised checkpoints, where it means something only with its scales
BYTES = "U8"  # MXFP4's blocks and scales
_READ = DTYPES | {FP8: np.dtype(ml_dtypes.float8_e4m3fn), BYTES: np.dtype(np.uint8)}
# Bits of an item by the format's names for dtypes (version 0.8 of its library); those that we cannot read are refused
# by name where a tensor has them.
_BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
MAX_HEADER_BYTES = 100_000_000  # as in the format's own library
MAX_NAME = 200  # letters of a tensor's name
PART_BYTES = 16 * 2**20  # tensors pass through memory in parts of this size


class StoredTensor(NamedTuple):
    file: ModelFile
    dtype: str  # safetensors' name, such as "BF16"
    shape: tuple[int, ...]
    start: int  # of its bytes in the file


# ---- headers ----


def read_headers(folder: ModelFolder) -> dict[str, StoredTensor]:
    """Every tensor of a model folder, from the headers of `model.safetensors` or of the shards its index names.

    Where both are there, but not all shards, the index is what an earlier save left.

    Raises `CheckpointError` for a folder without safetensors, a shard that is missing or cut short, a header whose
    tensors overlap, leave holes or do not have the bytes that their shapes ask for, an index that does not match its
    shards, and a tensor stored twice.
    """
    index, single = folder / INDEX_FILE, folder / SINGLE_FILE
    places = _read_index(index) if index.is_file() else {}
    files = [folder / name for name in sorted(set(places.values()))]
    if single.is_file() and not (files and all(file.is_file() for file in files)):
        places, files = {}, [single]
    if not files:
        raise CheckpointError(_no_weights(folder))
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"{index} names the shard {file.name}, which is not in {folder}")
        for name, tensor in read_header(file).items():
            if name in tensors:
                raise CheckpointError(f"tensor {name} is stored twice: in {tensors[name].file.name} and {file.name}")
            tensors[name] = tensor
    for name, shard in places.items():
        if name not in tensors or tensors[name].file.name != shard:
            raise CheckpointError(f"{index} places tensor {name[:MAX_NAME]!r} in {shard}, which does not hold it")
    return tensors


def _read_index(index: ModelFile) -> dict[str, str]:
    places = parse_json(index.read_bytes(), index, CheckpointError).get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(n, str) for n in places.values()):
        raise CheckpointError(f"{index} is not a safetensors index: 'weight_map' must map tensor names to file names")
    for name in places.values():
        if Path(name).name != name or "\0" in name:
            raise CheckpointError(f"{index} names the shard {name!r}: a shard must lie beside its index")
    return places


def read_header(file: ModelFile) -> dict[str, StoredTensor]:
    with file.open("rb") as opened:
        total = opened.seek(0, 2)
        opened.seek(0)
        size = int.from_bytes(opened.read(8), "little")
        if total < 8 or size < 2 or size > min(MAX_HEADER_BYTES, total - 8):
            raise CheckpointError(
                f"{file} is not a complete safetensors file; it may be cut short or a git-lfs pointer: fetch it again"
            )
        header = parse_json(opened.read(size), f"the header of {file}", CheckpointError)
    for name in header:
        if not name.isprintable() or len(name) > MAX_NAME:
            raise CheckpointError(f"the header of {file} has a tensor {name[:MAX_NAME]!r}, which is no name of one")
    tensors = {name: _header_entry(file, name, entry) for name, entry in header.items() if name != "__metadata__"}
    end = 0
    for name, (tensor, nbytes) in sorted(tensors.items(), key=lambda item: (item[1][0].start, item[1][1])):
        if tensor.start != end:
            found = "leaves a hole before" if tensor.start > end else "lays others over"
            raise CheckpointError(f"the header of {file} {found} tensor {name!r}: the file is damaged")
        end = tensor.start + nbytes
    begin = 8 + size
    if begin + end != total:
        raise CheckpointError(
            f"{file} is not a complete safetensors file (its header asks for {begin + end} bytes, it has {total}); it "
            "may be cut short: fetch it again"
        )
    return {name: tensor._replace(start=begin + tensor.start) for name, (tensor, _) in tensors.items()}


def _header_entry(file: ModelFile, name: str, entry: Any) -> tuple[StoredTensor, int]:
    """A tensor and its bytes; its start is counted from the end of the header."""
    where = f"the header of {file} says of tensor {name!r}"
    entry = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise CheckpointError(
            f"{where} {json.dumps(entry)[:200]}, which is no dtype, shape and data_offsets of two numbers"
        )
    if dtype not in _BITS:
        raise CheckpointError(f"tensor {name!r} in {file.name} has dtype {dtype[:40]}; supported: {', '.join(DTYPES)}")
    nbytes = offsets[1] - offsets[0]
    if 8 * nbytes != (bits := math.prod(shape) * _BITS[dtype]):
        takes = f"takes {bits / 8:g}" if bits < 2**80 else "takes more than there is"
        raise CheckpointError(f"{where} that it has {nbytes} bytes, but {dtype} {str(shape)[:100]} {takes}")
    return StoredTensor(file, dtype, tuple(shape), offsets[0]), nbytes


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(x) is int and 0 <= x < 2**63 for x in value)


def _no_weights(folder: ModelFolder) -> str:
    wanted = f"{SINGLE_FILE} or {INDEX_FILE}"
    names = sorted(path.name for path in folder.iterdir())
    pickles = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]
    if pickles:
        return f"{folder} holds pickled weights only ({pickles[0]}), which are never read; give {wanted}"
    others = [name for name in names if name.endswith(".safetensors")]
    if others:
        return f"{folder} holds {others[0]}, but neither {wanted}, which are the names read"
    return f"{folder} holds no weights: expected {wanted} (pickled weights are never read)"


# ---- reading ----


class TensorReader(contextlib.ExitStack):
    """Reads tensors, or some of their rows, and keeps their files open until it is left.

    They are read, not mapped: the pages of a mapped shard would count as memory of this process.
    """

    def __init__(self) -> None:
        super().__init__()
        self._opened: dict[str, OpenedFile] = {}
        self._buffers = [np.empty(0, np.uint8)] * 2

    def rows(self, tensor: StoredTensor, first: int, last: int, out: np.ndarray | None = None) -> np.ndarray:
        """Rows `first` to below `last` of a tensor with one axis or more, in its dtype; `out`: bytes to read into."""
        dtype, row = _READ[tensor.dtype], tensor.shape[1:]
        nbytes = dtype.itemsize * math.prod(row)
        if out is None:
            out = np.empty((last - first) * nbytes, np.uint8)
        data = out[: (last - first) * nbytes]
        self._read(tensor.file, tensor.start + first * nbytes, data)
        return data.view(dtype).reshape(last - first, *row)

    def whole(self, tensor: StoredTensor) -> np.ndarray:
        data = np.empty(math.prod(tensor.shape) * _READ[tensor.dtype].itemsize, np.uint8)
        self._read(tensor.file, tensor.start, data)
        return data.view(_READ[tensor.dtype]).reshape(tensor.shape)

    def parts(self, tensor: StoredTensor, first: int = 0, last: int | None = None) -> Iterator[tuple[int, np.ndarray]]:
        """(number of its first row, rows) of a tensor or some of its rows, in parts of about `PART_BYTES`.

        A part is overwritten when the next but one is asked for, so that it can be written beside reading the next.
        """
        last = tensor.shape[0] if last is None else last
        nbytes = _READ[tensor.dtype].itemsize * math.prod(tensor.shape[1:])
        step = max(1, PART_BYTES // max(1, nbytes))
        if self._buffers[0].nbytes < (size := min(step, last - first) * nbytes):
            self._buffers = [np.empty(size, np.uint8), np.empty(size, np.uint8)]
        for row in range(first, last, step):
            self._buffers.reverse()
            yield row, self.rows(tensor, row, min(row + step, last), self._buffers[0])

    def _read(self, file: ModelFile, start: int, data: np.ndarray) -> None:
        opened = self._opened.get(str(file))
        if opened is None:
            opened = self._opened[str(file)] = file.open("rb")
            self.callback(opened.close)
        opened.seek(start)
        view = memoryview(data)
        while view:
            if not (count := opened.readinto(view)):
                raise CheckpointError(f"{file} became shorter while it was read: fetch it again")
            view = view[count:]


# ---- writing ----

TensorTable = Mapping[str, tuple[np.dtype, tuple[int, ...]]]  # dtype and shape by name
# Tensors by name, each whole or in consecutive parts along its first axis.
Parts = Iterable[tuple[str, np.ndarray]]


def write_model(
    folder: Path,
    tensors: TensorTable,
    read: Callable[[list[str]], Parts],
    *,
    shard_bytes: int,
    check: Callable[[str, np.ndarray], None] = lambda name, part: None,
) -> dict[str, str]:
    """Write `model.safetensors`, or shards of at most `shard_bytes` with their index; a part of a tensor is in memory.

    A shard that is there already is of an interrupted run with the same tensors, and is kept.

    Args:
      read: `read(names)` yields the named tensors in that order.
      check: raises for values that are not to be written.

    Returns:
      The SHA-256 sum of each file.
    """
    shards = write_order(tensors, shard_bytes)
    places: dict[str, str] = {}
    sums: dict[str, str] = {}
    for i, names in enumerate(shards, start=1):
        file = SINGLE_FILE if len(shards) == 1 else f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        there = (folder / file).is_file()
        sums[file] = sum_of_file(folder / file) if there else _write_file(folder / file, names, tensors, read, check)
        places |= dict.fromkeys(names, file)
    if len(shards) > 1:
        total = sum(_size(*tensor) for tensor in tensors.values())
        write_json(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": places})
        sums[INDEX_FILE] = sum_of_file(folder / INDEX_FILE)
    return sums


def _size(dtype: np.dtype, shape: tuple[int, ...]) -> int:
    return dtype.itemsize * math.prod(shape)


def write_order(tensors: TensorTable, shard_bytes: int) -> list[list[str]]:
    """The names of each shard, in the order in which `write_model` reads them."""
    shards: list[list[str]] = [[]]
    room = shard_bytes
    for name, tensor in tensors.items():
        size = _size(*tensor)
        if shards[-1] and size > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(name)
        room -= size
    # Wide dtypes first: all stay aligned.
    return [sorted(names, key=lambda name: -tensors[name][0].itemsize) for names in shards]


def _write_file(
    file: Path,
    names: list[str],
    tensors: TensorTable,
    read: Callable[[list[str]], Parts],
    check: Callable[[str, np.ndarray], None],
) -> str:
    """Returns the SHA-256 sum of the file."""
    codes = {dtype: code for code, dtype in DTYPES.items()}
    # "format" is what transformers asks for before it reads a file.
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        dtype, shape = tensors[name]
        start, end = end, end + _size(dtype, shape)
        header[name] = {"dtype": codes[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    total = hashlib.sha256()

    # Beside reading and writing, on other cores: sums, checks, and bringing to the disk what has been written.
    with new_file(file) as out, concurrent.futures.ThreadPoolExecutor(3) as beside:
        for data in (len(text).to_bytes(8, "little"), text):
            total.update(data)
            out.write(data)
        examined: list[concurrent.futures.Future[None]] = []
        synced = beside.submit(os.fsync, out.fileno())
        for name, array in read(names):
            view = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
            for done in examined:
                done.result()
            examined = [beside.submit(check, name, array), beside.submit(total.update, view)]
            out.write(view)
            if synced.done():
                synced.result()
                synced = beside.submit(os.fsync, out.fileno())
        for done in (*examined, synced):
            done.result()
        written = out.tell()
        assert written == 8 + len(text) + end, f"{file.name}: {written} bytes for a header of {end}"
    return total.hexdigest()
