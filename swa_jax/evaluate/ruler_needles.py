"""RULER's needle tasks (niah_*, arXiv:2404.06654): values hidden in a long text under keys."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal
from uuid import UUID

import numpy as np

from swa_jax.data.haystack import NOISE
from swa_jax.evaluate.ruler_data import ADJECTIVES, ESSAYS, NOUNS, RulerData
from swa_jax.evaluate.ruler_prompts import Draft, Filler, enumeration

NEEDLE = "One of the special magic {kind} for {key} is: {value}."
TASK_TEMPLATE = (
    "{opening} special magic {kind} {be} hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n{context}\n"
    "What {be_all} the special magic {kind} for {query} mentioned in the provided text?"
)
ANSWER_PREFIX = " The special magic {kind} for {query} mentioned in the provided text {be}"
DEPTHS = np.round(np.linspace(0, 100, 40)).astype(int).tolist()  # %, where needles lie in essays
STEP_OF_ESSAYS, STEP, STEP_BELOW_4096 = 500, 25, 5  # words; lines


@dataclass(frozen=True)
class NeedleTask:
    """What tells one niah task from another. `num_keys` counts needles beside those a haystack is made of."""

    haystack: Literal["noise", "essay", "needles"]
    keys: Literal["words", "uuids"] = "words"
    values: Literal["numbers", "uuids"] = "numbers"
    num_keys: int = 1
    num_values: int = 1  # of every key
    num_queries: int = 1

    @property
    def files(self) -> tuple[str, ...]:
        words = (ADJECTIVES, NOUNS) if self.keys == "words" else ()
        return (*([ESSAYS] if self.haystack == "essay" else []), *words)


NEEDLE_TASKS: Mapping[str, NeedleTask] = {
    "niah_single_1": NeedleTask("noise"),
    "niah_single_2": NeedleTask("essay"),
    "niah_single_3": NeedleTask("essay", values="uuids"),
    "niah_multikey_1": NeedleTask("essay", num_keys=4),
    "niah_multikey_2": NeedleTask("needles"),
    "niah_multikey_3": NeedleTask("needles", keys="uuids", values="uuids"),
    "niah_multivalue": NeedleTask("essay", num_values=4),
    "niah_multiquery": NeedleTask("essay", num_keys=4, num_queries=4),
}


def needle_filler(name: str, data: RulerData, length: int, depth: float | None, seed: int) -> Filler:
    """Prompts of a needle task; `depth`, if not None, is the place of the first needle asked for."""
    task, rng = NEEDLE_TASKS[name], random.Random(seed)
    essay = task.haystack == "essay"

    def draw(kind: str) -> str:
        if kind == "words":
            return rng.choice(data.keys)
        if kind == "numbers":
            return str(rng.randint(10**6, 10**7 - 1))
        return str(UUID(int=rng.getrandbits(128), version=4))

    def line(key: str, value: str) -> str:
        return NEEDLE.format(kind=task.values, key=key, value=value)

    def make(size: int, _: int) -> Draft:
        """The needles among `size` words of essays, or lines."""
        drawn = [(draw(task.keys), [draw(task.values) for _ in range(task.num_values)]) for _ in range(task.num_keys)]
        needles = [line(key, value) for key, values in drawn for value in values]
        random.Random(seed).shuffle(needles)
        if essay:
            hay = data.sentences.first(size)
            places = sorted(int(len(hay) * (place / 100)) for place in rng.sample(DEPTHS, len(needles)))
        else:
            needles.reverse()  # RULER puts the first one last
            if task.haystack == "noise":
                hay = [NOISE.strip()] * size
            else:
                hay = [line(draw(task.keys), draw(task.values)) for _ in range(size)]
            places = sorted(rng.sample(range(size), len(needles)))
        asked = [drawn[i] for i in rng.sample(range(task.num_keys), task.num_queries)]
        placed = list(zip(places, needles, strict=True))
        if depth is not None:
            first = line(asked[0][0], asked[0][1][0])
            others = [one for one in placed if one[1] != first]
            placed = sorted([*others, (int(len(hay) * depth), first)], key=lambda one: one[0])
        return _draft(task, asked, _among(hay, placed, essay))

    step = STEP_OF_ESSAYS if essay else STEP if length >= 4096 else STEP_BELOW_4096
    return Filler(name, make, step, most=data.sentences.num_words if essay else 2**62)


def _draft(task: NeedleTask, asked: Sequence[tuple[str, list[str]]], context: str) -> Draft:
    references = [value for _, values in asked for value in values]
    one = len(references) == 1
    be = "is" if one else "are"
    kind, query = task.values[:-1] if one else task.values, enumeration([key for key, _ in asked])
    return Draft(
        question=TASK_TEMPLATE.format(
            opening="A" if one else "Some",
            be=be,
            be_all="is" if one else "are all",
            kind=kind,
            context=context,
            query=query,
        ),
        prefix=ANSWER_PREFIX.format(kind=kind, query=query, be=be),
        references=references,
        answer=f" {enumeration(references)}.",
        counted=" ".join(references),
    )


def _among(hay: Sequence[str], placed: Sequence[tuple[int, str]], essay: bool) -> str:
    """The needles, by rising place, before the sentence of that number. Essays are one line."""
    parts, start = list[str](), 0
    for place, needle in [*placed, (len(hay), "")]:
        # Two needles side by side have two blanks between them, as in RULER: between is an empty piece.
        parts += [" ".join(hay[start:place])] if essay else hay[start:place]
        parts.append(needle)
        start = place
    return (" " if essay else "\n").join(parts[:-1])
