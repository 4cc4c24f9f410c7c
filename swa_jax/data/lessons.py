"""Training data of the recall model: needles, dictionaries and repeats, as random-access sources.

Each source is like `data.PackedText`: item i is a pure function of (arguments, seed, i), a dict of `tokens` [T]
int32, `segment_ids` [T] int32 (all 1) and `weights` [T] f32, the weight of each token as a target. Weights single
out what can be known: an answer's digits count most, the digits inside a needle, which are random, not at all.

`python -m swa_jax.data.lessons DST` learns the tokenizer and writes it as `DST/tokenizer.json`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

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
from swa_jax.errors import ConfigError
from swa_jax.files import write_text

VOCAB_SIZE = 1024
ENDLESS = 10**9  # samples
Weighted = tuple[list[int], list[float]]  # tokens and their weights


class Needles:
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
        digit_weight: float = 8.0,
        answer_weight: float = 1.0,
        text_weight: float = 0.25,
    ):
        if not 1 <= num_questions <= num_keys:
            raise ConfigError(f"num_questions is {num_questions}; it must be between 1 and num_keys = {num_keys}")
        self.tokenizer, self.haystack = tokenizer, haystack
        self.length, self.seed = length, seed
        self.num_keys, self.num_questions = num_keys, num_questions
        self.digit_weight, self.answer_weight, self.text_weight = digit_weight, answer_weight, text_weight

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng([self.seed, index])
        keys = draw_keys(rng, self.num_keys)
        values = [draw_value(rng) for _ in keys]
        needles = [self._needle(key, value) for key, value in zip(keys, values, strict=True)]
        asked: Weighted = ([], [])
        for i in rng.permutation(self.num_keys)[: self.num_questions]:
            for tokens, weights in self._question(keys[i], values[i]):
                asked[0].extend(tokens)
                asked[1].extend(weights)
        room = self.length - sum(len(tokens) for tokens, _ in needles) - len(asked[0])
        if room < 0:
            raise ConfigError(
                f"{self.num_keys} needles and {self.num_questions} questions take {self.length - room} tokens, more "
                f"than length = {self.length}"
            )
        places = rng.integers(room + 1, size=self.num_keys).tolist()
        hay = self.haystack.draw(rng, room)
        tokens = insert_needles(hay, [tokens for tokens, _ in needles], places) + asked[0]
        weights = insert_needles([self.text_weight] * room, [weights for _, weights in needles], places) + asked[1]
        return sample(tokens, weights)

    def _needle(self, key: str, value: str) -> Weighted:
        return self._weighted(NEEDLE.format(key=key, value=value), value, 0.0, self.text_weight)

    def _question(self, key: str, value: str) -> list[Weighted]:
        question = self.tokenizer.encode(QUESTION.format(key=key))
        answer = ANSWER.format(key=key, value=value)
        return [
            (question, [self.text_weight] * len(question)),
            self._weighted(answer, value, self.digit_weight, self.answer_weight),
        ]

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


class Dictionary:
    """Lines `key: value`, then the same lines again in another order until the row is full.

    The densest lesson in looking up by key: from the second line of a key on, its digits can be known.
    """

    def __init__(self, tokenizer: TextTokenizer, *, length: int, seed: int, digit_weight: float = 4.0):
        self.tokenizer, self.length, self.seed, self.digit_weight = tokenizer, length, seed, digit_weight

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng([self.seed, index])
        line_length = len(self.tokenizer.encode(f"\n{ADJECTIVES[0]}-{NOUNS[0]}: ")) + VALUE_DIGITS
        keys = draw_keys(rng, max(1, self.length // (2 * line_length)))
        lines = [self.tokenizer.encode(f"\n{key}: {draw_value(rng)}") for key in keys]
        tokens = [token for line in lines for token in line]
        weights = [0.0] * len(tokens)
        order = rng.permutation(len(lines))
        while len(tokens) < self.length:
            for line in (lines[i] for i in order):
                tokens += line
                weights += [0.0] * (len(line) - VALUE_DIGITS) + [self.digit_weight] * VALUE_DIGITS
        return sample(tokens[: self.length], weights[: self.length])


class Repeats:
    """A passage of 4 to T / 2 tokens over and over: the lesson that makes induction heads.

    Mostly random tokens, else text; everything after the first time has weight 1.
    """

    def __init__(self, vocab_size: int, haystack: Haystack, *, length: int, seed: int, random_share: float = 0.7):
        self.vocab_size, self.haystack, self.random_share = vocab_size, haystack, random_share
        self.length, self.seed = length, seed

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng([self.seed, index])
        period = int(rng.integers(4, self.length // 2 + 1))
        if rng.random() < self.random_share:
            passage = rng.integers(self.vocab_size, size=period).tolist()
        else:
            passage = self.haystack.draw(rng, period)
        tokens = np.resize(passage, self.length).tolist()
        return sample(tokens, [0.0] * period + [1.0] * (self.length - period))


def train_recall_tokenizer(vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """A byte-level BPE of the standard library and of needle sentences, in which each key word is one token."""
    texts = [read_text([file]) for file in library_files()]
    for adjective, noun in zip(ADJECTIVES, NOUNS, strict=True):
        names = {"key": f"{adjective}-{noun}", "value": 0}
        texts.append((NEEDLE + QUESTION + ANSWER).format(**names) * 2500)
    tokenizer = train_byte_bpe(texts, vocab_size)
    split = [w for w in [f" {a}" for a in ADJECTIVES] + [f"-{n}" for n in NOUNS] if len(tokenizer.encode(w)) > 1]
    if split:
        raise ConfigError(f"vocab_size = {vocab_size} leaves key words in several tokens ({split}); raise it")
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    config = '{\n  "tokenizer_class": "PreTrainedTokenizerFast",\n  "eos_token": "%s",\n  "pad_token": "%s"\n}\n'
    files = {
        "tokenizer.json": tokenizer.backend.to_str(pretty=True),
        "tokenizer_config.json": config % (END_OF_TEXT, END_OF_TEXT),
    }
    for name, text in files.items():
        write_text(folder / name, text)


def sample(tokens: Sequence[int], weights: Sequence[float]) -> dict[str, np.ndarray]:
    """One row of one document: tokens, segment ids and weights, each [T]."""
    return {
        "tokens": np.array(tokens, np.int32),
        "segment_ids": np.ones(len(tokens), np.int32),
        "weights": np.array(weights, np.float32),
    }


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m swa_jax.data.lessons FOLDER")
    write_tokenizer(train_recall_tokenizer(), Path(sys.argv[1]))
    print(sys.argv[1])
