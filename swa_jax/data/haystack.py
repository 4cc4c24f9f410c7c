"""Texts to hide a needle in, and the words and numbers that a needle is made of."""

from __future__ import annotations

import sysconfig
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from swa_jax.base.errors import ConfigError

ADJECTIVES = (
    "amber", "brave", "calm", "clever", "cold", "crisp", "dark", "eager", "fair", "fierce", "gentle", "glad",
    "grand", "happy", "humble", "icy", "jolly", "keen", "kind", "lively", "loud", "mellow", "merry", "noble",
    "proud", "quick", "quiet", "rapid", "shiny", "solid", "swift", "wild",
)  # fmt: skip
NOUNS = (
    "acorn", "anchor", "apple", "badger", "beacon", "bridge", "candle", "canyon", "castle", "cedar", "comet",
    "dragon", "eagle", "falcon", "forest", "garden", "harbor", "island", "jungle", "kettle", "lantern",
    "meadow", "mirror", "ocean", "orchid", "otter", "pebble", "planet", "river", "rocket", "tiger", "valley",
)  # fmt: skip

NEEDLE = "\nOne of the special magic numbers for {key} is: {value}.\n"
QUESTION = "\nWhat is the special magic number for {key}?"
ANSWER = " The special magic number for {key} is: {value}."
VALUE_DIGITS = 7

# The repeated sentences of RULER's niah_single_1.
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "


class TextTokenizer(Protocol):
    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...

    def spans(self, text: str) -> list[tuple[int, int]]:
        """The characters of `text`, from and to, that each of its tokens stands for."""


def library_files(held_out: bool | None = None) -> list[Path]:
    """Top-level modules of the running interpreter's standard library, in name order (about 4.5 MB).

    One in ten, by a checksum of its name, is held out for evaluation: True gives those, False the others.
    """
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return [f for f in files if held_out is None or (zlib.crc32(f.name.encode()) % 10 == 0) == held_out]


def read_text(files: Iterable[str | Path]) -> str:
    """The files' texts one after the other; bytes that are not UTF-8 become U+FFFD.

    Raises `ConfigError` where they are more than one in ten: a picture, an archive, or a text in another encoding.
    """
    return "\n".join(map(_read_text, files))


def _read_text(file: str | Path) -> str:
    text = Path(file).read_text(encoding="utf-8", errors="replace")
    if 10 * (text.count("\ufffd") + text.count("\0")) > len(text):
        raise ConfigError(f"{file} is no text in UTF-8: save it as one, or name another file")
    return text


def draw_keys(rng: np.random.Generator, num_keys: int) -> list[str]:
    """`num_keys` different adjective-noun keys."""
    total = len(ADJECTIVES) * len(NOUNS)
    if not 1 <= num_keys <= total:
        raise ConfigError(f"num_keys is {num_keys}; there are between 1 and {total} different keys")
    picks = rng.choice(total, num_keys, replace=False)
    return [f"{ADJECTIVES[p // len(NOUNS)]}-{NOUNS[p % len(NOUNS)]}" for p in picks]


def draw_value(rng: np.random.Generator) -> str:
    """A number of `VALUE_DIGITS` digits, without leading zero."""
    return str(rng.integers(10 ** (VALUE_DIGITS - 1), 10**VALUE_DIGITS))


def insert_needles[T](haystack: Sequence[T], needles: Sequence[Sequence[T]], at: Sequence[int]) -> list[T]:
    """`needles[i]` put into `haystack` before haystack token `at[i]`; equal places keep the given order."""
    tokens: list[T] = []
    start = 0
    for place, i in sorted((place, i) for i, place in enumerate(at)):
        tokens += haystack[start:place]
        tokens += needles[i]
        start = place
    return tokens + list(haystack[start:])


class Haystack:
    """A text read as tokens from any place, wrapping around; only the parts a prompt takes are tokenised.

    `text` is a string, or the paths of text files, or None for the held-out files of the standard library.
    """

    def __init__(self, tokenizer: TextTokenizer, text: str | Iterable[str | Path] | None = None):
        self.tokenizer = tokenizer
        self.name = "text" if isinstance(text, str) else "files"
        if text is None:
            self.name, text = "python standard library (held out)", library_files(held_out=True)
        files = [] if isinstance(text, str) else list(text)
        self.parts = split_lines(text if isinstance(text, str) else read_text(files))
        if not any(part.strip() for part in self.parts):
            names = ", ".join(map(str, files[:3])) + (f" and {len(files) - 3} more" if len(files) > 3 else "")
            raise ConfigError(
                f"there are no words in {names}: name text files with some words in them"
                if files
                else "the haystack is empty; give a text or files with some words in them"
            )
        self._tokens: dict[int, list[int]] = {}

    def draw(self, rng: np.random.Generator, size: int) -> list[int]:
        """`size` tokens from the start of a drawn part on."""
        part = int(rng.integers(len(self.parts)))
        tokens: list[int] = []
        while len(tokens) < size:
            if part not in self._tokens:
                self._tokens[part] = self.tokenizer.encode(self.parts[part])
            tokens += self._tokens[part]
            part = (part + 1) % len(self.parts)
        return tokens[:size]

    def draw_around(self, rng: np.random.Generator, needles: list[list[int]], size: int) -> list[int]:
        """`size` tokens, those of `needles` included, which stand at drawn places of the text."""
        room = size - sum(map(len, needles))
        return insert_needles(self.draw(rng, room), needles, rng.integers(room + 1, size=len(needles)).tolist())


def split_lines(text: str, characters: int = 1024) -> list[str]:
    """The text in parts of whole lines, each of at least `characters` characters except the last."""
    parts: list[str] = []
    lines: list[str] = []
    size = 0
    for line in text.splitlines(keepends=True):
        lines.append(line)
        size += len(line)
        if size >= characters:
            parts.append("".join(lines))
            lines, size = [], 0
    return [*parts, "".join(lines)] if lines else parts
