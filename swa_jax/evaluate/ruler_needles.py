"""RULER's needle tasks (niah_*, arXiv:2404.06654): values hidden in a long text under keys.

The wording, the kinds of key and value, how many needles there are and where they lie are RULER's. Two differences are
meant, beside the finer fit to a length: no two needles share a key or a value, and a depth can be asked for.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from uuid import UUID

import numpy as np

from swa_jax.base.errors import ConfigError
from swa_jax.data.haystack import NOISE, library_files, read_text
from swa_jax.evaluate.ruler_prompts import Draft, Hay, enumeration, placed
from swa_jax.evaluate.ruler_words import ADJECTIVES, NOUNS

NEEDLE = "One of the special magic {kind} for {key} is: {value}."
TASK_TEMPLATE = (
    "{opening} special magic {kind} {be} hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n{context}\n"
    "What {be_all} the special magic {kind} for {query} mentioned in the provided text?"
)
ANSWER_PREFIX = " The special magic {kind} for {query} mentioned in the provided text {be}"
SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n\s*\n")
DEPTHS = np.round(np.linspace(0, 100, 40)).astype(int) / 100  # where RULER puts needles in essays

HaystackSource = str | Iterable[str | Path] | None


@dataclass(frozen=True)
class NeedleTask:
    """What tells one niah task from another. `num_keys` counts needles beside those a haystack is made of."""

    haystack: Literal["noise", "essay", "needles"]
    keys: Literal["words", "uuids"] = "words"
    values: Literal["numbers", "uuids"] = "numbers"
    num_keys: int = 1
    num_values: int = 1  # of every key
    num_queries: int = 1


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


def essay(source: HaystackSource) -> tuple[str, list[str]]:
    """The haystack's name and its sentences, blanks and line ends within each made one blank."""
    name, end = "text" if isinstance(source, str) else "files", SENTENCE_END
    if source is None:
        name, source = "python standard library (held out), in place of essays", library_files(held_out=True)
        end = re.compile("\n")  # code has few sentences, and depths are counted in them
    text = source if isinstance(source, str) else read_text(source)
    sentences = [" ".join(part.split()) for part in end.split(text)]
    sentences = [sentence for sentence in sentences if sentence]
    if not sentences:
        raise ConfigError("the haystack is empty; give a text or files with some words in them")
    return name, sentences


def needle_draft(task: NeedleTask, rng: np.random.Generator, depth: float | None, essay: Sequence[str]) -> Draft:
    """Needles and a question; `depth`, if not None, is the place of the first needle asked for.

    Keys, values and places are drawn in one order whatever the length: what is drawn last is the haystack of needles.
    """
    keys, values = _Distinct(rng, task.keys), _Distinct(rng, task.values)
    drawn = {next(keys): [next(values) for _ in range(task.num_values)] for _ in range(task.num_keys)}
    queries = rng.permutation(list(drawn))[: task.num_queries].tolist()
    sentences = {
        value: NEEDLE.format(kind=task.values, key=key, value=value)
        for key, of_key in drawn.items()
        for value in of_key
    }
    if task.haystack == "essay":
        places = rng.choice(DEPTHS, len(sentences), replace=False).tolist()
    else:
        places = rng.random(len(sentences)).tolist()
    first = drawn[queries[0]][0]
    places = dict(zip(sentences, places, strict=True))
    if depth is not None:
        places[first] = depth
    if task.haystack == "essay":
        source: Iterator[str] = itertools.cycle(essay)
    elif task.haystack == "noise":
        source = itertools.repeat(NOISE.strip())
    else:
        source = (NEEDLE.format(kind=task.values, key=key, value=next(values)) for key in keys)
    hay, separator = Hay(source), " " if task.haystack == "essay" else "\n"
    needles = sorted(((places[value], needle) for value, needle in sentences.items()), key=lambda n: n[0])
    references = [value for query in queries for value in drawn[query]]
    one = len(references) == 1
    asked = {"kind": task.values[:-1] if one else task.values, "query": enumeration(queries)}

    def question(size: int, whole_words: bool) -> str:
        """The needles between the sentences of `size` characters of haystack, and what is asked."""
        return TASK_TEMPLATE.format(
            opening="A" if one else "Some",
            be="is" if one else "are",
            be_all="is" if one else "are all",
            context=separator.join(placed(hay.take(size, whole_words), needles)),
            **asked,
        )

    def about(size: int, whole_words: bool) -> dict[str, Any]:
        return {
            "depth": places[first],
            "first": sentences[first],
            "keys": queries,
            "num_needles": len(needles),
            "haystack_sentences": len(hay.take(size, whole_words)),
        }

    return Draft(
        least="the needles and the question",
        prefix=ANSWER_PREFIX.format(be="is" if one else "are", **asked),
        references=references,
        answer=f" {enumeration(references)}.",
        question=question,
        about=about,
    )


class _Distinct:
    """Keys or values of one kind, no two alike."""

    def __init__(self, rng: np.random.Generator, kind: str):
        self.rng, self.kind = rng, kind
        self.taken: set[str] = set()

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        if self.kind == "words" and len(self.taken) == len(ADJECTIVES) * len(NOUNS):
            raise ConfigError(
                f"the haystack needs more than {len(self.taken)} keys of words, which is all there are: choose a "
                "shorter length, or niah_multikey_3, whose keys are uuids"
            )
        while (drawn := self._draw()) in self.taken:
            pass
        self.taken.add(drawn)
        return drawn

    def _draw(self) -> str:
        if self.kind == "words":
            return f"{ADJECTIVES[self.rng.integers(len(ADJECTIVES))]}-{NOUNS[self.rng.integers(len(NOUNS))]}"
        if self.kind == "numbers":
            return str(self.rng.integers(10**6, 10**7))
        return str(UUID(bytes=self.rng.bytes(16), version=4))
