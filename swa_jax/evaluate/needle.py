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
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from swa_jax.evaluate.examples import Example

ADJECTIVES = (
    "amber brave calm clever cold crisp dark eager fair fierce gentle glad grand happy humble icy "
    "jolly keen kind lively loud mellow merry noble proud quick quiet rapid shiny solid swift wild"
).split()
NOUNS = (
    "acorn anchor apple badger beacon bridge candle canyon castle cedar comet dragon eagle falcon forest garden "
    "harbor island jungle kettle lantern meadow mirror ocean orchid otter pebble planet river rocket tiger valley"
).split()

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


def library_files() -> list[Path]:
    """Top-level modules of the running interpreter's standard library, in name order (about 4.5 MB)."""
    return sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))


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
        raise ValueError(f"num_keys is {num_keys}; there are between 1 and {total} different keys")
    picks = rng.choice(total, num_keys, replace=False)
    return [f"{ADJECTIVES[p // len(NOUNS)]}-{NOUNS[p % len(NOUNS)]}" for p in picks]


def draw_value(rng: np.random.Generator) -> str:
    """A number of `VALUE_DIGITS` digits, without leading zero."""
    return str(rng.integers(10 ** (VALUE_DIGITS - 1), 10**VALUE_DIGITS))


def insert_needles(haystack: Sequence[int], needles: Sequence[Sequence[int]], at: Sequence[int]) -> list[int]:
    """`needles[i]` put into `haystack` before haystack token `at[i]`; equal places keep the given order."""
    tokens: list[int] = []
    start = 0
    for place, i in sorted((place, i) for i, place in enumerate(at)):
        tokens += haystack[start:place]
        tokens += needles[i]
        start = place
    return tokens + list(haystack[start:])


def needle_examples(
    tokenizer: TextTokenizer,
    *,
    length: int,
    num_examples: int,
    num_keys: int = 1,
    depths: Depths = None,
    haystack: str | Iterable[str | Path] | None = None,
    seed: int = 0,
) -> list[Example]:
    """Needle examples whose prompt and answer together have exactly `length` tokens.

    The target needle starts at prompt token `round(depth * len(prompt))`, or just before the question where that
    would leave it no room; `meta["needle_start"]` holds the place it got. The other `num_keys - 1` needles carry
    other keys and lie anywhere; haystack gives way to them, so the target stays put.

    Args:
      depths: where the target lies, as a fraction of the prompt: None draws it from [0, 1], a tuple `(low, high)`
        from that range, and any other sequence is used in turn (example i has `depths[i % len(depths)]`).
      haystack: a text, the paths of text files, or None for `read_text(library_files())`. Each example
        reads its own stretch, from a drawn place, wrapping around at the end.
      seed: of a NumPy generator; equal arguments give equal examples.

    Raises:
      ValueError: a length too small for needles, question and answer, or a depth outside [0, 1].
    """
    rng = np.random.default_rng(seed)
    source = _haystack_name(haystack)
    hay = np.asarray(tokenizer.encode(_haystack_text(haystack)), np.int64)
    if hay.size == 0:
        raise ValueError("the haystack is empty; give a text or files with at least one token")
    return [
        _one_example(tokenizer, rng, hay, length, num_keys, depth, source)
        for depth in _draw_depths(rng, depths, num_examples)
    ]


def needle_grid(
    tokenizer: TextTokenizer,
    *,
    lengths: Sequence[int],
    depths: Sequence[float],
    num_examples: int,
    num_keys: int = 1,
    haystack: str | Iterable[str | Path] | None = None,
    seed: int = 0,
) -> dict[tuple[int, float], list[Example]]:
    """`num_examples` examples for every (length, depth): the cells of a needle heat map."""
    text = _haystack_text(haystack)
    return {
        (length, depth): needle_examples(
            tokenizer,
            length=length,
            num_examples=num_examples,
            num_keys=num_keys,
            depths=[depth],
            haystack=text,
            seed=seed + 7919 * i,
        )
        for i, (length, depth) in enumerate((le, de) for le in lengths for de in depths)
    }


def score(text: str, references: Sequence[str]) -> float:
    """RULER's `string_match_all`: the fraction of the references that occur in the text, case ignored."""
    if not references:
        raise ValueError("references is empty; there is nothing to look for")
    return sum(reference.lower() in text.lower() for reference in references) / len(references)


def _haystack_name(haystack: str | Iterable[str | Path] | None) -> str:
    if haystack is None:
        return "python standard library"
    return "text" if isinstance(haystack, str) else "files"


def _haystack_text(haystack: str | Iterable[str | Path] | None) -> str:
    if haystack is None:
        return read_text(library_files())
    return haystack if isinstance(haystack, str) else read_text(haystack)


def _draw_depths(rng: np.random.Generator, depths: Depths, num_examples: int) -> list[float]:
    if depths is None:
        depths = (0.0, 1.0)
    if len(depths) == 0 or any(not 0.0 <= depth <= 1.0 for depth in depths):
        raise ValueError(f"depths must be fractions of the prompt between 0 and 1, got {depths!r}")
    if isinstance(depths, tuple) and len(depths) == 2:
        low, high = depths
        return [low + (high - low) * rng.random() for _ in range(num_examples)]
    return [depths[i % len(depths)] for i in range(num_examples)]


def _one_example(
    tokenizer: TextTokenizer,
    rng: np.random.Generator,
    hay: np.ndarray,
    length: int,
    num_keys: int,
    depth: float,
    source: str,
) -> Example:
    keys = draw_keys(rng, num_keys)
    values = [draw_value(rng) for _ in keys]
    needles = [tokenizer.encode(NEEDLE.format(key=k, value=v)) for k, v in zip(keys, values, strict=True)]
    target, distractors = needles[0], needles[1:]
    question = tokenizer.encode(QUESTION.format(key=keys[0]))
    answer = tokenizer.encode(ANSWER.format(key=keys[0], value=values[0]))

    needed = sum(map(len, needles)) + len(question) + len(answer)
    if length < needed:
        raise ValueError(
            f"length is {length} tokens, but {num_keys} needle(s), the question and the answer alone take "
            f"{needed}; raise length or lower num_keys"
        )
    prompt_length = length - len(answer)
    room = prompt_length - len(question) - len(target)
    start = min(round(depth * prompt_length), room)
    before, after = _share_out(rng, distractors, start, room - start)
    prompt = [*_stretch(rng, hay, before, start), *target, *_stretch(rng, hay, after, room - start), *question]
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
            "haystack": source,
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
            raise ValueError(
                f"the {len(needles) + 1} needles do not fit around the target, which leaves {before} tokens before "
                f"and {after} after it; raise length, lower num_keys or choose another depth"
            )
        sides[side].append(needle)
        free[side] -= len(needle)
    return sides


def _stretch(rng: np.random.Generator, hay: np.ndarray, needles: list[list[int]], size: int) -> list[int]:
    """`size` tokens: `needles` at drawn places of a stretch of haystack that starts at a drawn place."""
    room = size - sum(map(len, needles))
    first = int(rng.integers(hay.size))
    text = hay[np.arange(first, first + room) % hay.size].tolist()
    return insert_needles(text, needles, rng.integers(room + 1, size=len(needles)).tolist())
