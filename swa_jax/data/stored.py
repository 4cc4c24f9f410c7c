"""Documents tokenised ahead: shards of token ids that are read a document at a time, and an index of where they lie.

A folder has `manifest.json` and, for each shard, `00000.tokens` (token ids one after the other, little-endian uint16
or uint32) and `00000.index` (for each document its end in the shard, in tokens, and the hash of its tokens, both
uint64).

What is read is verified: sizes and the indices' SHA-256 when a folder is opened, each document by its hash whenever it
is read. `verify` reads everything and compares the SHA-256 of every shard.
"""

from __future__ import annotations

import concurrent.futures
import functools
import json
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from swa_jax.base.errors import ConfigError
from swa_jax.base.files import sum_of, sum_of_file, sum_of_json
from swa_jax.data.documents import document_hash, tokenizer_hash
from swa_jax.data.sources import MANIFEST
from swa_jax.data.tokenizer import Tokenizer

FORMAT = "swa-jax tokens 2"
UNFINISHED = "unfinished.json"  # in place of the manifest until everything is there
INDEX = np.dtype([("end", "<u8"), ("hash", "<u8")])
READERS = 16  # threads that read from a disk, which may be far away: a bucket answers in tens of milliseconds
OPEN_SHARDS = 256  # files open at a time, of all sources together; many systems allow a process 1024
READ_PAUSES = (0, 1, 5, 25)  # seconds before each try

log = logging.getLogger(__name__)


class StoredDocuments:
    """The documents of one or more folders; document i is [n] uint16 or uint32.

    Raises `ConfigError` for data that is not there, another tokenizer's, cut short or damaged.
    """

    sizes: np.ndarray  # [documents] int64: tokens
    hashes: np.ndarray  # [documents] uint64, see `documents.document_hash`

    def __init__(self, folders: Sequence[Path], tokenizer: Tokenizer | None = None):
        self.manifests = [read_manifest(folder) for folder in folders]
        self._files: list[tuple[Path, str]] = []  # and their type, of each shard
        shards = []
        for folder, manifest in zip(folders, self.manifests, strict=True):
            if tokenizer is not None and manifest["tokenizer"] != tokenizer_hash(tokenizer):
                raise ConfigError(
                    f"{folder} was tokenised with another tokenizer ({manifest['tokenizer_file']}, "
                    f"{manifest['vocab_size']} tokens) than this one ({tokenizer.vocab_size} tokens): name that "
                    "one, or tokenise again"
                )
            for shard in manifest["shards"]:
                self._files.append((folder / shard["name"], manifest["dtype"]))
                shards.append((folder, shard))
        with concurrent.futures.ThreadPoolExecutor(READERS) as pool:
            indices = list(pool.map(_read_index, *zip(*shards, strict=True)))
        self._first = np.cumsum([0] + [len(index) for index in indices])  # of each shard: its first document
        self._ends = np.concatenate([index["end"] for index in indices]).astype(np.int64)
        self.hashes = np.concatenate([index["hash"] for index in indices])
        self.sizes = np.diff(self._ends, prepend=0)
        for first, index in zip(self._first, indices, strict=False):
            self.sizes[first] = index["end"][0]  # counts start anew with each shard
        self._num_ids = 1 << 32 if tokenizer is None else tokenizer.num_ids
        self._read_last = threading.local()  # the rows of a long document follow each other
        self._owner = object()  # another folder may lie under the same name later

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> np.ndarray:
        index = int(index)
        last: tuple[int, np.ndarray] | None = getattr(self._read_last, "document", None)
        if last is not None and last[0] == index:
            return last[1]
        shard = int(np.searchsorted(self._first, index, side="right")) - 1
        tokens = self._read(shard, int(self._ends[index] - self.sizes[index]), int(self.sizes[index]))
        if document_hash(tokens) != self.hashes[index]:
            raise ConfigError(
                f"{self._files[shard][0]} is damaged: its document {index - self._first[shard]} is not what was "
                "written; put back a copy, or tokenise again"
            )
        if tokens.max(initial=0) >= self._num_ids:
            raise ConfigError(
                f"{self._files[shard][0]}, document {index - self._first[shard]}, holds token {tokens.max()}: the "
                f"model has embeddings for ids below {self._num_ids} only"
            )
        self._read_last.document = (index, tokens)
        return tokens

    def _read(self, shard: int, start: int, count: int) -> np.ndarray:
        """Not by mapping: a file that is cut short, or a disk that fails, would end the process without a word."""
        file, dtype = self._files[shard]
        size = np.dtype(dtype).itemsize
        for pause in READ_PAUSES:
            time.sleep(pause)
            try:
                opened = _opened(file, self._owner)
                data = os.pread(opened.number, count * size, start * size)
                return np.frombuffer(data, dtype, len(data) // size)
            except OSError as error:  # a server or a bucket may be away for a moment, which is not to end a run
                problem = f"{file} cannot be read: {error.strerror}"
                log.warning(problem)
                _opened.cache_clear()  # what was open may be of no use after that
        raise ConfigError(f"{problem}; see to its disk, and start the same command again")


class _Descriptor:
    """An open file, closed when nobody has it any more."""

    def __init__(self, file: Path):
        self.number = os.open(file, os.O_RDONLY)
        weakref.finalize(self, os.close, self.number)


@functools.lru_cache(maxsize=OPEN_SHARDS)  # it holds no lock meanwhile: a bucket takes its time to open a file
def _opened(file: Path, owner: object) -> _Descriptor:
    return _Descriptor(file)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest, itself verified."""
    file = folder / MANIFEST
    if not file.is_file():
        if (folder / UNFINISHED).exists():
            raise ConfigError(f"{folder} is not finished: run `swa-jax data tokenize` on it again, and it goes on")
        raise ConfigError(f"{folder} has no {MANIFEST}: it is no folder that `swa-jax data tokenize` made")
    try:
        manifest = json.loads(file.read_bytes())
        whole = manifest == sealed(manifest)
    except (ValueError, TypeError, AttributeError):
        whole = False
    if not whole:
        raise ConfigError(f"{file} is damaged: it is not what was written; put back a copy, or tokenise again")
    if manifest["format"] != FORMAT:
        raise ConfigError(f"{file} has format '{manifest['format']}', this version reads '{FORMAT}'")
    return manifest


def sealed(manifest: dict[str, Any]) -> dict[str, Any]:
    """The manifest with the SHA-256 of everything else in it."""
    rest = {key: value for key, value in manifest.items() if key != "sha256"}
    return rest | {"sha256": sum_of_json(rest)}


def verify(folder: Path, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
    """Compare the SHA-256 of every shard with the manifest's; `progress` is told of bytes read.

    Raises `ConfigError`: a file is missing, cut short or damaged; the sentence names it.
    """
    shards = read_manifest(folder)["shards"]
    done, total = 0, sum(shard["bytes"] for shard in shards)

    def read(size: int) -> None:
        nonlocal done
        done += size
        progress(done, total)

    for shard in shards:
        _read_index(folder, shard)
        file = folder / shard["name"]
        if sum_of_file(file, progress=read) != shard["sha256"]:
            raise ConfigError(
                f"{file} is damaged: its SHA-256 is not the manifest's; put back a copy, or tokenise again"
            )


def _read_index(folder: Path, shard: dict[str, Any]) -> np.ndarray:
    _check_size(folder / shard["name"], shard["bytes"])
    file = folder / shard["index"]
    _check_size(file, shard["index_bytes"])
    data = file.read_bytes()
    if sum_of(data) != shard["index_sha256"]:
        raise ConfigError(f"{file} is damaged: its SHA-256 is not the manifest's; put back a copy, or tokenise again")
    return np.frombuffer(data, INDEX)


def _check_size(file: Path, size: int) -> None:
    if not file.is_file():
        raise ConfigError(f"{file} is missing, but the manifest beside it names it: put back a copy")
    actual = file.stat().st_size
    if actual != size:
        state = "empty" if actual == 0 else f"{actual} bytes long"
        raise ConfigError(f"{file} is {state}, but was written with {size} bytes: put back a copy")
