"""Tokenising ahead: documents into a folder of shards that `stored.StoredDocuments` reads.

Shards are written one after the other, each under another name until it is whole. After each one `unfinished.json`
says which documents are done; run again, the work goes on behind them and gives the same bytes. What is not read yet
may have been mended in between. The manifest comes last: without it nobody reads the folder.
"""

from __future__ import annotations

import array
import contextlib
import hashlib
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from swa_jax.base.errors import ConfigError, full_disk
from swa_jax.base.files import alone, read_json, sum_of, write_bytes, write_json
from swa_jax.data.documents import document_hash, encode_documents, read_texts, tokenizer_hash
from swa_jax.data.sources import MANIFEST, SourceConfig, source_files
from swa_jax.data.special_tokens import SETTINGS, TOKENS_MAP, read_beside
from swa_jax.data.stored import FORMAT, INDEX, UNFINISHED, read_manifest, sealed
from swa_jax.data.tokenizer import Tokenizer, load_tokenizer

SHARD_TOKENS = 1 << 27


def tokenize(
    source: SourceConfig,
    tokenizer_path: Path,
    out: Path,
    *,
    shard_tokens: int = SHARD_TOKENS,
    progress: Callable[[int, int, str], None] = lambda done, total, text: None,
) -> dict[str, Any]:
    """Write the documents of `source` (kind text or huggingface) to the folder `out`; returns its manifest.

    Args:
      tokenizer_path: tokenizer.json, or a folder that has one; copied into `out`.
      shard_tokens: a shard ends with the document that brings it to this many tokens.
      progress: called with the files done, all of them, and a text with the file at work and the tokens done.

    Raises `ConfigError`: `out` holds something else, or a document cannot be read.
    """
    tokenizer = load_tokenizer(tokenizer_path)
    state: dict[str, Any] = {
        "format": FORMAT,
        "dtype": "<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4",
        "tokenizer": tokenizer_hash(tokenizer),
        "tokenizer_file": str(tokenizer_path),
        "vocab_size": tokenizer.vocab_size,
        "kind": source.kind,
        "split": source.split,
        "text_field": source.text_field,
        "shard_tokens": shard_tokens,
        "files": [[file.name, _size(file)] for file in source_files(source)],
        "shards": [],
        "left_out": 0,  # empty documents
        "next": [0, 0],  # file, document
    }
    out.mkdir(parents=True, exist_ok=True)
    with alone(out, "tokenising into"):
        if (out / MANIFEST).exists():
            manifest = read_manifest(out)
            _check_same(out, state, manifest)
            return manifest
        state = _unfinished(out, state)
        _copy_tokenizer(tokenizer_path, out)
        try:
            _write_shards(out, state, source, tokenizer, progress)
        except OSError as error:
            if full_disk(error) is None:
                raise
            raise ConfigError(
                f"{out}: {error.strerror}; its {len(state['shards'])} finished shards stay, and the same command goes "
                "on behind them"
            ) from None
        if not state["shards"]:
            raise ConfigError(f"{', '.join(source.files)}: every document is empty")
        totals = {key: sum(shard[key] for shard in state["shards"]) for key in ("documents", "tokens")}
        manifest = sealed({key: value for key, value in state.items() if key != "next"} | totals)
        write_json(out / MANIFEST, manifest)
        (out / UNFINISHED).unlink()
    return manifest


def _write_shards(
    out: Path,
    state: dict[str, Any],
    source: SourceConfig,
    tokenizer: Tokenizer,
    progress: Callable[[int, int, str], None],
) -> None:
    """The shards behind those that `state` has, which is brought up to date."""
    files, (first, skip) = source_files(source), state["next"]
    shard = _Shard(out, state)
    try:
        for number, file in enumerate(files[first:], first):
            texts = itertools.islice(read_texts(file, source.text_field, source.split), max(skip - 1, 0), None)
            documents = encode_documents(texts, tokenizer)
            if skip:  # the last one that is done stands where it did
                last = np.frombuffer((out / state["shards"][-1]["index"]).read_bytes(), INDEX)["hash"][-1]
                if document_hash(next(documents, np.zeros(0, np.int32))) != last:
                    _refuse(out, f"{file} is not the same up to document {skip}")
            for document, tokens in enumerate(documents, skip + 1):
                shard.add(tokens)
                if shard.tokens >= state["shard_tokens"]:
                    shard.finish([number, document])
                    shard = _Shard(out, state)
                    progress(number, len(files), f"{file.name}: {shard.before:,} tokens")
            progress(number + 1, len(files), f"{file.name}: {shard.before + shard.tokens:,} tokens")
            skip = 0
        if shard.tokens:
            shard.finish([len(files), 0])
    finally:
        shard.discard()


class _Shard:
    """The shard after those that `state` has, written under a name that no reader looks at."""

    def __init__(self, folder: Path, state: dict[str, Any]):
        self.folder, self.state = folder, state
        self.name = f"{len(state['shards']):05}"
        self.before = sum(shard["tokens"] for shard in state["shards"])
        self.tokens = self.left_out = 0
        self._ends, self._hashes = array.array("Q"), array.array("Q")
        self._sha = hashlib.sha256()
        self._partial = folder / f"{self.name}.tokens.partial"
        self._file = open(self._partial, "wb")  # noqa: SIM115

    def add(self, tokens: np.ndarray) -> None:
        if not tokens.size:
            self.left_out += 1
            return
        data = tokens.astype(self.state["dtype"]).tobytes()
        self._file.write(data)
        self._sha.update(data)
        self.tokens += tokens.size
        self._ends.append(self.tokens)
        self._hashes.append(document_hash(tokens))

    def finish(self, place: list[int]) -> None:
        """Give the shard its name and note in `unfinished.json` that the documents before `place` are done."""
        size = self._file.tell()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        index = np.empty(len(self._ends), INDEX)
        index["end"], index["hash"] = self._ends, self._hashes
        write_bytes(self.folder / f"{self.name}.index", index.tobytes())
        os.replace(self._partial, self.folder / f"{self.name}.tokens")
        shard = {
            "name": f"{self.name}.tokens",
            "bytes": size,
            "sha256": self._sha.hexdigest(),
            "index": f"{self.name}.index",
            "index_bytes": index.nbytes,
            "index_sha256": sum_of(index.tobytes()),
            "documents": len(index),
            "tokens": self.tokens,
        }
        changed = {
            "shards": [*self.state["shards"], shard],
            "left_out": self.state["left_out"] + self.left_out,
            "next": place,
        }
        write_json(self.folder / UNFINISHED, self.state | changed)
        self.state.update(changed)

    def discard(self) -> None:
        with contextlib.suppress(OSError):  # a full disk shows again on closing
            self._file.close()
        self._partial.unlink(missing_ok=True)


def _unfinished(out: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    """The state to go on from, which is on disk afterwards."""
    if (out / UNFINISHED).exists():
        state = read_json(out / UNFINISHED)
        if state["shards"]:
            done = state["next"][0]  # files that were read to the end
            read = [one | {"files": one["files"][:done]} for one in (wanted, state)]
            _check_same(out, *read)
            return state | {"files": wanted["files"]}
    elif extra := sorted(path.name for path in out.iterdir()):
        raise ConfigError(f"{out} is not empty (it has {extra[0]}): name a new folder")
    write_json(out / UNFINISHED, wanted)
    return wanted


def _check_same(out: Path, wanted: dict[str, Any], there: dict[str, Any]) -> None:
    for key in ("format", "dtype", "tokenizer", "kind", "split", "text_field", "shard_tokens", "files"):
        if there[key] != wanted[key]:
            what = f"{key} = {there[key]}, not {wanted[key]}"
            if key == "files":
                changed = [now for then, now in zip(there[key], wanted[key], strict=False) if then != now]
                name, size = changed[0] if changed else wanted[key][-1]
                what = f"{len(there[key])} files, and now {len(wanted[key])}: {name} ({size} bytes) is not the same"
            _refuse(out, what)


def _refuse(out: Path, what: str) -> NoReturn:
    raise ConfigError(f"{out} holds tokens of other data ({what}): name a new folder, or delete it")


def _copy_tokenizer(path: Path, out: Path) -> None:
    """Put the tokenizer beside the tokens, so that they can be read as text wherever they go."""
    folder = path if path.is_dir() else path.parent
    write_bytes(out / "tokenizer.json", (path / "tokenizer.json" if path.is_dir() else path).read_bytes())
    for name, data in read_beside(folder).items():
        if name in (SETTINGS, TOKENS_MAP):
            write_bytes(out / name, data)


def _size(file: Path) -> int:
    """Bytes of a file, or of everything in a folder."""
    if file.is_dir():
        return sum(path.stat().st_size for path in file.rglob("*") if path.is_file())
    return file.stat().st_size
