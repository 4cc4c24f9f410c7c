"""RULER's counting tasks (cwe, fwe; arXiv:2404.06654): which words of a long list occur most often.

cwe, common words: a numbered list in which 10 words occur 30 times and all others 3 times, behind a solved example (40
words, 10 times and 3 times). Below 4096 tokens 6 times and once, the example 20 words, 3 times and once. The length is
reached by the number of other words, the last of which may occur less often than the rest.

fwe, frequent words: a text of six-letter words whose frequencies fall as a zeta distribution with alpha 2. The most
frequent one is written "..." and does not count; the next three are asked for.

Two differences, beside the finer fit to a length: the words of cwe are our own (`ruler_words.py`), not those of
`wonderwords`; where a list needs more than there are, all its words are adjective-noun pairs, where RULER goes over to
a longer list. And words are in another order in each example; RULER shuffles all by one seed.
"""

from __future__ import annotations

import contextlib
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from swa_jax.base.errors import ConfigError
from swa_jax.evaluate.examples import Example
from swa_jax.evaluate.ruler_prompts import Draft, FillerEnds, Room, enumeration
from swa_jax.evaluate.ruler_words import ADJECTIVES, NOUNS

COMMON_TEMPLATE = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
    "appear most often.\n{context}\nQuestion: What are the 10 most common words in the above list?"
)
COMMON_PREFIX = " Answer: The top 10 words that appear most often in the list are:"
FREQUENT_TEMPLATE = (
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently "
    "appeared coded words. {context}\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What "
    "are the three most frequently appeared words in the above coded text?"
)
FREQUENT_PREFIX = " Answer: According to the coded text above, the three most frequently appeared words are:"
NUM_COMMON, NUM_FREQUENT = 10, 3
SHORT = 4096  # tokens, below which lists repeat their words less often
LETTERS = 6
DOTS = "..."
SHARE_OF_FIRST = 6 / np.pi**2  # of the most frequent word: 1 / zeta(2); word k has 1 / k^2 of it
LEAST_WORDS = 53  # from so many on, the third word asked for occurs more often than the next


@dataclass(frozen=True)
class Repeats:
    """How often a word occurs in a list."""

    common: int
    other: int


def common_example(room: Room, rng: np.random.Generator) -> Example:
    """One example of cwe. Raises `ConfigError` also where there are too few words for the length."""
    short = room.length < SHORT
    solved_repeats, solved_words = (Repeats(3, 1), 20) if short else (Repeats(10, 3), 40)
    solved = rng.permutation([*ADJECTIVES, *NOUNS])[:solved_words].tolist()
    entries = _entries(solved, solved_repeats, (solved_words - NUM_COMMON) * solved_repeats.other)
    example = (
        COMMON_TEMPLATE.format(context=_numbered(rng.permutation(entries).tolist()))
        + COMMON_PREFIX
        + f" {_numbered(solved[:NUM_COMMON])}\n"
    )
    pairs = [f"{adjective}-{noun}" for adjective in ADJECTIVES for noun in NOUNS]
    seed = int(rng.integers(2**63))
    repeats = Repeats(6, 1) if short else Repeats(30, 3)
    for words in ([*ADJECTIVES, *NOUNS], pairs):
        with contextlib.suppress(FillerEnds):
            return room.fit(_common(example, rng.permutation(words).tolist(), repeats, seed))
    raise ConfigError(
        f"length is {room.length} tokens, for which cwe needs more than {len(pairs)} words, which is all there are: "
        "choose a shorter length"
    )


def _common(example: str, words: list[str], repeats: Repeats, seed: int) -> Draft:
    """Of words, the common ones first; the filler are entries of the others. `seed` draws the order of the list."""

    def question(size: int, _: bool) -> str:
        entries = _entries(words, repeats, size)
        order = np.random.default_rng(seed).permutation(len(entries))
        return example + COMMON_TEMPLATE.format(context=_numbered([entries[i] for i in order]))

    def about(size: int, _: bool) -> dict[str, Any]:
        others = -(-size // repeats.other)
        return {"haystack": "words of our own", "num_words": NUM_COMMON + others}

    return Draft(
        least="the example, the common words and the question of cwe",
        prefix=COMMON_PREFIX,
        references=words[:NUM_COMMON],
        answer=f" {_numbered(words[:NUM_COMMON])}",
        question=question,
        about=about,
        sizes_a_token=0.1,
    )


def frequent_example(room: Room, rng: np.random.Generator) -> Example:
    """One example of fwe. Its filler are words, with those that are too rare to occur."""
    seed = int(rng.integers(2**63))
    references = _coded_words(seed, NUM_FREQUENT)

    def question(size: int, _: bool) -> str:
        counts = _counts(size)
        words = [DOTS, *_coded_words(seed, len(counts) - 1)]
        entries = [word for word, count in zip(words, counts, strict=True) for _ in range(count)]
        order = np.random.default_rng(seed).permutation(len(entries))
        return FREQUENT_TEMPLATE.format(context=" ".join(entries[i] for i in order))

    def about(size: int, _: bool) -> dict[str, Any]:
        return {"haystack": "coded words (RULER)", "counts": _counts(size)[1 : NUM_FREQUENT + 2]}

    return room.fit(
        Draft(
            least="the fewest words that fwe can tell apart and the question",
            prefix=FREQUENT_PREFIX,
            references=references,
            answer=f" {enumeration(references)}.",
            question=question,
            about=about,
            sizes_a_token=0.4,
        )
    )


def _counts(size: int) -> list[int]:
    """How often each word occurs, the dots first; words that do not occur are left out."""
    total = LEAST_WORDS + size
    ranks = np.arange(1, int(total**0.5) + 1)
    return [count for count in (total * SHARE_OF_FIRST / ranks**2).astype(int).tolist() if count]


def _coded_words(seed: int, count: int) -> list[str]:
    """The first `count` coded words, which do not depend on `count`."""
    rng = np.random.default_rng([seed, 1])
    words: dict[str, None] = {}
    while len(words) < count:
        words["".join(rng.choice(list(string.ascii_lowercase), LETTERS))] = None
    return list(words)


def _entries(words: Sequence[str], repeats: Repeats, others: int) -> list[str]:
    """The common words, each as often as it occurs, and `others` entries of the rest."""
    rest = [word for word in words[NUM_COMMON:] for _ in range(repeats.other)]
    if others > len(rest):
        raise FillerEnds
    return [*(word for word in words[:NUM_COMMON] for _ in range(repeats.common)), *rest[:others]]


def _numbered(words: Sequence[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, start=1))
