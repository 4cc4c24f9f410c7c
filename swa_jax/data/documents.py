"""Documents and prompts from files: plain text, JSONL, Parquet, ArrayRecord, and Hugging Face `datasets`."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from swa_jax.base.errors import ConfigError, import_optional, not_installed
from swa_jax.base.files import parse_json_value, sum_of_json
from swa_jax.base.settings import nearest
from swa_jax.data.haystack import read_text
from swa_jax.data.sources import RECORDS
from swa_jax.data.tokenizer import PROBE, Tokenizer

BATCH_TEXTS, BATCH_CHARACTERS = (512, 4_000_000)  # what is tokenised at a time, by as many threads as there are cores


class Top(NamedTuple):
    """The likeliest tokens at the place of each token of an answer, as another model sees them."""

    tokens: np.ndarray  # [n, K] int32
    logprobs: np.ndarray  # [n, K], nats


class Answered(NamedTuple):
    """A prompt and its answer; the answer starts at `tokens[boundary]`, which is a learned token."""

    tokens: np.ndarray  # [n] int32
    boundary: int
    top: Top | None = None  # of the tokens from the boundary on


# ---- tokens ----


@functools.lru_cache(maxsize=4)  # the stages of a run read the same text
def read_documents(
    files: tuple[Path, ...], tokenizer: Tokenizer, text_field: str = "text", split: str = "train"
) -> list[np.ndarray]:
    """Each document as token ids [n] int32 between the tokenizer's start and end tokens; empty ones are left out."""
    texts = (text for file in files for text in read_texts(file, text_field, split))
    documents = list(encode_documents(texts, tokenizer))
    if tokenizer.num_ids < tokenizer.vocab_size:
        for number, tokens in enumerate(documents):
            if tokens.max(initial=0) >= tokenizer.num_ids:
                _refuse(number, files, tokenizer, text_field, split)
    return [tokens for tokens in documents if tokens.size]


def _refuse(number: int, files: Sequence[Path], tokenizer: Tokenizer, text_field: str, split: str) -> None:
    """Say where in the files the document of that number is, and what is wrong with it."""
    places = ((file, i, text) for file in files for i, text in enumerate(read_texts(file, text_field, split), 1))
    file, record, text = next(itertools.islice(places, number, None))
    with at(_record(file, record) if file.is_dir() or file.suffix in RECORDS else str(file)):
        tokenizer.encode(text)


@contextlib.contextmanager
def at(where: str) -> Iterator[None]:
    """Say `where` before what is wrong with a text."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


@functools.lru_cache(maxsize=4)
def read_prompts(files: tuple[Path, ...], tokenizer: Tokenizer, prompt_field: str, answer_field: str) -> list[Answered]:
    """Each record's prompt after the tokenizer's start tokens, and its answer before the end token."""
    end = _end_ids(tokenizer)
    prompts = []
    fields = {"prompt_field": prompt_field, "answer_field": answer_field}
    for file in files:
        for number, (prompt, answer) in enumerate(read_records(file, fields), 1):
            with at(_record(file, number)):
                head = tokenizer.start_ids + tokenizer.encode(prompt)
                tokens = head + tokenizer.encode(answer) + end
            prompts.append(Answered(np.array(tokens, np.int32), len(head)))
    return prompts


def encode_documents(texts: Iterable[str], tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """Token ids [n] int32 of each text in turn, start and end tokens included; no ids for an empty text."""
    end = _end_ids(tokenizer)
    for batch in _batches(texts):
        for text, encoding in zip(
            batch, tokenizer.backend.encode_batch_fast(batch, add_special_tokens=False), strict=True
        ):
            yield np.array(tokenizer.start_ids + encoding.ids + end if text else [], np.int32)


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    characters = 0
    for text in texts:
        batch.append(text)
        characters += len(text)
        if len(batch) == BATCH_TEXTS or characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _end_ids(tokenizer: Tokenizer) -> list[int]:
    return [] if tokenizer.eos_id is None else [tokenizer.eos_id]


# ---- hashes ----


def document_hash(tokens: np.ndarray) -> int:
    """64 bits of a document's tokens: its checksum on disk, and what decides whether it is held out."""
    data = np.ascontiguousarray(tokens, "<i4").tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def is_held_out(hashes: np.ndarray, share: float) -> np.ndarray:
    """Which of the documents with these hashes [n] uint64 training never reads: [n] bool."""
    return hashes / 2.0**64 < share


@functools.lru_cache(maxsize=4)
def tokenizer_hash(tokenizer: Tokenizer) -> str:
    """SHA-256 of what a tokenizer does: vocabulary, start and end tokens, and the ids of a tricky text.

    Not of its file, whose bytes change with the library that writes it.
    """
    vocabulary = sorted(tokenizer.backend.get_vocab(with_added_tokens=True).items())
    what = [vocabulary, tokenizer.start_ids, tokenizer.eos_id, tokenizer.encode(PROBE)]
    return sum_of_json(what)


# ---- records ----


def read_texts(file: Path, text_field: str, split: str = "train") -> Iterator[str]:
    """The documents of a file, or of a folder that Hugging Face `datasets` saved. Missing ones (null) are empty."""
    if file.is_dir():
        texts = _huggingface(file, {"text_field": text_field}, split)
    elif file.suffix in RECORDS:
        texts = read_records(file, {"text_field": text_field})
    else:
        texts = iter([[read_text([file])]])
    for [text] in texts:
        yield text


def read_records(file: Path, fields: Mapping[str, str]) -> Iterator[list[str]]:
    """The named fields of every record; `fields` maps the configuration's key to the field's name.

    A file without any record raises `ConfigError`: whatever should have filled it has failed.
    """
    readers = {".jsonl": _jsonl, ".parquet": _parquet, ".array_record": _array_record}
    if file.suffix not in readers:
        raise ConfigError(f"{file} has no records with fields: expected one of {', '.join(RECORDS)}")
    record = None
    for record in readers[file.suffix](file, fields):
        yield record
    if record is None:
        raise ConfigError(f"{file} is empty: it has no records; make it again, or leave it out")


def _jsonl(file: Path, fields: Mapping[str, str]) -> Iterator[list[str]]:
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                where = f"{file}, line {number}"
                yield _pick(parse_json_value(line, where), fields, where)


def _array_record(file: Path, fields: Mapping[str, str]) -> Iterator[list[str]]:
    import grain

    try:
        records = grain.sources.ArrayRecordDataSource([str(file)])
        for number in range(len(records)):
            where = _record(file, number + 1)
            yield _pick(parse_json_value(records[number], where), fields, where)
    except ConfigError:
        raise
    except (RuntimeError, ValueError, IndexError) as error:
        raise ConfigError(f"{file} cannot be read as ArrayRecord: {_first_line(error)}") from None


def _parquet(file: Path, fields: Mapping[str, str]) -> Iterator[list[str]]:
    parquet = import_optional("pyarrow.parquet", not_installed(f"reading {file} needs pyarrow", extra="data"))
    try:
        table = parquet.ParquetFile(file, page_checksum_verification=True)
        _check_fields(table.schema_arrow.names, fields, str(file))
        number = 0
        for batch in table.iter_batches(batch_size=1024, columns=list(fields.values())):
            for record in batch.to_pylist():
                number += 1
                yield _pick(record, fields, _record(file, number))
    except ConfigError:
        raise
    except (ValueError, OSError) as error:  # what pyarrow's own errors are
        raise ConfigError(f"{file} cannot be read as Parquet: {_first_line(error)}") from None


def _huggingface(folder: Path, fields: Mapping[str, str], split: str) -> Iterator[list[str]]:
    need = f"reading {folder} needs datasets, which is not installed: run pip install datasets"
    datasets = import_optional("datasets", ConfigError(need))
    saved = any((folder / name).exists() for name in ("dataset_dict.json", "state.json"))
    try:
        data = datasets.load_from_disk(str(folder)) if saved else datasets.load_dataset(str(folder), split=split)
    except Exception as error:  # its errors have no class in common, and some keep the reason in their cause
        reason = _first_line(error.__cause__ or error)
        raise ConfigError(f"{folder} cannot be read as a data set: {reason}") from None
    if isinstance(data, Mapping):
        if split not in data:
            raise ConfigError(f"{folder} has no split '{split}' (split){nearest(split, list(data))}")
        data = data[split]
    _check_fields(data.column_names, fields, str(folder))
    for number, record in enumerate(data.select_columns(list(fields.values())), 1):  # pictures would be decoded too
        yield _pick(record, fields, _record(folder, number))


def _pick(record: Any, fields: Mapping[str, str], where: str) -> list[str]:
    if not isinstance(record, Mapping):
        raise ConfigError(f"{where}: expected an object with named fields, got {type(record).__name__}")
    _check_fields(list(record), fields, where)
    texts = [record[field] for field in fields.values()]
    for field, text in zip(fields.values(), texts, strict=True):
        if not isinstance(text, str | None):
            raise ConfigError(f"{where}: the field '{field}' must be text, got {type(text).__name__}")
        if not text and "text_field" not in fields:  # an empty document is left out, half an example is a mistake
            raise ConfigError(f"{where}: the field '{field}' is empty")
    return ["" if text is None else text for text in texts]


def _check_fields(names: Sequence[str], fields: Mapping[str, str], where: str) -> None:
    for key, field in fields.items():
        if field not in names:
            named = "" if key == field else f" ({key})"
            raise ConfigError(f"{where} has no field '{field}'{named}{nearest(field, names)}")


def _record(file: Path, number: int) -> str:
    return f"{file}, {'line' if file.suffix == '.jsonl' else 'record'} {number}"


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
