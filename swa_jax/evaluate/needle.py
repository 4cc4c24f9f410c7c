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

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from swa_jax.base.errors import ConfigError
from swa_jax.data.chat import Wrap
from swa_jax.data.haystack import ANSWER, NEEDLE, QUESTION, Haystack, TextTokenizer, draw_keys, draw_value
from swa_jax.evaluate.examples import Example, value_places

Depths = tuple[float, float] | Sequence[float] | None


def needle_examples(
    tokenizer: TextTokenizer,
    *,
    length: int,
    num_examples: int,
    num_keys: int = 1,
    depths: Depths = None,
    haystack: Haystack | str | Iterable[str | Path] | None = None,
    wrap: str | Wrap = "{prompt}",
    seed: int = 0,
) -> list[Example]:
    """Needle examples whose prompt and answer together have exactly `length` tokens.

    The target needle starts at prompt token `round(depth * len(prompt))`, or just before the question if there is no
    room for it otherwise; `meta["needle_start"]` holds its place. The other `num_keys - 1` needles have other keys and
    lie anywhere. They take the place of haystack, so that the target does not move.

    Args:
      depths: where the target lies, as a fraction of the prompt. None draws it from [0, 1], a tuple `(low, high)` draws
        it from that range, and any other sequence is used in turn (example i has `depths[i % len(depths)]`).
      haystack: a `Haystack`, a text, or the paths of text files. None is the held-out files of the standard library.
        Each example reads from places that are drawn for it.
      wrap: what a chat model wants around the haystack and the question: a text that holds `{prompt}`, or a `Wrap`.
      seed: the seed of a NumPy generator. Equal arguments give equal examples.

    Raises:
      ConfigError: a length too small for needles, question and answer, or a depth outside [0, 1].
    """
    rng = np.random.default_rng(seed)
    hay = haystack if isinstance(haystack, Haystack) else Haystack(tokenizer, haystack)
    return [
        _one_example(tokenizer, rng, hay, length, num_keys, depth, Wrap.of(wrap))
        for depth in _draw_depths(rng, depths, num_examples)
    ]


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
    wrap: Wrap,
) -> Example:
    keys = draw_keys(rng, num_keys)
    values = [draw_value(rng) for _ in keys]
    needles = [tokenizer.encode(NEEDLE.format(key=k, value=v)) for k, v in zip(keys, values, strict=True)]
    target, distractors = needles[0], needles[1:]
    question = tokenizer.encode(QUESTION.format(key=keys[0]) + wrap.after)
    said = wrap.begun(ANSWER.format(key=keys[0], value=values[0]))
    answer = tokenizer.encode(said)

    # A <bos>, where the model expects one, and what stands before the haystack.
    opening = [*wrap.opening(tokenizer), *tokenizer.encode(wrap.before)]

    needed = len(opening) + sum(map(len, needles)) + len(question) + len(answer)
    if length < needed:
        raise ConfigError(
            f"length is {length} tokens, but {num_keys} needle(s), the question and the answer alone take "
            f"{needed}: ask for longer prompts or for fewer keys"
        )
    prompt_length = length - len(answer)
    room = prompt_length - len(question) - len(target)
    start = max(min(round(depth * prompt_length), room), len(opening))
    before, after = _share_out(rng, distractors, start - len(opening), room - start)
    prompt = [
        *opening,
        *hay.draw_around(rng, before, start - len(opening)),
        *target,
        *hay.draw_around(rng, after, room - start),
        *question,
    ]
    return Example(
        prompt=prompt,
        answer=answer,
        references=[values[0]],
        value=value_places(tokenizer, said, [values[0]]),
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
                f"and {after} after it; ask for longer prompts, fewer keys or another depth"
            )
        sides[side].append(needle)
        free[side] -= len(needle)
    return sides
