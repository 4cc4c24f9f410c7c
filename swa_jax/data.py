"""Training data: local text, packed with segment ids, and mixtures, as a resumable grain pipeline.

Every source is random access: sample i is a pure function of (source, seed, i), so the whole state of the pipeline is
one index, and a resumed run reads exactly the batches an uninterrupted one would have read.

A batch is a dict of `tokens` [B, T] int32, `segment_ids` [B, T] int32 (0 is padding) and `weights` [B, T] f32, the
weight of each token as a target.
"""

from __future__ import annotations

import dataclasses
import functools
import glob
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import grain
import numpy as np

from swa_jax.config import ConfigError
from swa_jax.evaluate.needle import Haystack, library_files
from swa_jax.recall_data import Dictionary, Needles, Repeats
from swa_jax.tokenizer import Tokenizer

STANDARD_LIBRARY = (
    "stdlib"  # as a file name: the interpreter's own library sources, less those held out for evaluation
)


@dataclasses.dataclass(frozen=True)
class SourceConfig:
    """One source of a mixture."""

    kind: Literal["text", "needles", "dictionary", "repeats"] = "text"  # the last three: swa_jax.recall_data
    files: tuple[str, ...] = (
        STANDARD_LIBRARY,
    )  # text and haystacks: files, folders (*.txt, *.md, *.py) or globs
    weight: float = 1.0  # share of the samples, relative to the other sources
    num_keys: int = 1  # needles
    num_questions: int = 1  # needles


class PackedText:
    """Documents shuffled anew each epoch, laid end to end and cut into rows of `length` tokens.

    A document that does not fit a row goes on in the next one as a new segment. Row i is random access.
    """

    def __init__(self, documents: Sequence[np.ndarray], length: int, seed: int):
        self.documents, self.length, self.seed = documents, length, seed
        self.sizes = np.array([len(d) for d in documents])
        self.rows = int(self.sizes.sum()) // length  # an epoch
        self._epoch: tuple[int, np.ndarray, np.ndarray] | None = None  # number, order, ends
        if self.rows == 0:
            raise ConfigError(
                f"the text has {self.sizes.sum()} tokens, less than one row of sequence_length = {length}: add files"
            )

    def __len__(self) -> int:
        return self.rows * 1_000_000  # epochs without end

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        epoch, row = divmod(int(index), self.rows)
        order, ends = self._order(epoch)
        start, stop = row * self.length, (row + 1) * self.length
        tokens = np.empty(self.length, np.int32)
        segments = np.empty(self.length, np.int32)
        place = int(np.searchsorted(ends, start, side="right"))
        filled, segment = 0, 1
        while filled < self.length:
            document = self.documents[order[place]]
            begin = ends[place] - len(document)
            piece = document[max(0, start - begin) : stop - begin]
            tokens[filled : filled + len(piece)], segments[filled : filled + len(piece)] = piece, segment
            filled, place, segment = filled + len(piece), place + 1, segment + 1
        return {"tokens": tokens, "segment_ids": segments, "weights": np.ones(self.length, np.float32)}

    def _order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        cached = self._epoch
        if cached is None or cached[0] != epoch:
            order = np.random.default_rng([self.seed, epoch]).permutation(len(self.documents))
            cached = self._epoch = (epoch, order, np.cumsum(self.sizes[order]))
        return cached[1], cached[2]


def text_files(names: Sequence[str]) -> tuple[Path, ...]:
    """The files that names, folders and globs stand for, in a fixed order; nothing found is an error."""
    found: list[Path] = []
    for name in names:
        if name == STANDARD_LIBRARY:
            here = library_files(held_out=False)
        elif Path(name).is_dir():
            here = sorted(p for p in Path(name).rglob("*") if p.suffix in (".txt", ".md", ".py"))
        else:
            here = sorted(Path(p) for p in glob.glob(name, recursive=True) if Path(p).is_file())
        if not here:
            raise ConfigError(f"data files '{name}': no such file, and no folder or glob with text in it")
        found += here
    return tuple(found)


@functools.lru_cache(maxsize=4)  # the stages of a run read the same text
def read_documents(files: tuple[Path, ...], tokenizer: Tokenizer) -> list[np.ndarray]:
    """Each file as token ids [n] int32 between the tokenizer's start and end tokens; empty files are left out."""
    end = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    return [np.array(tokenizer.start_ids + tokenizer.encode(text) + end, np.int32) for text in texts if text]


def make_batches(
    sources: Sequence[SourceConfig], tokenizer: Tokenizer, *, length: int, batch_size: int, seed: int
) -> grain.DatasetIterator:
    """An endless iterator of batches; `get_state()` and `set_state()` resume it exactly."""
    if not sources:
        raise ConfigError("data is empty: name at least one source")
    datasets = [
        grain.MapDataset.source(_source(source, tokenizer, length, seed + i))
        for i, source in enumerate(sources)
    ]
    weights = [source.weight for source in sources]
    mixed = datasets[0] if len(datasets) == 1 else grain.MapDataset.mix(datasets, weights)
    # One reading thread keeps the next batches ready while a step runs; the state counts batches handed out.
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
    return iter(mixed.batch(batch_size).to_iter_dataset(options))


def _source(source: SourceConfig, tokenizer: Tokenizer, length: int, seed: int) -> Any:
    """The random-access source that a configuration names."""
    if source.kind == "dictionary":
        return Dictionary(tokenizer, length=length, seed=seed)
    files = text_files(source.files)
    if source.kind == "text":
        return PackedText(read_documents(files, tokenizer), length, seed)
    haystack = Haystack(tokenizer, files)
    if source.kind == "repeats":
        return Repeats(tokenizer.vocab_size, haystack, length=length, seed=seed)
    return Needles(
        tokenizer,
        haystack,
        length=length,
        seed=seed,
        num_keys=source.num_keys,
        num_questions=source.num_questions,
    )
