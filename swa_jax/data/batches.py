"""Batches of training data: sources opened, mixed and cut into global batches, as an iterator that resumes exactly.

Every source is random access: sample i is a pure function of (source, seed, i), and global batch b is samples b * B
to (b + 1) * B - 1, whichever process reads which of its rows. The state of the iterator is thus one number, the global
batches handed out, beside a fingerprint of the data that it counts in.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grain
import numpy as np

from pallas_kernels.math.spec import NEVER
from swa_jax.base.errors import ConfigError
from swa_jax.base.files import sum_of_file, sum_of_json
from swa_jax.data.chains import Chains, Passages
from swa_jax.data.distilled import read_distilled
from swa_jax.data.documents import document_hash, is_held_out, read_documents, read_prompts, tokenizer_hash
from swa_jax.data.haystack import Haystack
from swa_jax.data.lessons import Dictionary, Lesson, Needles, RepeatedTokens
from swa_jax.data.packing import PackedPrompts, PackedText, TokenDocuments
from swa_jax.data.sources import ANSWERED, GENERATED, SourceConfig, source_files
from swa_jax.data.stored import READERS, StoredDocuments, read_manifest
from swa_jax.data.tokenizer import Tokenizer

STATE_VERSION = 2  # of the order of samples: raise it when equal arguments give other batches than before
ENDLESS = 1 << 60  # batches


def make_batches(
    sources: Sequence[SourceConfig],
    tokenizer: Tokenizer,
    *,
    length: int,
    batch_size: int,
    seed: int,
    rows: slice | None = None,
    held_out: bool = False,
    top_logprobs: int = 0,
) -> Batches:
    """An iterator of batches; `get_state()` and `set_state()` resume it exactly, on any number of processes.

    A batch is a dict of `tokens` [B, T] int32, `segment_ids` [B, T] int32 (0 is padding) and `weights` [B, T] f32, the
    weight of each token as a target; B is the number of `rows`. If a source has prompts and answers there is also
    `full_from` [B, S] int32, where S is the most segments that a row can have: the position in segment s + 1 of its
    answer's first token, `pallas_kernels.math.spec.NEVER` where there is none. With `top_logprobs` = K there are also
    `top_tokens` [B, T, K] int32 and `top_logprobs` [B, T, K] f32, of the places of the answers' tokens.

    Args:
      length: T, tokens a row.
      batch_size: rows of a global batch.
      rows: which rows of each global batch this process reads, contiguous; None is all of them.
      held_out: read only the documents that `SourceConfig.held_out` keeps from training, each source in order and once;
        rows of padding fill up the last batch. Otherwise the iterator has no end.
      top_logprobs: K, how many log-probabilities a token are read of distilled data, which all sources must be.

    Raises `ConfigError`: data that is missing, damaged, too small or not the tokenizer's; while iterating, too.
    """
    if not sources:
        raise ConfigError("data is empty: name at least one source")
    taken = range(batch_size)[rows if rows is not None else slice(None)]
    if not taken or taken.step != 1:
        raise ConfigError(f"rows is {rows}: not a run of the {batch_size} rows of a global batch")
    samples = [
        open_source(
            source,
            tokenizer,
            length=length,
            seed=None if held_out else seed + i,
            held_out=held_out,
            top_logprobs=top_logprobs,
        )
        for i, source in enumerate(sources)
        if source.held_out or not held_out
    ]
    if not samples:
        raise ConfigError("no source holds anything out: set 'held_out' of at least one")
    if held_out:
        mixed: Any = _Once(samples)
    elif len(samples) == 1:
        mixed = samples[0]
    else:
        sets = [grain.MapDataset.source(sample) for sample in samples]
        mixed = grain.MapDataset.mix(sets, [source.weight for source in sources])
    segments = None
    if any(isinstance(sample, PackedPrompts) for sample in samples):
        segments = max(sample.max_segments() for sample in samples)
    sizes = {"sequence_length": length, "batch_size": batch_size, "seed": seed, "held_out": held_out}
    count = -(-len(mixed) // batch_size) if held_out else ENDLESS
    batches = _GlobalBatches(mixed, batch_size, taken, segments, count)
    threads = READERS if any(source.kind == "tokens" for source in sources) else 1
    return Batches(batches, _fingerprint(sources, tokenizer, sizes), samples, threads)


def _fingerprint(sources: Sequence[SourceConfig], tokenizer: Tokenizer, sizes: dict[str, Any]) -> dict[str, Any]:
    """What decides the order and the content of all batches."""
    found = {
        "version": STATE_VERSION,
        **sizes,
        "tokenizer": tokenizer_hash(tokenizer)[:16],
        "number of sources": len(sources),
    }
    for i, source in enumerate(sources):
        values = dataclasses.asdict(source) | {"files": content_sum(source)}  # wherever they lie
        found |= {f"data.{i}.{key}": value for key, value in values.items()}
    return found


def open_source(
    source: SourceConfig,
    tokenizer: Tokenizer,
    *,
    length: int,
    seed: int | None,
    held_out: bool = False,
    top_logprobs: int = 0,
) -> Any:
    """The random-access samples of one source; a source of documents without the held-out ones, or only those.

    With `seed=None`, documents are read once and in order.
    """
    files = source_files(source)
    if source.kind in GENERATED:
        return _open_lesson(source, tokenizer, files, length=length, seed=seed or 0)
    if source.kind in ANSWERED:
        if source.kind == "distilled":
            prompts = read_distilled(files, tokenizer, top_logprobs)
        else:
            prompts = read_prompts(files, tokenizer, source.prompt_field, source.answer_field)
        chosen = _chosen([prompt.tokens for prompt in prompts], source, held_out)
        return PackedPrompts(prompts if chosen is None else [prompts[i] for i in chosen], length, seed)
    documents: TokenDocuments
    if source.kind == "tokens":
        documents = StoredDocuments(files, tokenizer)
        sizes = documents.sizes
    else:
        documents = read_documents(files, tokenizer, source.text_field, source.split)
        sizes = np.array([len(document) for document in documents])
    chosen = _chosen(documents, source, held_out)
    if chosen is not None:
        documents, sizes = _Chosen(documents, chosen), sizes[chosen]
    return PackedText(documents, length, seed, sizes=sizes, name=f"the text of {', '.join(source.files)}")


def _open_lesson(source: SourceConfig, tokenizer: Tokenizer, files: tuple[Path, ...], **row: int) -> Lesson:
    if source.kind == "dictionary":
        return Dictionary(tokenizer, **row)
    if source.kind == "passages":
        return Passages(tokenizer, **row)
    if source.kind == "chains":
        haystack = Haystack(tokenizer, files) if source.noise == "text" else None
        options = {name: getattr(source, name) for name in ("num_chains", "hops", "num_questions", "sums")}
        return Chains(tokenizer, haystack, **row, **options)
    haystack = Haystack(tokenizer, files)
    if source.kind == "repeats":
        return RepeatedTokens(tokenizer.num_ids, haystack, **row)
    return Needles(tokenizer, haystack, **row, num_keys=source.num_keys, num_questions=source.num_questions)


def check_source(source: SourceConfig, tokenizer: Tokenizer | None = None) -> None:
    """Find out early, and without reading the documents, what opening the source would stumble over.

    Raises `ConfigError`: a file or folder is missing, or its tokens are damaged or of another tokenizer.
    """
    files = source_files(source)
    if source.kind == "tokens":
        StoredDocuments(files, tokenizer)


class Batches(grain.DatasetIterator):
    """Global batches, or this process's rows of them; what `make_batches` returns."""

    def __init__(self, batches: _GlobalBatches, fingerprint: dict[str, Any], sources: Sequence[Any], threads: int):
        super().__init__()
        self._sources = sources
        self._threads = threads
        self._batches, self._fingerprint = batches, fingerprint
        self._done = 0
        self._reader: grain.DatasetIterator | None = None

    def __next__(self) -> dict[str, np.ndarray]:
        self._assert_not_closed()
        if self._reader is None:
            # Threads keep the next batches ready while a step runs.
            options = grain.ReadOptions(num_threads=self._threads, prefetch_buffer_size=max(2, self._threads))
            self._reader = iter(grain.MapDataset.source(self._batches)[self._done :].to_iter_dataset(options))
        try:
            batch = next(self._reader)
        except BaseException:
            self._stop_reading()  # what the thread has read ahead no longer follows on what was handed out
            raise
        self._done += 1
        return batch

    def check(self) -> None:
        """Read one sample of every source, to find out early what opening them did not show; nothing is handed out."""
        for source in self._sources:
            source[0]

    def get_state(self) -> dict[str, Any]:
        """Global batches handed out, and what they were made of: plain JSON, the same in every process."""
        return {"batches": self._done, "data": dict(self._fingerprint)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on where the iterator was that gave `state`.

        Raises `ConfigError`: the state counts batches of other data; the sentence names the first thing that differs.
        """
        try:
            done, before = int(state["batches"]), dict(state["data"])
        except (KeyError, TypeError, ValueError):
            raise ConfigError(
                "the data cannot be resumed: its state is not one that make_batches's iterator gave"
            ) from None
        for key in [*self._fingerprint, *before]:
            if before.get(key) != self._fingerprint.get(key):
                raise ConfigError(
                    f"the data cannot be resumed without losing or repeating samples: '{key}' was "
                    f"{before.get(key)} and is now {self._fingerprint.get(key)}; put it back, or start a new run"
                )
        self._stop_reading()
        self._done = done

    def close(self) -> None:
        self._stop_reading()
        super().close()

    def _stop_reading(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None


class _GlobalBatches:
    """Batch b as a random-access item, reduced to the rows of one process."""

    def __init__(self, samples: Any, batch_size: int, rows: range, segments: int | None, count: int):
        self.samples, self.batch_size, self.rows = samples, batch_size, rows
        self.segments, self.count = segments, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        first = int(index) * self.batch_size
        rows = [self.samples[first + row] for row in self.rows]
        batch = {name: np.stack([row[name] for row in rows]) for name in rows[0] if name != "full_from"}
        if self.segments is not None:
            full_from = np.full((len(rows), self.segments), NEVER, np.int32)
            for i, row in enumerate(rows):
                boundaries = row.get("full_from", ())
                full_from[i, : len(boundaries)] = boundaries
            batch["full_from"] = full_from
        return batch


class _Once:
    """The samples of finite sources, then rows of padding. As far as one reads, every source has its share."""

    def __init__(self, sources: Sequence[PackedText | PackedPrompts]):
        self.sources = sources
        self.firsts = np.cumsum([0, *(len(source) for source in sources)])
        # By where a sample stands in its source, from 0 to 1.
        self.order = np.argsort(
            np.concatenate([(np.arange(len(source)) + 0.5) / len(source) for source in sources]), kind="stable"
        )

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        if index >= len(self):
            first = self.sources[0][0]
            return {name: np.zeros_like(x) for name, x in first.items() if name != "full_from"}
        sample = int(self.order[index])
        which = int(np.searchsorted(self.firsts, sample, side="right")) - 1
        return self.sources[which][sample - int(self.firsts[which])]


class _Chosen:
    """Some of the documents, which stay where they are."""

    def __init__(self, documents: TokenDocuments, places: np.ndarray):
        self.documents, self.places = documents, places

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.documents[self.places[index]]


def _chosen(documents: TokenDocuments, source: SourceConfig, held_out: bool) -> np.ndarray | None:
    """Places of the documents to read, None for all of them."""
    if not source.held_out:
        return None
    if isinstance(documents, StoredDocuments):
        hashes = documents.hashes
    else:
        hashes = np.array([document_hash(documents[i]) for i in range(len(documents))], np.uint64)
    places = np.flatnonzero(is_held_out(hashes, source.held_out) == held_out)
    if not len(places):
        raise ConfigError(
            f"'held_out' = {source.held_out} of the {len(hashes)} documents of {', '.join(source.files)} leaves "
            f"{'none to hold out' if held_out else 'none to train on'}: give more documents or another share"
        )
    return places


def content_sum(source: SourceConfig) -> str:
    """The SHA-256 in brief of every byte of a source's files; of tokens, of their manifests, which have the sums."""
    files = source_files(source)
    if source.kind == "tokens":
        return sum_of_json([read_manifest(folder)["sha256"] for folder in files])[:12]
    inside = [p for f in files for p in (sorted(f.rglob("*")) if f.is_dir() else [f]) if p.is_file()]
    return sum_of_json([_sum_of(file, _state_of(file)) for file in inside])[:12]


def _state_of(file: Path) -> tuple[int, ...]:
    """What changes when a file is written. The time of its last change, unlike that of its content, cannot be set."""
    status = file.stat()
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


@functools.lru_cache(maxsize=1 << 16)  # stages and validations of a process read the same files
def _sum_of(file: Path, state: tuple[int, ...]) -> str:
    return sum_of_file(file)
