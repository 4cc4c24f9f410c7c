"""What RULER's tasks share: how much filler a prompt takes, and the prompts one after the other.

As in RULER's own generator the filler grows by steps until a prompt with its answer is longer than the length. Each
prompt has as much as the step before, or one step less for as long as what it draws does not fit. All is drawn in
RULER's order by one `random.Random`, so that the same seed and tokenizer give RULER's prompts, to the letter.

Where not even one step fits, RULER's generator does not end. Here the steps are then a tenth as large, or of 1, and
where the least filler does not fit either, the length is refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from swa_jax.base.errors import ConfigError
from swa_jax.data.chat import Wrap
from swa_jax.data.haystack import TextTokenizer
from swa_jax.evaluate.examples import Example, value_places


class TooShort(ConfigError):
    """A length is too short for what a task's prompts must have."""


@dataclass(frozen=True)
class Draft:
    """A prompt as text."""

    question: str  # all but the example before it and the prefix behind it
    prefix: str  # the beginning of the answer, which the prompt ends with
    references: list[str]  # what is to be found
    answer: str  # what a perfect model would write
    counted: str = ""  # the answer as RULER counts it while it looks for the size
    example: str = ""  # solved, before the question
    example_tokens: int = 0  # as RULER counts them


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

    def count(self, draft: Draft, with_answer: bool = False) -> int:
        """Tokens of a prompt without its opening, as RULER counts them: a solved example apart."""
        text = self.wrap.around(draft.question, draft.prefix) + (draft.counted if with_answer else "")
        return draft.example_tokens + len(self.tokenizer.encode(text))

    def example(self, draft: Draft) -> Example:
        text = self.wrap.around(draft.example + draft.question, draft.prefix)
        return Example(
            prompt=[*self.opening, *self.tokenizer.encode(text)],
            answer=self.tokenizer.encode(draft.answer),
            references=draft.references,
            value=value_places(self.tokenizer, draft.answer, draft.references),
            meta={"max_new_tokens": self.max_new_tokens},
        )

    def too_short(self, task: str, tokens: int) -> TooShort:
        """The error of a task whose shortest prompt has so many tokens."""
        least = len(self.opening) + tokens
        return TooShort(
            f"length is {self.length} tokens, but the shortest prompt of {task} takes {least} and the answer gets "
            f"{self.max_new_tokens}: it must be at least {least + self.max_new_tokens}"
        )


@dataclass(frozen=True)
class Filler:
    """Prompts of a task by how much filler they have, in units of its own."""

    task: str
    make: Callable[[int, int], Draft]  # of a size and the example's number; each call draws anew
    step: int
    least: int = 1
    most: int = 2**62  # all that there is

    @property
    def steps(self) -> tuple[int, ...]:
        return self.step, max(1, self.step // 10), 1

    def drafts(self, room: Room) -> Iterator[Draft]:
        """Prompts that fit, without end.

        Raises:
          TooShort: the least filler does not fit.
          ConfigError: there is not enough filler.
        """
        size = 0
        for step in self.steps:
            if size < self.least:
                size = self._size(room, step)
        for number in itertools.count():
            yield self._fitting(room, max(size, self.least), number)

    def _size(self, room: Room, step: int) -> int:
        """The largest that fits with its answer; less than the least where none does."""
        size, tokens = max(step, self.least), 0
        while tokens < room.limit:
            if size > self.most:
                raise ConfigError(
                    f"length is {room.length} tokens, but the data of {self.task} ends before that: choose a shorter "
                    "length"
                )
            tokens = room.count(self.make(size, 0), with_answer=True)
            if tokens > room.limit:
                return size - step
            size += step  # also where it fits to the token: RULER tries one step more
        return min(size, self.most)

    def _fitting(self, room: Room, size: int, number: int) -> Draft:
        while True:
            draft = self.make(size, number)
            tokens = room.count(draft)
            if tokens <= room.limit:
                return draft
            if size <= self.least:
                raise room.too_short(self.task, tokens)
            size = max(self.least, size - next((step for step in self.steps if size > step), 1))


def enumeration(words: Sequence[str]) -> str:
    """One, two, and three."""
    return ", ".join(words[:-1]) + ", and " + words[-1] if len(words) > 1 else words[0]


def numbered(words: Sequence[str]) -> str:
    """1. one 2. two"""
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, start=1))
