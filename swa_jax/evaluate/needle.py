"""Needle tasks in the manner of RULER (arXiv:2404.06654): find a number hidden in a long text.

A prompt is a haystack with `num_keys` needles in it and a question about one of them at its end:

    ... One of the special magic numbers for brave-otter is: 4821673. ...
    What is the special magic number for brave-otter?

The answer is a whole sentence, " The special magic number for brave-otter is: 4821673.": the number comes well
after the first answer token, so a model that reads its prompt through windows and decodes with full attention
can still look it up.

Two differences from RULER, which every result's `meta` makes visible: the wording of the question, and the
haystack, which by default is the Python interpreter's own library sources and not Paul Graham's essays.
"""

from __future__ import annotations

import sysconfig
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from swa_jax.errors import ConfigError
from swa_jax.evaluate.examples import Example

# fmt: off
ADJECTIVES = (
    "amber", "brave", "calm", "clever", "cold", "crisp", "dark", "eager", "fair", "fierce", "gentle", "glad",
    "grand", "happy", "humble", "icy", "jolly", "keen", "kind", "lively", "loud", "mellow", "merry", "noble",
    "proud", "quick", "quiet", "rapid", "shiny", "solid", "swift", "wild",
)
NOUNS = (
    "acorn", "anchor", "apple", "badger", "beacon", "bridge", "candle", "canyon", "castle", "cedar", "comet",
    "dragon", "eagle", "falcon", "forest", "garden", "harbor", "island", "jungle", "kettle", "lantern",
    "meadow", "mirror", "ocean", "orchid", "otter", "pebble", "planet", "river", "rocket", "tiger", "valley",
)
# fmt: on

NEEDLE = "\nOne of the special magic numbers for {key} is: {value}.\n"
QUESTION = "\nWhat is the special magic number for {key}?"
ANSWER = " The special magic number for {key} is: {value}."
VALUE_DIGITS = 7

# The repeated sentences of RULER's niah_single_1.
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "

Depths = tuple[float, float] | Sequence[float] | None


class TextTokenizer(Protocol):
    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...


def library_files(held_out: bool | None = None) -> list[Path]:
    """Top-level modules of the running interpreter's standard library, in name order (about 4.5 MB).

    One in ten, by a checksum of its name, is held out for evaluation: True gives those, False the others.
    """
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return [f for f in files if held_out is None or (zlib.crc32(f.name.encode()) % 10 == 0) == held_out]


def read_text(files: Iterable[str | Path]) -> str:
    """The files' texts one after the other; bytes that are not UTF-8 become U+FFFD."""
    return "\n".join(Path(file).read_text(encoding="utf-8", errors="replace") for file in files)


def noise_haystack(num_sentences: int = 5000) -> str:
    """RULER's niah_single_1 haystack, for `needle_examples(haystack=...)`."""
    return NOISE * (num_sentences // 5 + 1)


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
        self.parts = split_lines(text if isinstance(text, str) else read_text(text))
        if not any(part.strip() for part in self.parts):
            raise ConfigError("the haystack is empty; give a text or files with some words in them")
        self._tokens: dict[int, list[int]] = {}

    def part_tokens(self, part: int) -> list[int]:
        if part not in self._tokens:
            self._tokens[part] = self.tokenizer.encode(self.parts[part])
        return self._tokens[part]

    def draw(self, rng: np.random.Generator, size: int) -> list[int]:
        """`size` tokens from the start of a drawn part on."""
        part = int(rng.integers(len(self.parts)))
        tokens: list[int] = []
        while len(tokens) < size:
            tokens += self.part_tokens(part)
            part = (part + 1) % len(self.parts)
        return tokens[:size]


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


def needle_examples(
    tokenizer: TextTokenizer,
    *,
    length: int,
    num_examples: int,
    num_keys: int = 1,
    depths: Depths = None,
    haystack: Haystack | str | Iterable[str | Path] | None = None,
    seed: int = 0,
) -> list[Example]:
    """Needle examples whose prompt and answer together have exactly `length` tokens.

    The target needle starts at prompt token `round(depth * len(prompt))`, or just before the question where that
    would leave it no room; `meta["needle_start"]` holds the place it got. The other `num_keys - 1` needles carry
    other keys and lie anywhere; haystack gives way to them, so the target stays put.

    Args:
      depths: where the target lies, as a fraction of the prompt: None draws it from [0, 1], a tuple `(low, high)`
        from that range, and any other sequence is used in turn (example i has `depths[i % len(depths)]`).
      haystack: a `Haystack`, or what makes one: a text, the paths of text files, or None for the held-out
        files of the standard library. Each example reads from its own drawn places.
      seed: of a NumPy generator; equal arguments give equal examples.

    Raises:
      ConfigError: a length too small for needles, question and answer, or a depth outside [0, 1].
    """
    rng = np.random.default_rng(seed)
    hay = haystack if isinstance(haystack, Haystack) else Haystack(tokenizer, haystack)
    return [
        _one_example(tokenizer, rng, hay, length, num_keys, depth)
        for depth in _draw_depths(rng, depths, num_examples)
    ]


def needle_grid(
    tokenizer: TextTokenizer,
    *,
    lengths: Sequence[int],
    depths: Sequence[float],
    num_examples: int,
    num_keys: int = 1,
    haystack: Haystack | str | Iterable[str | Path] | None = None,
    seed: int = 0,
) -> dict[tuple[int, float], list[Example]]:
    """`num_examples` examples for every (length, depth): the cells of a needle heat map."""
    hay = haystack if isinstance(haystack, Haystack) else Haystack(tokenizer, haystack)
    return {
        (length, depth): needle_examples(
            tokenizer,
            length=length,
            num_examples=num_examples,
            num_keys=num_keys,
            depths=[depth],
            haystack=hay,
            seed=seed + 7919 * i,
        )
        for i, (length, depth) in enumerate((le, de) for le in lengths for de in depths)
    }


def score(text: str, references: Sequence[str]) -> float:
    """RULER's `string_match_all`: the fraction of the references that occur in the text, case ignored."""
    if not references:
        raise ValueError("references is empty; there is nothing to look for")
    return sum(reference.lower() in text.lower() for reference in references) / len(references)


def _draw_depths(rng: np.random.Generator, depths: Depths, num_examples: int) -> list[float]:
    if depths is None:
        depths = (0.0, 1.0)
    if len(depths) == 0 or any(not 0.0 <= depth <= 1.0 for depth in depths):
        raise ConfigError(f"depths must be fractions of the prompt between 0 and 1, got {depths!r}")
    if isinstance(depths, tuple) and len(depths) == 2:
        low, high = depths
        return [low + (high - low) * rng.random() for _ in range(num_examples)]
    return [depths[i % len(depths)] for i in range(num_examples)]


def _one_example(
    tokenizer: TextTokenizer,
    rng: np.random.Generator,
    hay: Haystack,
    length: int,
    num_keys: int,
    depth: float,
) -> Example:
    keys = draw_keys(rng, num_keys)
    values = [draw_value(rng) for _ in keys]
    needles = [tokenizer.encode(NEEDLE.format(key=k, value=v)) for k, v in zip(keys, values, strict=True)]
    target, distractors = needles[0], needles[1:]
    question = tokenizer.encode(QUESTION.format(key=keys[0]))
    answer = tokenizer.encode(ANSWER.format(key=keys[0], value=values[0]))

    opening = list(getattr(tokenizer, "start_ids", []))  # a <bos>, where the model expects one

    needed = len(opening) + sum(map(len, needles)) + len(question) + len(answer)
    if length < needed:
        raise ConfigError(
            f"length is {length} tokens, but {num_keys} needle(s), the question and the answer alone take "
            f"{needed}; raise length or lower num_keys"
        )
    prompt_length = length - len(answer)
    room = prompt_length - len(question) - len(target)
    start = max(min(round(depth * prompt_length), room), len(opening))
    before, after = _share_out(rng, distractors, start - len(opening), room - start)
    prompt = [
        *opening,
        *_stretch(rng, hay, before, start - len(opening)),
        *target,
        *_stretch(rng, hay, after, room - start),
        *question,
    ]
    return Example(
        prompt=prompt,
        answer=answer,
        references=[values[0]],
        meta={
            "task": "needle",
            "length": length,
            "depth": depth,
            "needle_start": start,
            "num_keys": num_keys,
            "key": keys[0],
            "haystack": hay.name,
        },
    )


def _share_out(
    rng: np.random.Generator, needles: list[list[int]], before: int, after: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Needles for the `before` and `after` tokens on either side of the target, by the room still free there."""
    sides: tuple[list[list[int]], list[list[int]]] = ([], [])
    free = [before, after]
    for needle in needles:
        side = int(rng.random() * sum(free) >= free[0])
        if len(needle) > free[side]:
            side = 1 - side
        if len(needle) > free[side]:
            raise ConfigError(
                f"the {len(needles) + 1} needles do not fit around the target, which leaves {before} tokens before "
                f"and {after} after it; raise length, lower num_keys or choose another depth"
            )
        sides[side].append(needle)
        free[side] -= len(needle)
    return sides


def _stretch(rng: np.random.Generator, hay: Haystack, needles: list[list[int]], size: int) -> list[int]:
    """`size` tokens: `needles` at drawn places of a stretch of haystack."""
    room = size - sum(map(len, needles))
    return insert_needles(hay.draw(rng, room), needles, rng.integers(room + 1, size=len(needles)).tolist())
