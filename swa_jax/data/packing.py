"""Rows of a fixed length out of documents and prompts, each row a pure function of (data, seed, row number)."""

from __future__ import annotations

import bisect
import functools
import logging
import threading
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from swa_jax.base.errors import ConfigError
from swa_jax.data.documents import Answered

ENDLESS = 1_000_000  # epochs

log = logging.getLogger(__name__)


class TokenDocuments(Protocol):
    """Documents as token ids [n] of any integer type: a list, or what is read from disk when asked for."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> np.ndarray: ...


class PackedText:
    """Documents shuffled anew each epoch, laid end to end and cut into rows of `length` tokens.

    A document that does not fit a row goes on in the next one as a new segment. Row i is random access. Tokens that
    fill no row at the end of an epoch are left out of it.

    With `seed=None` the documents are read once and in order, and padding fills up the last row.

    Args:
      documents: token ids [n] each.
      sizes: [documents] tokens of each, where that is known without reading them.
      name: what the text is called in an error.
    """

    def __init__(
        self,
        documents: TokenDocuments,
        length: int,
        seed: int | None,
        *,
        sizes: np.ndarray | None = None,
        name: str = "the text",
    ):
        self.documents, self.length, self.seed = documents, length, seed
        self.sizes = np.array([len(documents[i]) for i in range(len(documents))]) if sizes is None else sizes
        total = int(self.sizes.sum())
        self.rows = total // length if seed is not None else -(-total // length)  # an epoch
        self._lock = threading.Lock()  # threads that read ahead are in one epoch and the next
        self._ordered = functools.lru_cache(maxsize=2)(functools.partial(_ordered, self.sizes, seed))
        if self.rows == 0:
            raise ConfigError(f"{name} has {total} tokens, less than one row of sequence_length = {length}: add files")

    def __len__(self) -> int:
        return self.rows * (1 if self.seed is None else ENDLESS)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        epoch, row = divmod(int(index), self.rows)
        with self._lock:
            order, ends = self._ordered(epoch)
        start, stop = row * self.length, (row + 1) * self.length
        tokens = np.zeros(self.length, np.int32)
        segments = np.zeros(self.length, np.int32)
        place = int(np.searchsorted(ends, start, side="right"))
        filled, segment = 0, 1
        while filled < self.length and place < len(order):
            document = self.documents[order[place]]
            begin = ends[place] - len(document)
            piece = document[max(0, start - begin) : stop - begin]
            tokens[filled : filled + len(piece)], segments[filled : filled + len(piece)] = piece, segment
            filled, place, segment = filled + len(piece), place + 1, segment + 1
        return {"tokens": tokens, "segment_ids": segments, "weights": (segments > 0).astype(np.float32)}

    def max_segments(self) -> int:
        """The most segments that a row can have, in any epoch."""
        # All but the first and the last segment of a row are whole documents.
        return min(self.length, len(self.sizes), 2 + _most_that_fit(self.sizes, self.length - 2))


class PackedPrompts:
    """Prompts with their answers, several to a row as segments of their own; only the answers have weight.

    Which examples share a row is drawn once, so as to leave little padding; the rows are shuffled anew each epoch.
    An example longer than a row is left out, and how many were is logged.

    Items also have `full_from` [segments] int32: the position in its segment of each answer's first token. If the
    examples have log-probabilities, there are `top_tokens` [T, K] int32 and `top_logprobs` [T, K] f32 as well: those of
    the token at each place of an answer, 0 elsewhere.

    With `seed=None` the examples are packed and read once and in order.
    """

    def __init__(self, prompts: Sequence[Answered], length: int, seed: int | None):
        self.prompts = [prompt for prompt in prompts if len(prompt.tokens) <= length]
        self.length, self.seed = length, seed
        self.too_long = len(prompts) - len(self.prompts)
        if not self.prompts:
            raise ConfigError(f"none of the {len(prompts)} prompts fits sequence_length = {length}")
        if self.too_long:
            log.warning(
                "%d of %d prompts are longer than sequence_length = %d and are left out",
                self.too_long,
                len(prompts),
                length,
            )
        self.sizes = np.array([len(prompt.tokens) for prompt in self.prompts])
        order = _order(seed, 0, len(self.sizes))
        self._rows = [order[row] for row in pack(self.sizes[order].tolist(), length)]
        self.rows = len(self._rows)  # an epoch
        # The first order of this seed was that of the examples: rows take those from 1 on.
        self._ordered = functools.lru_cache(maxsize=2)(lambda epoch, rows=self.rows: _order(seed, epoch + 1, rows))

    def __len__(self) -> int:
        return self.rows * (1 if self.seed is None else ENDLESS)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        epoch, place = divmod(int(index), self.rows)
        tokens = np.zeros(self.length, np.int32)
        segments = np.zeros(self.length, np.int32)
        weights = np.zeros(self.length, np.float32)
        top = self.prompts[0].top
        tops = None
        if top is not None:
            shape = (self.length, top.tokens.shape[1])
            tops = {"top_tokens": np.zeros(shape, np.int32), "top_logprobs": np.zeros(shape, np.float32)}
        row = self._rows[self._ordered(epoch)[place]]
        start = 0
        for segment, example in enumerate(row, 1):
            prompt = self.prompts[example]
            stop = start + len(prompt.tokens)
            tokens[start:stop], segments[start:stop] = prompt.tokens, segment
            weights[start + prompt.boundary : stop] = 1
            if tops is not None and prompt.top is not None:
                for name, values in zip(tops, prompt.top, strict=True):
                    tops[name][start + prompt.boundary : stop] = values
            start = stop
        full_from = np.array([self.prompts[example].boundary for example in row], np.int32)
        item = {"tokens": tokens, "segment_ids": segments, "weights": weights, "full_from": full_from}
        return item if tops is None else item | tops

    def max_segments(self) -> int:
        """The most segments that a row has."""
        return max(len(row) for row in self._rows)


def pack(sizes: Sequence[int], length: int) -> list[list[int]]:
    """Places of `sizes` shared out to rows of `length`, each in the fullest row that has room for it (best fit)."""
    rows: list[list[int]] = []
    by_room: dict[int, list[int]] = {}  # rows by the room left in them
    rooms: list[int] = []  # its keys in order
    for place, size in enumerate(sizes):
        at = bisect.bisect_left(rooms, size)
        if at == len(rooms):
            row, room = len(rows), length
            rows.append([])
        else:
            room = rooms[at]
            row = by_room[room].pop()
            if not by_room[room]:
                del rooms[at], by_room[room]
        rows[row].append(place)
        if left := room - size:
            if left not in by_room:
                bisect.insort(rooms, left)
                by_room[left] = []
            by_room[left].append(row)
    return rows


def _ordered(sizes: np.ndarray, seed: int | None, epoch: int) -> tuple[np.ndarray, np.ndarray]:
    """The documents of an epoch in order, and where each ends."""
    order = _order(seed, epoch, len(sizes))
    return order, np.cumsum(sizes[order])


def _order(seed: int | None, epoch: int, count: int) -> np.ndarray:
    return np.arange(count) if seed is None else np.random.default_rng([seed, epoch]).permutation(count)


def _most_that_fit(sizes: np.ndarray, room: int) -> int:
    """How many of the smallest sizes have a sum of at most `room`."""
    most = max(room, 0)  # each size is at least 1
    smallest = np.sort(sizes if len(sizes) <= most else np.partition(sizes, most)[:most])
    return int(np.searchsorted(np.cumsum(smallest), room, side="right"))
