"""Chains of statements: a lesson in retrieval that takes several layers, and the prompt's own tokens.

A statement ` = amber 17` gives a name its number, ` = otter amber` gives one name the number of another. Statements lie
scattered in noise, and each stands behind the one that it refers to. The question ` ? otter` is answered by a statement
too, ` = otter 17`: so the number comes after the first answer token, and a model that reads its prompt through windows
and decodes with full attention can look for it. A question takes as many hops as statements lead to its number; all
other chains of a row, which are as long, are its rivals. ` ? otter + brave` asks for the sum of two numbers.

Every word here is one token of the tokenizer that `chain_tokenizer` learns, and is spelled with a blank before it.

`python -m swa_jax.data.chains DST` learns the tokenizer and writes it as `DST/tokenizer.json`.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from tokenizers import AddedToken

from swa_jax.base.errors import ConfigError
from swa_jax.data.haystack import ADJECTIVES, NOUNS, Haystack, TextTokenizer, library_files, read_text
from swa_jax.data.lessons import Lesson, Weighted, write_tokenizer
from swa_jax.data.tokenizer import END_OF_TEXT, Tokenizer, train_byte_bpe

NAMES = tuple(f" {word}" for word in ADJECTIVES + NOUNS)
NUMBERS = tuple(f" {n}" for n in range(10, 100))  # of two digits, so that none begins another
NUM_VALUES = 40  # 10 to 49: the sum of two is a number as well
STATES, ASKS, PLUS = " =", " ?", " +"
FILLERS = (
    " the", " grass", " is", " green", " sky", " blue", " sun", " yellow", " here", " we", " go", " there", " and",
    " back", " again", " one", " of", " it", " was", " in", " a", " so", " then", " but", " for", " with", " from",
    " by", " as", " not", " only", " still",
)  # fmt: skip
VOCAB_SIZE = 768
ANSWER_NUMBER, ANSWER_WORD = 4.0, 0.1  # weights of an answer's number and of its other words
STATEMENT, QUESTION, SUM = 3, 5, 9  # tokens; of a question and of a sum with their answers


def chain_tokenizer(vocab_size: int = VOCAB_SIZE, texts: Iterable[str] | None = None) -> Tokenizer:
    """A byte-level BPE of `texts`, or of the standard library, in which every word of a chain is one token."""
    words = (STATES, ASKS, PLUS, *NAMES, *NUMBERS, *FILLERS)
    texts = (read_text([file]) for file in library_files()) if texts is None else texts
    learned = train_byte_bpe(texts, vocab_size - len(words))
    learned.backend.add_tokens([AddedToken(word, normalized=False) for word in words])
    return Tokenizer(learned.backend, END_OF_TEXT)


@dataclasses.dataclass(frozen=True)
class ChainWords:
    """The ids of the words that chains are written with."""

    names: np.ndarray  # [64]
    numbers: np.ndarray  # [90]; number n is numbers[n - 10]
    fillers: np.ndarray  # [32]
    states: int
    asks: int
    plus: int

    @classmethod
    def of(cls, tokenizer: TextTokenizer) -> ChainWords:
        """Raises `ConfigError` if the tokenizer has no token for one of the words."""

        def one(word: str) -> int:
            ids = tokenizer.encode(word)
            if len(ids) != 1:
                raise ConfigError(
                    f"the tokenizer writes the word '{word.strip()}' with {len(ids)} tokens: chains need the tokenizer "
                    "that `python -m swa_jax.data.chains FOLDER` makes"
                )
            return ids[0]

        names, numbers, fillers = (np.array([one(w) for w in words]) for words in (NAMES, NUMBERS, FILLERS))
        return cls(names, numbers, fillers, one(STATES), one(ASKS), one(PLUS))


@dataclasses.dataclass(frozen=True)
class DrawnChains:
    """Chains before they are written; a name's level is the number of statements below its own."""

    words: ChainWords
    names: np.ndarray  # [chains, hops] ids
    values: np.ndarray  # [chains], from 10 on

    def number(self, value: int) -> int:
        return int(self.words.numbers[value - 10])

    def statement(self, chain: int, level: int) -> list[int]:
        source = self.names[chain, level - 1] if level else self.number(self.values[chain])
        return [self.words.states, int(self.names[chain, level]), int(source)]

    def question(self, chain: int, level: int) -> tuple[list[int], list[int]]:
        """A prompt's question, and the answer."""
        name = int(self.names[chain, level])
        return [self.words.asks, name], [self.words.states, name, self.number(self.values[chain])]

    def sum(self, first: tuple[int, int], second: tuple[int, int]) -> tuple[list[int], list[int]]:
        """The question for the sum of two names, each (chain, level), and the answer."""
        asked = [int(self.names[first]), self.words.plus, int(self.names[second])]
        total = self.number(self.values[first[0]] + self.values[second[0]])
        return [self.words.asks, *asked], [self.words.states, *asked, total]


def draw_chains(rng: np.random.Generator, words: ChainWords, num_chains: int, hops: int) -> DrawnChains:
    """`num_chains` chains of `hops` statements; all names and numbers are different.

    Raises `ConfigError`: more chains than numbers, or more statements than names.
    """
    if not (1 <= num_chains <= NUM_VALUES and hops >= 1 and num_chains * hops <= len(words.names)):
        raise ConfigError(
            f"{num_chains} chains of {hops} hops: a row can have from 1 to {NUM_VALUES} chains, and {len(words.names)} "
            "names in all of them together: ask for fewer hops or rivals"
        )
    names = rng.permutation(words.names)[: num_chains * hops].reshape(num_chains, hops)
    return DrawnChains(words, names, 10 + rng.permutation(NUM_VALUES)[:num_chains])


def draw_order(rng: np.random.Generator, num_chains: int, hops: int) -> list[tuple[int, int]]:
    """All statements, each (chain, level), in a drawn order that puts each behind the one that it refers to."""
    levels = [0] * num_chains
    order = []
    for chain in rng.permutation(np.repeat(np.arange(num_chains), hops)).tolist():
        order.append((chain, levels[chain]))
        levels[chain] += 1
    return order


class Chains(Lesson):
    """`num_chains` chains scattered in noise, then questions about names drawn *with* replacement.

    If every name were asked once, the answers left over could be told by elimination. Only the answers are learned.

    Args:
      haystack: where the noise is from; None: filler words.
      num_questions: as many at most; short rows have as many as fit.
      sums: the share of questions that ask for a sum.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        haystack: Haystack | None = None,
        *,
        length: int,
        seed: int,
        num_chains: int = 4,
        hops: int = 1,
        num_questions: int = 32,
        sums: float = 0.0,
    ):
        super().__init__(length, seed)
        self.words, self.haystack = ChainWords.of(tokenizer), haystack
        self.num_chains, self.hops, self.num_questions, self.sums = num_chains, hops, num_questions, sums
        if not 0 <= sums <= 1:
            raise ConfigError(f"'sums' is a share of the questions, from 0 to 1, got {sums:g}")
        if sums and num_chains < 2:
            raise ConfigError("a sum takes the numbers of two chains: set 'num_chains' to at least 2")
        least = STATEMENT * num_chains * hops + (SUM if sums else QUESTION)
        if length < least:
            raise ConfigError(
                f"{num_chains} chains of {hops} hops and a question take {least} tokens, more than length = {length}"
            )

    def draw(self, rng: np.random.Generator) -> Weighted:
        drawn = draw_chains(rng, self.words, self.num_chains, self.hops)
        order = draw_order(rng, self.num_chains, self.hops)
        asked: list[int] = []
        weights: list[float] = []
        for question, answer in self._questions(rng, drawn, self.length - STATEMENT * len(order)):
            asked += question + answer
            weights += [0.0] * len(question) + [ANSWER_WORD] * (len(answer) - 1) + [ANSWER_NUMBER]
        size = self.length - STATEMENT * len(order) - len(asked)
        noise = self.haystack.draw(rng, size) if self.haystack else rng.choice(self.words.fillers, size).tolist()
        places = np.sort(rng.integers(len(noise) + 1, size=len(order))).tolist()
        tokens: list[int] = []
        start = 0
        for place, statement in zip(places, order, strict=True):
            tokens += noise[start:place] + drawn.statement(*statement)
            start = place
        tokens += noise[start:] + asked
        return tokens, [0.0] * (self.length - len(asked)) + weights

    def _questions(self, rng: np.random.Generator, drawn: DrawnChains, room: int) -> list[tuple[list[int], list[int]]]:
        """Questions with their answers, `room` tokens at most: about twice as many as there are names, or as fit."""
        most = min(self.num_questions, 2 * drawn.names.size + 2, room // QUESTION)
        questions = []
        for _ in range(int(rng.integers(max(1, most // 2), most + 1))):
            first, second = zip(
                rng.integers(self.num_chains, size=2).tolist(), rng.integers(self.hops, size=2).tolist(), strict=True
            )
            is_sum = rng.random() < self.sums
            if (SUM if is_sum else QUESTION) > room:
                break
            room -= SUM if is_sum else QUESTION
            questions.append(drawn.sum(first, second) if is_sum else drawn.question(*first))
        return questions


class Passages(Lesson):
    """Passages of words of chains over and over: copying, the lesson that makes induction heads."""

    def __init__(self, tokenizer: TextTokenizer, *, length: int, seed: int):
        super().__init__(length, seed)
        words = ChainWords.of(tokenizer)
        self.words = np.concatenate([words.names, words.numbers, words.fillers, [words.states, words.asks, words.plus]])

    def draw(self, rng: np.random.Generator) -> Weighted:
        return self.repeated(rng, lambda size: rng.choice(self.words, size))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m swa_jax.data.chains FOLDER")
    write_tokenizer(chain_tokenizer(), Path(sys.argv[1]))
    print(sys.argv[1])
