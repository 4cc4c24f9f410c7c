"""RULER's needle tasks (arXiv:2404.06654, niah_*), made from local text in the model's own tokens.

The wording, the kinds of key and value, how many needles there are and where they lie are RULER's. Where it uses
what cannot be shipped, something else stands in its place, and every example's `meta` says so:

- essays: the files or the text that the user names; without any, the held-out modules of the Python standard library;
- words for keys: our own lists (`words.py`), not those of `wonderwords`;
- sentence ends: a full stop, question or exclamation mark before a blank, or an empty line (for the standard library,
  every line end); not NLTK's model.

Three differences are meant. The haystack is cut where the length is reached, in the middle of a sentence or of a
distractor, so that prompts end within 1 % of their target; RULER's steps are 25 lines or 500 words. No two needles
share a key or a value. A depth can be asked for, and one draw does not depend on how many examples there are.
"""

from __future__ import annotations

import itertools
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from uuid import UUID

import numpy as np

from swa_jax.data.haystack import NOISE, TextTokenizer, library_files, read_text
from swa_jax.errors import ConfigError
from swa_jax.evaluate.examples import Example
from swa_jax.evaluate.ruler_words import ADJECTIVES, NOUNS
from swa_jax.settings import nearest

NEEDLE = "One of the special magic {kind} for {key} is: {value}."
TASK_TEMPLATE = (
    "{opening} special magic {kind} {be} hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n{context}\n"
    "What {be_all} the special magic {kind} for {query} mentioned in the provided text?"
)
ANSWER_PREFIX = " The special magic {kind} for {query} mentioned in the provided text {be}"
TOKENS_TO_GENERATE = 128
TOLERANCE = 0.01  # of the length, below it
SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n\s*\n")
DEPTHS = np.round(np.linspace(0, 100, 40)).astype(int) / 100  # where RULER puts needles in essays

HaystackSource = str | Iterable[str | Path] | None
Cell = tuple[str, int, float | None]  # task, length, depth (None: drawn as RULER does)


@dataclass(frozen=True)
class RulerTask:
    """What tells one niah task from another. `num_keys` counts needles beside those a haystack is made of."""

    haystack: Literal["noise", "essay", "needles"]
    keys: Literal["words", "uuids"] = "words"
    values: Literal["numbers", "uuids"] = "numbers"
    num_keys: int = 1
    num_values: int = 1  # of every key
    num_queries: int = 1


RULER_TASKS: Mapping[str, RulerTask] = {
    "niah_single_1": RulerTask("noise"),
    "niah_single_2": RulerTask("essay"),
    "niah_single_3": RulerTask("essay", values="uuids"),
    "niah_multikey_1": RulerTask("essay", num_keys=4),
    "niah_multikey_2": RulerTask("needles"),
    "niah_multikey_3": RulerTask("needles", keys="uuids", values="uuids"),
    "niah_multivalue": RulerTask("essay", num_values=4),
    "niah_multiquery": RulerTask("essay", num_keys=4, num_queries=4),
}


def ruler_task(name: str) -> RulerTask:
    """The task of that name. Raises `ConfigError`, naming the nearest."""
    if name not in RULER_TASKS:
        raise ConfigError(f"there is no RULER task '{name}'{nearest(name, list(RULER_TASKS))}")
    return RULER_TASKS[name]


def ruler_examples(
    tokenizer: TextTokenizer,
    task: str,
    *,
    length: int,
    num_examples: int,
    depths: Sequence[float] | None = None,
    haystack: HaystackSource = None,
    max_new_tokens: int = TOKENS_TO_GENERATE,
    wrap: str = "{prompt}",
    seed: int = 0,
) -> list[Example]:
    """Examples of one RULER task. A prompt and `max_new_tokens` together are at most 1 % below `length` tokens.

    The prompt ends with RULER's answer prefix ("... mentioned in the provided text is"). `references` are the values
    to be found; `answer` is what a perfect model would write, for the answer NLL. `meta["depth"]` is the place of the
    first needle that is asked for, as a share of the haystack's sentences; `meta["needle_start"]` is its first token.

    Args:
      task: a name of `RULER_TASKS`.
      length: tokens of the prompt and of `max_new_tokens` together.
      depths: places from 0 to 1 for the first needle asked for, taken in turn; None draws them as RULER does.
      haystack: a text, or text files, for the tasks that take essays; None: Python standard library modules.
      wrap: what a chat model wants around the question, `{prompt}` standing for it; the answer prefix follows it.

    Raises:
      ConfigError: no such task, a depth outside 0 to 1, an empty haystack, or a length that cannot hold the needles.
    """
    kind = ruler_task(task)
    if depths is not None and (len(depths) == 0 or any(not 0 <= depth <= 1 for depth in depths)):
        raise ConfigError(f"depths must be fractions of the prompt from 0 to 1, got {list(depths)}")
    if wrap.count("{prompt}") != 1:
        raise ConfigError("the template around a prompt must hold {prompt} exactly once")
    name, essay = _essay(haystack) if kind.haystack == "essay" else (f"{kind.haystack} (RULER)", [])
    examples = []
    for index in range(num_examples):
        depth = None if depths is None else depths[index % len(depths)]
        rng = np.random.default_rng([seed, index])
        draft = _draw(kind, rng, depth, essay)
        example = _fit(draft, tokenizer, length, max_new_tokens, wrap)
        example.meta.update(task=task, haystack=name)
        examples.append(example)
    return examples


def ruler_grid(
    tokenizer: TextTokenizer,
    tasks: Sequence[str],
    *,
    lengths: Sequence[int],
    depths: Sequence[float] | None,
    num_examples: int,
    haystack: HaystackSource = None,
    max_new_tokens: int = TOKENS_TO_GENERATE,
    wrap: str = "{prompt}",
    seed: int = 0,
) -> dict[Cell, list[Example]]:
    """`num_examples` for every task, length and depth. Keys and values are the same at every length.

    Args:
      depths: None leaves them to `ruler_examples`: one cell for each task and length.
    """
    return {
        (task, length, depth): ruler_examples(
            tokenizer,
            task,
            length=length,
            num_examples=num_examples,
            depths=None if depth is None else [depth],
            haystack=haystack,
            max_new_tokens=max_new_tokens,
            wrap=wrap,
            seed=seed + 7919 * number,
        )
        for task in tasks
        for length in lengths
        for number, depth in enumerate([None] if depths is None else depths)
    }


def string_match_all(text: str, references: Sequence[str]) -> float:
    """RULER's score of the niah tasks: the fraction of the references that occur in the text, case ignored."""
    if not references:
        raise ValueError("references is empty; there is nothing to look for")
    return sum(reference.lower() in text.lower() for reference in references) / len(references)


# ---- one example ----


@dataclass(frozen=True)
class _Draft:
    """An example but for the size of its haystack."""

    task: RulerTask
    hay: _Hay
    needles: list[tuple[float, str]]  # (depth, sentence), by depth
    queries: list[str]
    values: list[str]  # of the queries, in their order
    first: str  # the needle of the first query's first value
    first_depth: float
    separator: str

    @property
    def one(self) -> bool:
        return len(self.values) == 1

    def context(self, size: int, whole_words: bool) -> str:
        """The needles between the sentences of `size` characters of haystack."""
        sentences = self.hay.take(size, whole_words)
        pieces, start = [], 0
        for depth, needle in self.needles:
            place = int(len(sentences) * depth)
            pieces += [*sentences[start:place], needle]
            start = place
        return self.separator.join([*pieces, *sentences[start:]])

    def prompt(self, context: str, wrap: str) -> str:
        kind = self.task.values[:-1] if self.one else self.task.values
        query = _enumerate(self.queries)
        question = TASK_TEMPLATE.format(
            opening="A" if self.one else "Some",
            be="is" if self.one else "are",
            be_all="is" if self.one else "are all",
            kind=kind,
            context=context,
            query=query,
        )
        prefix = ANSWER_PREFIX.format(kind=kind, query=query, be="is" if self.one else "are")
        before, after = wrap.split("{prompt}")
        return before + question + after + (prefix if not after else prefix.lstrip())


class _Hay:
    """Sentences without end, of which the first `size` characters are taken."""

    def __init__(self, sentences: Iterator[str]):
        self.source = sentences
        self.sentences: list[str] = []
        self.ends: list[int] = [0]  # characters of the first n sentences, with the separator after each

    def take(self, size: int, whole_words: bool) -> list[str]:
        """The last sentence is cut, at the end of a word if asked for."""
        while self.ends[-1] < size:
            self.sentences.append(next(self.source))
            self.ends.append(self.ends[-1] + len(self.sentences[-1]) + 1)
        whole = bisect_right(self.ends, size) - 1
        rest = self.sentences[whole][: size - self.ends[whole]] if self.ends[whole] < size else ""
        if whole_words and len(rest) < len(self.sentences[whole] if rest else ""):
            rest = rest.rpartition(" ")[0]
        return [*self.sentences[:whole], *([rest.rstrip()] if rest.strip() else [])]


def _draw(task: RulerTask, rng: np.random.Generator, depth: float | None, essay: Sequence[str]) -> _Draft:
    """Keys, values and places, in one order whatever the length: what is drawn last is the haystack of needles."""
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
    return _Draft(
        task=task,
        hay=_Hay(source),
        needles=sorted(((places[value], needle) for value, needle in sentences.items()), key=lambda n: n[0]),
        queries=queries,
        values=[value for query in queries for value in drawn[query]],
        first=sentences[first],
        first_depth=places[first],
        separator=" " if task.haystack == "essay" else "\n",
    )


def _fit(draft: _Draft, tokenizer: TextTokenizer, length: int, max_new_tokens: int, wrap: str) -> Example:
    """The draft with as much haystack as the length takes."""
    opening = list(getattr(tokenizer, "start_ids", []))  # a <bos>, where the model expects one
    limit = length - max_new_tokens - len(opening)

    def count(size: int) -> int:
        return len(tokenizer.encode(draft.prompt(draft.context(size, whole_words), wrap)))

    whole_words = True
    needed = count(0)
    if needed > limit:
        raise ConfigError(
            f"length is {length} tokens, but the needles and the question alone take {needed + len(opening)} and "
            f"the answer gets {max_new_tokens}: it must be at least {needed + len(opening) + max_new_tokens}"
        )
    slack = int(TOLERANCE * length)
    size, tokens = _search(count, limit, slack)
    if limit - tokens > slack:
        whole_words = False
        size, tokens = _search(count, limit, slack)
    context = draft.context(size, whole_words)
    text = draft.prompt(context, wrap)
    answer = f" {_enumerate(draft.values)}."
    return Example(
        prompt=[*opening, *tokenizer.encode(text)],
        answer=tokenizer.encode(answer),
        references=draft.values,
        meta={
            "length": length,
            "prompt_tokens": len(opening) + tokens,
            "max_new_tokens": max_new_tokens,
            "depth": draft.first_depth,
            "needle_start": len(opening) + len(tokenizer.encode(text[: text.index(draft.first)])),
            "keys": draft.queries,
            "num_needles": len(draft.needles),
            "haystack_sentences": len(draft.hay.take(size, whole_words)),
        },
    )


def _search(count: Callable[[int], int], limit: int, slack: int) -> tuple[int, int]:
    """A size whose count is at most `limit` and, if there is one, at least `limit - slack`; and that count.

    Counts grow nearly in proportion to sizes, so the next try lies on a straight line; every third one halves the
    bracket, which bounds the work where they do not.
    """
    base = count(0)
    low, low_count = 0, base
    high = high_count = 0
    for step in itertools.count():
        if limit - low_count <= slack or high - low == 1:
            return low, low_count
        if not high:
            characters_a_token = low / (low_count - base) if low_count > base else 4.0
            size = low + max(64, int((limit - low_count) * characters_a_token))
        else:
            aim = (limit - slack / 2 - low_count) / (high_count - low_count)
            size = (low + high) // 2 if step % 3 == 2 else low + int((high - low) * aim)
            size = min(max(size, low + 1), high - 1)
        tokens = count(size)
        if tokens > limit:
            high, high_count = size, tokens
        else:
            low, low_count = size, tokens
    raise AssertionError("unreachable")


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


def _enumerate(words: Sequence[str]) -> str:
    return ", ".join(words[:-1]) + ", and " + words[-1] if len(words) > 1 else words[0]


def _essay(source: HaystackSource) -> tuple[str, list[str]]:
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
