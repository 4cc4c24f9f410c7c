"""RULER's variable tracking (vt, arXiv:2404.06654): which variables have a value that is assigned once and handed on.

One chain of five statements, `VAR AAAAA = 12345`, `VAR BBBBB = VAR AAAAA`, ..., stands in order among RULER's repeated
sentences; a solved example with a chain of its own comes first. Names have five letters, those of the example three.
The example takes at most 500 tokens, as RULER's, and at most a quarter of the length, so that short prompts have room
for their own chain. Beside that and the finer fit to a length, no two variables share a name.
"""

from __future__ import annotations

import itertools
import string
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from swa_jax.data.haystack import NOISE
from swa_jax.evaluate.examples import Example
from swa_jax.evaluate.ruler_prompts import Draft, Hay, Room, placed

TASK_TEMPLATE = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\n"
    "Question: Find all variables that are assigned the value {value} in the text above."
)
ANSWER_PREFIX = (
    " Answer: According to the chain(s) of variable assignment in the text above, {count} variables are assigned the "
    "value {value}, they are: "
)
HOPS = 4
LETTERS, LETTERS_OF_EXAMPLE = 5, 3
EXAMPLE_TOKENS = 500
NAME = "noise (RULER)"


def tracking_example(room: Room, rng: np.random.Generator) -> Example:
    """One example. `references` are the names of the chain, in its order."""
    solved, asked = _draw(rng, LETTERS_OF_EXAMPLE), _draw(rng, LETTERS)
    most = min(EXAMPLE_TOKENS, room.length // 4)

    def example(lines: int) -> str:
        return solved.text([NOISE.strip()] * lines) + solved.prefix + solved.answer + "\n\n"

    lines = next(n for n in itertools.count() if len(room.tokenizer.encode(example(n + 1))) > most)
    before, hay = example(lines), Hay(itertools.repeat(NOISE.strip()))
    return room.fit(
        Draft(
            least="the example, the chain and the question of vt",
            prefix=asked.prefix,
            references=asked.names,
            answer=asked.answer,
            question=lambda size, whole_words: before + asked.text(hay.take(size, whole_words)),
            about=lambda *_: {"first": asked.statements[0], "depths": asked.depths, "haystack": NAME},
        )
    )


@dataclass(frozen=True)
class _Chain:
    names: list[str]
    value: str
    depths: list[float]  # of the statements, rising

    @property
    def statements(self) -> list[str]:
        """A blank ends all but the first, as in RULER."""
        handed_on = [f"VAR {name} = VAR {before} " for before, name in itertools.pairwise(self.names)]
        return [f"VAR {self.names[0]} = {self.value}", *handed_on]

    @property
    def prefix(self) -> str:
        return ANSWER_PREFIX.format(count=len(self.names), value=self.value)

    @property
    def answer(self) -> str:
        return f" {' '.join(self.names)}"

    def text(self, noise: Sequence[str]) -> str:
        lines = placed(noise, list(zip(self.depths, self.statements, strict=True)))
        return TASK_TEMPLATE.format(context="\n".join(lines), value=self.value)


def _draw(rng: np.random.Generator, letters: int) -> _Chain:
    names: dict[str, None] = {}
    while len(names) <= HOPS:
        names["".join(rng.choice(list(string.ascii_uppercase), letters))] = None
    value = str(rng.integers(10_000, 100_000))
    return _Chain(list(names), value, sorted(rng.random(HOPS + 1).tolist()))
