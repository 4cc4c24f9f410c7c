"""Training data of the recall model: needles, dictionaries and repeats, as random-access sources.

Weights single out what can be known: an answer's digits count most, the digits inside a needle, which are random, not
at all.

`python -m swa_jax.data.lessons DST` learns the tokenizer and writes it as `DST/tokenizer.json`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from swa_jax.base.errors import ConfigError
from swa_jax.base.files import write_json, write_text
from swa_jax.data.haystack import (
    ADJECTIVES,
    ANSWER,
    NEEDLE,
    NOUNS,
    QUESTION,
    VALUE_DIGITS,
    Haystack,
    TextTokenizer,
    draw_keys,
    draw_value,
    insert_needles,
    library_files,
    read_text,
)
from swa_jax.data.tokenizer import END_OF_TEXT, Tokenizer, train_byte_bpe

VOCAB_SIZE = 1024
ENDLESS = 10**9  # samples
ANSWER_DIGIT, TEXT = 8.0, 0.25  # weights of needles: of an answer's digits and of the text; an answer's words have 1
DICTIONARY_DIGIT = 4.0
RANDOM_SHARE = 0.7  # of the repeated passages that are random tokens
Weighted = tuple[list[int], list[float]]  # tokens and their weights


class Lesson:
    """A source of rows made up without end: row i is a pure function of (arguments, seed, i).

    A row is a dict of `tokens` [T] int32, `segment_ids` [T] int32 (all 1) and `weights` [T] f32, those of the tokens
    as targets.
    """

    def __init__(self, length: int, seed: int):
        self.length, self.seed = length, seed

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        tokens, weights = self.draw(np.random.default_rng([self.seed, index]))
        return {
            "tokens": np.array(tokens, np.int32),
            "segment_ids": np.ones(len(tokens), np.int32),
            "weights": np.array(weights, np.float32),
        }

    def max_segments(self) -> int:
        return 1

    def draw(self, rng: np.random.Generator) -> Weighted:
        """The tokens of one row and their weights."""
        raise NotImplementedError

    def repeated(self, rng: np.random.Generator, passage: Callable[[int], Sequence[int] | np.ndarray]) -> Weighted:
        """A passage of 4 to T / 2 tokens over and over; everything after the first time has weight 1."""
        period = int(rng.integers(4, self.length // 2 + 1))
        tokens = np.resize(passage(period), self.length).tolist()
        return tokens, [0.0] * period + [1.0] * (self.length - period)


class Needles(Lesson):
    """`num_keys` needles anywhere in a haystack, and `num_questions` of them asked and answered at the end."""

    def __init__(
        self,
        tokenizer: TextTokenizer,
        haystack: Haystack,
        *,
        length: int,
        seed: int,
        num_keys: int = 1,
        num_questions: int = 1,
    ):
        super().__init__(length, seed)
        if not 1 <= num_questions <= num_keys:
            raise ConfigError(f"num_questions is {num_questions}; it must be between 1 and num_keys = {num_keys}")
        self.tokenizer, self.haystack = tokenizer, haystack
        self.num_keys, self.num_questions = num_keys, num_questions

    def draw(self, rng: np.random.Generator) -> Weighted:
        keys = draw_keys(rng, self.num_keys)
        values = [draw_value(rng) for _ in keys]
        needles = [
            self._weighted(NEEDLE.format(key=key, value=value), value, 0.0, TEXT)
            for key, value in zip(keys, values, strict=True)
        ]
        asked: Weighted = ([], [])
        for i in rng.permutation(self.num_keys)[: self.num_questions]:
            question = self.tokenizer.encode(QUESTION.format(key=keys[i]))
            answer = ANSWER.format(key=keys[i], value=values[i])
            tokens, weights = self._weighted(answer, values[i], ANSWER_DIGIT, 1.0)
            asked[0].extend(question + tokens)
            asked[1].extend([TEXT] * len(question) + weights)
        room = self.length - sum(len(tokens) for tokens, _ in needles) - len(asked[0])
        if room < 0:
            raise ConfigError(
                f"{self.num_keys} needles and {self.num_questions} questions take {self.length - room} tokens, more "
                f"than length = {self.length}"
            )
        places = rng.integers(room + 1, size=self.num_keys).tolist()
        hay = self.haystack.draw(rng, room)
        tokens = insert_needles(hay, [tokens for tokens, _ in needles], places) + asked[0]
        weights = insert_needles([TEXT] * room, [weights for _, weights in needles], places) + asked[1]
        return tokens, weights

    def _weighted(self, text: str, value: str, digit_weight: float, other_weight: float) -> Weighted:
        """The tokens of `text`, which holds the number `value`, with the weight of digits and of everything else."""
        head, tail = text.split(value)
        tokens: list[int] = []
        weights: list[float] = []
        for part, weight in ((head, other_weight), (value, digit_weight), (tail, other_weight)):
            ids = self.tokenizer.encode(part)
            tokens += ids
            weights += [weight] * len(ids)
        return tokens, weights


class Dictionary(Lesson):
    """Lines `key: value`, then the same lines again in another order until the row is full.

    The densest lesson in looking up by key: from the second line of a key on, its digits can be known.
    """

    def __init__(self, tokenizer: TextTokenizer, *, length: int, seed: int):
        super().__init__(length, seed)
        self.tokenizer = tokenizer

    def draw(self, rng: np.random.Generator) -> Weighted:
        line_length = len(self.tokenizer.encode(f"\n{ADJECTIVES[0]}-{NOUNS[0]}: ")) + VALUE_DIGITS
        keys = draw_keys(rng, max(1, self.length // (2 * line_length)))
        lines = [self._line(f"\n{key}: ", draw_value(rng)) for key in keys]
        tokens = [token for line, _ in lines for token in line]
        weights = [0.0] * len(tokens)
        order = rng.permutation(len(lines))
        while len(tokens) < self.length:
            for line, known in (lines[i] for i in order):
                tokens += line
                weights += known
        return tokens[: self.length], weights[: self.length]

    def _line(self, head: str, value: str) -> Weighted:
        """The tokens of a line, and their weights where it is known; a token may be several digits."""
        text = head + value
        known = [DICTIONARY_DIGIT if end > len(head) else 0.0 for _, end in self.tokenizer.spans(text)]
        return self.tokenizer.encode(text), known


class RepeatedTokens(Lesson):
    """Passages, mostly of random tokens, else of text, over and over: the lesson that makes induction heads."""

    def __init__(self, vocab_size: int, haystack: Haystack, *, length: int, seed: int):
        super().__init__(length, seed)
        self.vocab_size, self.haystack = vocab_size, haystack

    def draw(self, rng: np.random.Generator) -> Weighted:
        def passage(size: int) -> Sequence[int] | np.ndarray:
            is_random = rng.random() < RANDOM_SHARE
            return rng.integers(self.vocab_size, size=size) if is_random else self.haystack.draw(rng, size)

        return self.repeated(rng, passage)


def train_recall_tokenizer() -> Tokenizer:
    """A byte-level BPE of the standard library and of needle sentences, in which each key word is one token."""
    texts = [read_text([file]) for file in library_files()]
    for adjective, noun in zip(ADJECTIVES, NOUNS, strict=True):
        names = {"key": f"{adjective}-{noun}", "value": 0}
        texts.append((NEEDLE + QUESTION + ANSWER).format(**names) * 2500)
    tokenizer = train_byte_bpe(texts, VOCAB_SIZE)
    split = [w for w in [f" {a}" for a in ADJECTIVES] + [f"-{n}" for n in NOUNS] if len(tokenizer.encode(w)) > 1]
    if split:
        raise ConfigError(f"{VOCAB_SIZE} tokens leave key words in several ({split})")
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "tokenizer.json", tokenizer.backend.to_str(pretty=True))
    tokens = {"eos_token": END_OF_TEXT, "pad_token": END_OF_TEXT}
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"} | tokens)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m swa_jax.data.lessons FOLDER")
    write_tokenizer(train_recall_tokenizer(), Path(sys.argv[1]))
    print(sys.argv[1])
