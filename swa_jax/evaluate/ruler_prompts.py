"""What RULER's tasks share: a prompt is given as much filler as its length takes.

A task draws what must be in the prompt (needles, statements, common words, documents with the answer); what is between
is filler. Filler is cut where the length is reached, in the middle of a sentence, a needle or a document, so that
prompts end within 1 % of their target; a list of words is cut between two words. RULER's steps are coarser.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from swa_jax.base.errors import ConfigError
from swa_jax.data.chat import Wrap
from swa_jax.data.haystack import TextTokenizer
from swa_jax.evaluate.examples import Example, value_places

TOLERANCE = 0.01  # of the length, below it


class FillerEnds(Exception):
    """A draft has less filler than was asked for."""


class TooShort(ConfigError):
    """A length is too short for what a task's prompts must have."""


@dataclass(frozen=True)
class Draft:
    """A prompt but for the size of its filler, which is counted as the task likes: in characters, words, entries."""

    least: str  # what the prompt has without filler, for a sentence
    prefix: str  # the beginning of the answer, which the prompt ends with
    references: list[str]  # what is to be found
    answer: str  # what a perfect model would write
    # Of the filler's size, and whether it ends at the end of a word: all but the prefix. May raise `FillerEnds`.
    question: Callable[[int, bool], str]
    # Of the same: for `Example.meta`; the text under "first", if there is one, becomes its place, "needle_start".
    about: Callable[[int, bool], dict[str, Any]]
    sizes_a_token: float = 4.0  # about how much filler a token is: where the search begins


@dataclass(frozen=True)
class Room:
    """Where a prompt must fit: `length` tokens with `max_new_tokens` of answer, and what stands around the question."""

    tokenizer: TextTokenizer
    length: int
    max_new_tokens: int
    wrap: Wrap

    @property
    def opening(self) -> list[int]:
        """Start tokens, where the model expects them."""
        return self.wrap.opening(self.tokenizer)

    @property
    def limit(self) -> int:
        """Tokens of a prompt without its opening."""
        return self.length - self.max_new_tokens - len(self.opening)

    def fit(self, draft: Draft) -> Example:
        """The draft with as much filler as the length takes. Raises `TooShort` if it does not fit without any."""

        def count(size: int) -> int:
            return len(self.tokenizer.encode(self._text(draft, size, whole_words)))

        whole_words = True
        needed = count(0) + len(self.opening)
        if needed - len(self.opening) > self.limit:
            raise TooShort(
                f"length is {self.length} tokens, but {draft.least} alone take {needed} and the answer gets "
                f"{self.max_new_tokens}: it must be at least {needed + self.max_new_tokens}"
            )
        slack = int(TOLERANCE * self.length)
        size, tokens = _search(count, self.limit, slack, draft.sizes_a_token)
        if self.limit - tokens > slack:
            whole_words = False
            size, tokens = _search(count, self.limit, slack, draft.sizes_a_token)
        text = self._text(draft, size, whole_words)
        about = draft.about(size, whole_words)
        if "first" in about:
            before = text[: text.index(about.pop("first"))]
            about["needle_start"] = len(self.opening) + len(self.tokenizer.encode(before))
        return Example(
            prompt=[*self.opening, *self.tokenizer.encode(text)],
            answer=self.tokenizer.encode(draft.answer),
            references=draft.references,
            value=value_places(self.tokenizer, draft.answer, draft.references),
            meta={
                "length": self.length,
                "prompt_tokens": len(self.opening) + tokens,
                "max_new_tokens": self.max_new_tokens,
            }
            | about,
        )

    def _text(self, draft: Draft, size: int, whole_words: bool) -> str:
        return self.wrap.around(draft.question(size, whole_words), draft.prefix)


class Hay:
    """Sentences without end, of which the first `size` characters are taken."""

    def __init__(self, sentences: Iterator[str]):
        self.source = sentences
        self.sentences: list[str] = []
        self.ends: list[int] = [0]  # characters of the first n sentences, with the separator after each

    def take(self, size: int, whole_words: bool) -> list[str]:
        """The last sentence is cut, at the end of a word if asked for."""
        while self.ends[-1] < size:
            self.sentences.append(next(self.source))
            self.ends.append(self.ends[-1] + len(self.sentences[-1]) + 1)
        whole = bisect_right(self.ends, size) - 1
        rest = self.sentences[whole][: size - self.ends[whole]] if self.ends[whole] < size else ""
        if whole_words and len(rest) < len(self.sentences[whole] if rest else ""):
            rest = rest.rpartition(" ")[0]
        return [*self.sentences[:whole], *([rest.rstrip()] if rest.strip() else [])]


def placed(hay: Sequence[str], needles: Sequence[tuple[float, str]]) -> list[str]:
    """The needles, by rising depth from 0 to 1, among the sentences of a haystack."""
    pieces: list[str] = []
    start = 0
    for depth, needle in needles:
        place = int(len(hay) * depth)
        pieces += [*hay[start:place], needle]
        start = place
    return [*pieces, *hay[start:]]


def enumeration(words: Sequence[str]) -> str:
    """One, two, and three."""
    return ", ".join(words[:-1]) + ", and " + words[-1] if len(words) > 1 else words[0]


def _search(count: Callable[[int], int], limit: int, slack: int, guess: float) -> tuple[int, int]:
    """A size whose count is at most `limit` and, if there is one, at least `limit - slack`; and that count.

    Counts grow nearly in proportion to sizes, so the next try lies on a straight line; every third one halves the
    bracket, which bounds the work where they do not. The first try takes `guess` sizes for a count.
    """
    base = count(0)
    low, low_count = 0, base
    high = high_count = 0
    for step in itertools.count():
        if limit - low_count <= slack or high - low == 1:
            return low, low_count
        if not high:
            sizes = low / (low_count - base) if low_count > base else guess
            size = low + max(16, int((limit - low_count) * sizes))
        else:
            aim = (limit - slack / 2 - low_count) / (high_count - low_count)
            size = (low + high) // 2 if step % 3 == 2 else low + int((high - low) * aim)
            size = min(max(size, low + 1), high - 1)
        tokens = count(size)
        if tokens > limit:
            high, high_count = size, tokens
        else:
            low, low_count = size, tokens
    raise AssertionError("unreachable")
