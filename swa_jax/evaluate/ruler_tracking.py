"""RULER's variable tracking (vt, arXiv:2404.06654): which variables have a value that is assigned once and handed on.

One chain of five statements, `VAR AAAAA = 12345`, `VAR BBBBB = VAR AAAAA`, ..., stands in order among RULER's repeated
sentences; a solved example of at most 500 tokens comes first, whose variables have other names in each prompt.

Two differences. Where two variables of a chain have one name, which RULER's generator cannot take, all are drawn again.
And where a prompt does not fit, its filler shrinks as that of other tasks; RULER's generator keeps the size and draws
again.
"""

from __future__ import annotations

import itertools
import random
import string
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from swa_jax.data.chat import Wrap
from swa_jax.data.haystack import NOISE
from swa_jax.evaluate.ruler_prompts import Draft, Filler, Room, TooShort

TASK_TEMPLATE = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\n"
    "Question: Find all variables that are assigned the value {value} in the text above."
)
ANSWER_PREFIX = (
    " Answer: According to the chain(s) of variable assignment in the text above, {count} variables are assgined the "
    "value {value}, they are: "  # spelt as in RULER
)
NAME, NUM_NAMES = "vt", 5
LETTERS, LETTERS_OF_EXAMPLE = 5, 3
EXAMPLE_TOKENS, EXAMPLE_ANSWER = 500, 30
STEP, STEP_OF_EXAMPLE = 10, 5  # lines


def tracking_drafts(room: Room, seed: int) -> Iterator[Draft]:
    """Prompts without end. `references` are the names of the chain, in its order."""
    rng, values = random.Random(seed), np.random.RandomState(seed)

    def letters(count: int) -> str:
        return "".join(rng.choices(string.ascii_uppercase, k=count))

    def make(size: int, length: int, example_tokens: int) -> Draft:
        names = [letters(length) for _ in range(NUM_NAMES)]
        while len(set(names)) < NUM_NAMES:
            names = [letters(length) for _ in range(NUM_NAMES)]
        value = str(values.randint(10_000, 99_999))
        handed_on = [f"VAR {name} = VAR {before} " for before, name in itertools.pairwise(names)]
        lines = [NOISE.strip() + "\n"] * size
        if size <= NUM_NAMES:  # too few to stand between: the chain stands among their sentences
            lines = [part + "." if part.strip() else part for line in lines for part in line.split(".")]
        places = sorted(rng.sample(range(len(lines)), NUM_NAMES))
        for shift, (place, statement) in enumerate(zip(places, [f"VAR {names[0]} = {value}", *handed_on], strict=True)):
            lines.insert(place + shift, statement)
        return Draft(
            question=TASK_TEMPLATE.format(context=" ".join(lines).replace(". \n", ".\n"), value=value),
            prefix=ANSWER_PREFIX.format(count=NUM_NAMES, value=value),
            references=names,
            answer=f" {' '.join(names)}",
            counted=f" {names}",
            example_tokens=example_tokens,
        )

    solved, solved_names = _example(room, lambda size, _: make(size, LETTERS_OF_EXAMPLE, 0))
    tokens = len(room.tokenizer.encode(solved))
    for draft in Filler(NAME, lambda size, _: make(size, LETTERS, tokens), STEP).drafts(room):
        example = solved
        for name in solved_names:
            example = example.replace(name, letters(LETTERS_OF_EXAMPLE))
        yield replace(draft, example=f" {example}\n\n")


def _example(room: Room, make: Callable[[int, int], Draft]) -> tuple[str, list[str]]:
    """The solved example and its names; of one line where not even that fits."""
    filler = Filler(NAME, make, STEP_OF_EXAMPLE)
    try:
        draft = next(filler.drafts(Room(room.tokenizer, EXAMPLE_TOKENS, EXAMPLE_ANSWER, Wrap(start_tokens=False))))
    except TooShort:
        draft = filler.make(1, 0)
    return draft.question + draft.prefix + draft.answer + "\n\n", draft.references
