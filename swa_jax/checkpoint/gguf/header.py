"""The header of a GGUF file: its metadata and where its tensors lie, checked before anything else is read.

Format: ggml's docs/gguf.md, versions 2 and 3. The reader of the `gguf` package maps the file, trusts its counts and
makes an array of every item, so that a damaged count never ends; this one believes a count only if the file has room.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType, GGUFValueType

from swa_jax.base.errors import CheckpointError
from swa_jax.checkpoint.sources import GGUF, GGUF_PART, ModelFile, ModelFolder, OpenedFile, RemoteFile

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_HEADER_BYTES = 500_000_000  # vocabularies and chat templates take megabytes
MAX_KEY, MAX_NAME, MAX_AXES = (65_535, 64, 4)  # letters of a key and of a tensor's name, and axes: the format's own
READ_AT_ONCE = 1 << 20

# The format calls its numbers as NumPy does; they are stored lowest byte first.
_NAMES = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float32", "float64")
_NUMBERS: dict[GGUFValueType, np.dtype[Any]] = {
    GGUFValueType.BOOL: np.dtype(np.uint8),
    **{GGUFValueType[name.upper()]: np.dtype(name).newbyteorder("<") for name in _NAMES},
}


class GgufTensor(NamedTuple):
    file: ModelFile
    kind: GGMLQuantizationType
    shape: tuple[int, ...]  # as numpy has it: the axis whose numbers lie side by side is the last
    start: int  # of its bytes in the file

    @property
    def row_bytes(self) -> int:
        block, size = GGML_QUANT_SIZES[self.kind]
        return self.shape[-1] // block * size


class Header(NamedTuple):
    """What the header of a file, or those of all parts of a split, say."""

    metadata: dict[str, Any]  # by key; arrays of numbers are numpy's, arrays of texts are lists
    tensors: dict[str, GgufTensor]  # by their name in the file, in its order


def read_gguf(file: ModelFile) -> Header:
    """The header of a file, or of all parts of a split one of which `file` is any.

    Raises `CheckpointError` for what is no GGUF file, a damaged or cut one, and parts that are missing or do not belong
    together.
    """
    named = GGUF_PART.fullmatch(file.name)
    if named is None:
        header = _read_header(file)
        if header.metadata.get("split.count", 1) not in (0, 1):
            raise CheckpointError(
                f"{file} is a part of a split model, but is not called so: give the parts the names that "
                f"llama.cpp gave them, such as {file.name.removesuffix(GGUF)}-00001-of-00002{GGUF}"
            )
        return header
    stem, count = named[1], int(named[3])
    if not 1 <= int(named[2]) <= count:
        raise CheckpointError(f"{file} is called part {int(named[2])} of {count}, which there cannot be")
    folder: ModelFolder = file.folder if isinstance(file, RemoteFile) else file.parent
    metadata: dict[str, Any] = {}
    tensors: dict[str, GgufTensor] = {}
    for number in range(1, count + 1):
        part = folder / f"{stem}-{number:05d}-of-{count:05d}{GGUF}"
        if not part.is_file():
            raise CheckpointError(f"{part} is missing: {file.name} is one of {count} parts, and all are needed")
        header = _read_header(part)
        metadata = metadata or header.metadata
        place = tuple(header.metadata.get(key) for key in ("split.no", "split.count"))
        if place != (number - 1, count):
            raise CheckpointError(
                f"{part} says that it is part {place[0]} (from 0) of {place[1]}: it is not the part that it is called"
            )
        for name, tensor in header.tensors.items():
            if name in tensors:
                raise CheckpointError(f"tensor {name} is stored twice: in {tensors[name].file.name} and {part.name}")
            tensors[name] = tensor
    if len(tensors) != metadata.get("split.tensors.count", len(tensors)):
        raise CheckpointError(
            f"the {count} parts of {file} hold {len(tensors)} tensors, not the {metadata['split.tensors.count']} that "
            "the first one says: they are not of one model"
        )
    return Header(metadata, tensors)


class _Cursor:
    """Reads a file from its start, and says in a sentence where it ends too early."""

    def __init__(self, file: ModelFile, opened: OpenedFile):
        self.file, self.opened = file, opened
        self.total = opened.seek(0, 2)
        opened.seek(0)
        self.place, self.start, self.buffer = 0, 0, b""

    @property
    def left(self) -> int:
        return min(self.total, MAX_HEADER_BYTES) - self.place

    def take(self, size: int) -> bytes:
        self.expect(size)
        offset = self.place - self.start
        if offset + size > len(self.buffer):
            more = self.opened.read(max(size, READ_AT_ONCE))
            self.buffer, self.start, offset = self.buffer[offset:] + more, self.place, 0
        data = self.buffer[offset : offset + size]
        if len(data) != size:
            raise self.damaged("it became shorter while it was read")
        self.place += size
        return data

    def expect(self, size: int) -> None:
        """Raise `CheckpointError` unless so many bytes are left."""
        if size > self.left:
            raise self.damaged(
                f"its header asks for {size} bytes at byte {self.place}, of {self.total} bytes in all"
                if size < 2**63
                else f"its header asks for more bytes at byte {self.place} than there are"
            )

    def number(self, layout: str) -> Any:
        return struct.unpack(layout, self.take(struct.calcsize(layout)))[0]

    def text(self, most: int | None = None) -> str:
        at, size = self.place, self.number("<Q")
        if most is not None and size > most:
            raise self.damaged(f"the name at byte {at} has {size} letters, of at most {most}")
        try:
            return self.take(size).decode()
        except UnicodeDecodeError:
            raise self.damaged(f"the text at byte {at} is not UTF-8") from None

    def damaged(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.file} is damaged or cut short ({what}): fetch it again")


def _read_header(file: ModelFile) -> Header:
    with file.open("rb") as opened:
        cursor = _Cursor(file, opened)
        version = _read_version(cursor)
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
            kind = "is for processors with the highest byte first" if swapped else f"is of GGUF version {version}"
            raise CheckpointError(
                f"{file} {kind}; supported: GGUF versions {' and '.join(map(str, VERSIONS))}, lowest byte first. "
                "llama.cpp's convert_hf_to_gguf.py writes them"
            )
        tensor_count, key_count = cursor.number("<Q"), cursor.number("<Q")
        cursor.expect(key_count * 13)  # the least that a key and its value take
        metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key = cursor.text(MAX_KEY)
            if not key.isprintable() or key in metadata:
                raise cursor.damaged(f"key {key[:200]!r} is {'there twice' if key in metadata else 'no key'}")
            metadata[key] = _read_value(cursor, _read_enum(cursor, GGUFValueType, f"key {key!r}"), key)
        cursor.expect(tensor_count * 24)
        described = [_read_tensor(cursor) for _ in range(tensor_count)]
        return Header(metadata, _placed(cursor, described, _alignment(cursor, metadata)))


def _read_version(cursor: _Cursor) -> int:
    if not cursor.total:
        raise CheckpointError(f"{cursor.file} is empty: fetch it again")
    magic = cursor.take(4)
    if magic != MAGIC:
        old = magic in (b"lmgg", b"tjgg", b"fmgg", b"algg")
        raise CheckpointError(
            f"{cursor.file} is "
            + ("of a format before GGUF, which is not supported" if old else f"no GGUF file: it begins with {magic!r}")
            + "; a git-lfs pointer or a web page in its place means that it must be fetched again"
        )
    version: int = cursor.number("<I")
    return version


def _read_enum(cursor: _Cursor, kind: Callable[[int], Any], of: str) -> Any:
    value = cursor.number("<I")
    try:
        return kind(value)
    except ValueError:
        raise cursor.damaged(f"{of} is of type {value}, which the format does not have") from None


def _read_value(cursor: _Cursor, kind: GGUFValueType, key: str) -> Any:
    if kind == GGUFValueType.STRING:
        return cursor.text()
    if kind != GGUFValueType.ARRAY:
        return _read_numbers(cursor, kind, 1)[0].item()
    kind, count = _read_enum(cursor, GGUFValueType, f"the array {key!r}"), cursor.number("<Q")
    if kind == GGUFValueType.STRING:
        cursor.expect(8 * count)
        return [cursor.text() for _ in range(count)]
    if kind == GGUFValueType.ARRAY:
        raise cursor.damaged(f"{key!r} is an array of arrays")
    return _read_numbers(cursor, kind, count)


def _read_numbers(cursor: _Cursor, kind: GGUFValueType, count: int) -> np.ndarray:
    dtype = _NUMBERS[kind]
    numbers = np.frombuffer(cursor.take(count * dtype.itemsize), dtype)
    return numbers != 0 if kind == GGUFValueType.BOOL else numbers


def _read_tensor(cursor: _Cursor) -> tuple[str, GGMLQuantizationType, tuple[int, ...], int]:
    """Name, type, shape, and the place of the bytes behind the header."""
    name = cursor.text(MAX_NAME)
    axes = cursor.number("<I")
    if not name.isprintable() or not 1 <= axes <= MAX_AXES:
        raise cursor.damaged(f"tensor {name[:200]!r} has {axes} axes" if name.isprintable() else "a tensor has no name")
    shape = tuple(cursor.number("<Q") for _ in range(axes))[::-1]
    kind = _read_enum(cursor, GGMLQuantizationType, f"tensor {name!r}")
    block = GGML_QUANT_SIZES[kind][0]
    if shape[-1] % block or not all(1 <= size < 2**63 for size in shape):
        raise cursor.damaged(
            f"tensor {name!r} has shape {str(list(shape))[:200]}, which {kind.name} in blocks of {block} cannot have"
        )
    return name, kind, shape, cursor.number("<Q")


def _alignment(cursor: _Cursor, metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
    if type(alignment) is not int or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
        raise cursor.damaged(f"general.alignment is {str(alignment)[:40]}, which is no power of 2")
    return alignment


def _placed(
    cursor: _Cursor, described: list[tuple[str, GGMLQuantizationType, tuple[int, ...], int]], alignment: int
) -> dict[str, GgufTensor]:
    """The tensors, each of which begins where the one before it ends, up to the next multiple of the alignment."""
    begin = -(-cursor.place // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    end = 0
    for name, kind, shape, offset in described:
        if name in tensors:
            raise cursor.damaged(f"tensor {name!r} is there twice")
        if offset != end:
            raise cursor.damaged(f"tensor {name!r} begins at {offset} and not at {end}, where the one before it ends")
        tensor = GgufTensor(cursor.file, kind, shape, begin + offset)
        length = math.prod(shape[:-1]) * tensor.row_bytes
        if begin + offset + length > cursor.total:
            raise cursor.damaged(f"tensor {name!r} reaches past its end, {cursor.total} bytes")
        end = offset + -(-length // alignment) * alignment
        tensors[name] = tensor
    return tensors
