"""RULER's counting tasks (cwe, fwe; arXiv:2404.06654): which words of a long list occur most often.

cwe, common words: a numbered list in which 10 words occur 30 times and all others 3 times, behind a solved example (40
words, 10 times and 3 times). Below 4096 tokens 6 times and once, the example 20 words, 3 times and once.

fwe, frequent words: a text of six-letter words whose frequencies fall as a zeta distribution with alpha 2. The most
frequent one is written "..." and does not count; the next three are asked for. As in RULER, the length is that of the
prompt alone: the answer comes on top.
"""

from __future__ import annotations

import random
import string
from collections.abc import Iterator, Sequence

import numpy as np

from swa_jax.evaluate.ruler_data import RulerData
from swa_jax.evaluate.ruler_prompts import Draft, Filler, Room, enumeration, numbered

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
WORDS_A_STEP, STEPS, TOKENS_A_WORD = 10, 32, 50  # of cwe; fwe's are 1/32 of the length, its vocabulary 1/50


def common_filler(room: Room, data: RulerData, seed: int) -> Filler:
    """Prompts of cwe by their number of different words."""
    rng, words = random.Random(seed), list(data.words)
    random.Random(seed).shuffle(words)
    short = room.length < SHORT

    def drawn(count: int, common: int, other: int) -> tuple[str, list[str]]:
        """A list in which the first 10 of `count` words occur `common` times; and these 10."""
        some = rng.sample(words, count)
        entries = some[:NUM_COMMON] * common + some[NUM_COMMON:] * other
        random.Random(seed).shuffle(entries)
        return COMMON_TEMPLATE.format(context=numbered(entries)), some[:NUM_COMMON]

    def make(size: int, _: int) -> Draft:
        example, said = drawn(20, 3, 1) if short else drawn(40, 10, 3)
        question, common = drawn(size, 6, 1) if short else drawn(size, 30, 3)
        return Draft(
            question=f"{example}{COMMON_PREFIX}{numbered(said)}\n{question}",
            prefix=COMMON_PREFIX,
            references=common,
            answer=f" {numbered(common)}",
            counted=f" {numbered(common)}",
        )

    return Filler("cwe", make, WORDS_A_STEP, least=NUM_COMMON, most=len(words))


def frequent_drafts(room: Room, seed: int) -> Iterator[Draft]:
    """Prompts of fwe without end. Raises `TooShort` where its words cannot be told apart."""
    rng, step = random.Random(seed), max(1, room.length // STEPS)
    limit = room.length - len(room.opening)

    def vocabulary() -> list[str]:
        size = max(NUM_FREQUENT + 2, room.length // TOKENS_A_WORD)
        words = ["".join(rng.choices(string.ascii_lowercase, k=LETTERS)) for _ in range(size)]
        while len(set(words)) < size:
            words.append("".join(rng.choices(string.ascii_lowercase, k=LETTERS)))
        words = sorted(set(words))
        random.Random(seed).shuffle(words)
        return [DOTS, *words[1:]]

    def draft(words: Sequence[str], size: int) -> Draft:
        counts = (size * SHARE_OF_FIRST / np.arange(1, len(words) + 1) ** 2).astype(int).tolist()
        entries = [word for word, count in zip(words, counts, strict=True) for _ in range(count)]
        random.Random(seed).shuffle(entries)
        asked = list(words[1 : NUM_FREQUENT + 1])
        question = FREQUENT_TEMPLATE.format(context=" ".join(entries))
        return Draft(question, FREQUENT_PREFIX, asked, f" {enumeration(asked)}.")

    words, most = vocabulary(), room.length // LETTERS
    while room.count(draft(words, most)) < limit:
        most += step
    most -= step
    while True:
        words, size = vocabulary(), max(most, LEAST_WORDS)
        while (tokens := room.count(made := draft(words, size))) > limit:
            if size <= LEAST_WORDS:
                raise room.too_short("fwe", tokens)
            size = max(LEAST_WORDS, size - step)
        yield made
