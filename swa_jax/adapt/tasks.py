"""What a model is measured by: prompts with answers, and rows of text, every one scored teacher-forced.

The same tasks are drawn twice: a few examples to choose a pattern by, and others to measure on what was chosen.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from swa_jax.base.errors import ConfigError
from swa_jax.base.estimates import accuracy_interval, bootstrap, paired_accuracy, paired_bootstrap
from swa_jax.data.chat import Wrap
from swa_jax.data.haystack import Haystack, library_files, read_text
from swa_jax.data.tokenizer import Tokenizer
from swa_jax.evaluate.chains import ChainCell, chain_examples
from swa_jax.evaluate.examples import Example, prompt_examples
from swa_jax.evaluate.needle import needle_examples
from swa_jax.evaluate.nll import score_answers
from swa_jax.model.decoder import Decoder
from swa_jax.model.pattern import AttentionPattern
from swa_jax.model.window import Window
from swa_jax.select.separation import indifference, weakness

HOPS, RIVALS = (1, 2, 3), 3  # of the chains that the bundled model is asked for, wherever it is measured
GAP_SHARE = 8  # statements of a chain are at least this share of an example apart
MANY_KEYS = 4  # numbers hidden at once, in the second needle task
ROWS_OF_TEXT = 4  # times as many prompts as rows of text, all of whose tokens count
LEAST_ROWS = 8  # of text to measure on, where it has them: the interval of two is too wide to say anything
TEXT_CHARACTERS = 20  # read for each token of text that is drawn: more than a tokenizer makes one token of


@dataclasses.dataclass(frozen=True)
class EvalTask:
    """Examples of one kind.

    Attributes:
      name: in files; title: what it is, in a few words; about: how an example is made and scored, in a sentence.
      answers: whether an example ends with an answer, which is right or wrong; of plain text there is the loss alone.
    """

    name: str
    title: str
    about: str
    examples: Sequence[Example]
    answers: bool = True


@dataclasses.dataclass(frozen=True)
class Data:
    """Where examples come from. Without `prompts` and `text`: from the library's own sources, held out."""

    length: int  # tokens of an example
    prompts: Path | None = None  # records with prompt and answer
    text: tuple[Path, ...] = ()  # to hide numbers in, and to read
    seed: int = 0
    chains: bool = False  # in place of needles: for the tokenizer that has their words
    wrap: Wrap | None = None  # what a chat model wants around a prompt

    @property
    def asked(self) -> str:
        """How, to go into a sentence."""
        return "" if self.wrap is None else ", in the model's chat template"


class Splits(NamedTuple):
    """The same tasks with different examples."""

    choosing: list[EvalTask]
    measuring: list[EvalTask]


def draw_tasks(data: Data, tokenizer: Tokenizer, choosing: int, measuring: int) -> Splits:
    """Tasks with `choosing` prompts each to choose a pattern by, and with `measuring` others to measure on.

    Raises:
      ConfigError: a file that cannot be used, or has too little in it; a length that needles do not fit into.
    """
    drawn = Splits([], [])

    def add(halves: Sequence[Sequence[Example]], **about: Any) -> None:
        for tasks, examples in zip(drawn, halves, strict=True):
            tasks.append(EvalTask(**about, examples=examples))

    length = data.length
    if data.prompts is not None:
        both = prompt_examples(
            tokenizer, data.prompts, num_examples=choosing + measuring, length=length, wrap=data.wrap, seed=data.seed
        )
        add(
            (both[:choosing], both[choosing:]),
            name="answers",
            title=f"Answers of {data.prompts.name}",
            about=f"Prompts of at most {length} tokens{data.asked}. An answer is right if every token of it is the "
            "likeliest.",
        )
    if data.prompts is None or data.text:
        files = data.text or tuple(library_files(held_out=True))
        if data.chains:
            _add_chains(add, tokenizer, data, (choosing, measuring))
        else:
            _add_needles(add, tokenizer, Haystack(tokenizer, files), data, (choosing, measuring))
        about = f"Rows of {length} tokens of text: how surprising each next token is to the model."
        counts = choosing // ROWS_OF_TEXT, max(LEAST_ROWS, measuring // ROWS_OF_TEXT)
        rows = _text_rows(tokenizer, files, length, *counts)
        add(rows, name="text", title="Plain text", about=about, answers=False)
    return drawn


def _add_needles(
    add: Callable[..., None], tokenizer: Tokenizer, haystack: Haystack, data: Data, counts: tuple[int, int]
) -> None:
    """One number hidden, and one among others."""
    for keys, title in ((1, "One number hidden"), (MANY_KEYS, f"One of {MANY_KEYS} numbers hidden")):
        halves = [
            needle_examples(
                tokenizer,
                length=data.length,
                num_examples=count,
                num_keys=keys,
                haystack=haystack,
                wrap=data.wrap or Wrap(),
                seed=seed,
            )
            for seed, count in enumerate(counts, start=2 * data.seed)
        ]
        among = f", among {keys - 1} others" if keys > 1 else ""
        about = (
            f"A number of 7 digits is hidden in a text of {data.length} tokens{among}, and asked for at its "
            f"end{data.asked}. Every digit must be the likeliest; the sentence before the number is given."
        )
        add(halves, name=f"needles-{keys}", title=title, about=about)


def _add_chains(add: Callable[..., None], tokenizer: Tokenizer, data: Data, counts: tuple[int, int]) -> None:
    """Chains of each number of hops, as tasks of their own."""
    gap = data.length // GAP_SHARE
    for hops in HOPS:
        halves = [
            chain_examples(tokenizer, ChainCell(hops, RIVALS, data.length), num_examples=count, gap=gap, seed=seed)
            for seed, count in enumerate(counts, start=2 * data.seed)
        ]
        statements = "One statement leads" if hops == 1 else f"{hops} statements, one after the other, lead"
        about = (
            f"{statements} from a name to its number, in a text of {data.length} tokens with {RIVALS} other chains. "
            f"The statements are at least {gap} tokens apart. The number must be the likeliest token."
        )
        title = f"A chain of {hops} statement{'s' if hops > 1 else ''}"
        add(halves, name=f"chains-{hops}", title=title, about=about)


def _text_rows(
    tokenizer: Tokenizer, files: Sequence[Path], length: int, choosing: int, measuring: int
) -> tuple[list[Example], list[Example]]:
    """Rows that do not overlap, at least two of each kind; those to choose by lie between the others.

    Each begins with the tokenizer's start tokens, or else with a token of the text.
    """
    wanted = max(2, choosing) + measuring
    tokens = tokenizer.encode(read_text(files)[: TEXT_CHARACTERS * length * wanted])
    size = length - len(tokenizer.start_ids)
    rows = min(len(tokens) // size, wanted)
    if rows < 4:
        raise ConfigError(
            f"the text has {len(tokens)} tokens, but at least 4 rows of {size} are needed, to choose by and to "
            "measure on: give a longer --text, or a smaller --length"
        )
    examples = []
    for first in np.linspace(0, len(tokens) - size, rows).astype(int):
        row = [*tokenizer.start_ids, *tokens[first : first + size]]
        head = len(tokenizer.start_ids) or 1
        examples.append(Example(row[:head], row[head:], []))
    count = max(2, rows * choosing // (choosing + measuring))
    chosen = set(np.linspace(0, rows - 1, count + 2)[1:-1].round().astype(int).tolist())
    return (
        [one for i, one in enumerate(examples) if i in chosen],
        [one for i, one in enumerate(examples) if i not in chosen],
    )


# ---- measuring ----

type Scores = dict[str, dict[str, list[float]]]  # by task: "losses" [N], nats a token, and of answers "right" [N]


def measure(
    model: Decoder,
    tasks: Sequence[EvalTask],
    pattern: AttentionPattern,
    batch_size: int,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> Scores:
    """Every example of every task under a pattern, as plain JSON values. Text is read as a prompt is.

    `progress` is called with (examples done, examples in all).
    """
    scores: Scores = {}
    total, done = num_examples(tasks), 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        progress(done, total)

    for task in tasks:
        seen = pattern if task.answers else pattern.with_window(Window(full_decode=False))
        scored = score_answers(model, task.examples, batch_size=batch_size, pattern=seen, advance=advance)
        scores[task.name] = {"losses": scored.nll.tolist()}
        if task.answers:
            scores[task.name]["right"] = scored.right.astype(float).tolist()
    return scores


class Doubts(NamedTuple):
    """What a search by some tasks should know beforehand."""

    sentences: list[str]
    nothing_told: bool  # no task's loss tells full attention from windows in every layer


def doubts(tasks: Sequence[EvalTask], original: Scores, windowed: Scores) -> Doubts:
    """Which tasks say little of what windows cost, by the scores of the model as it was and with windows everywhere."""
    sentences, told = [], False
    for task in tasks:
        full = original[task.name]
        # The whole answer to a prompt of one's own is hardly ever word for word: its loss counts alone.
        has_value = task.answers and any(example.value is not None for example in task.examples)
        weak = weakness(full["right"]) if has_value else None
        same = indifference(full["losses"], windowed[task.name]["losses"], "loss")
        told |= same is None
        sentences += [f"{task.title}: {found.reason}; {found.advice}" for found in (weak, same) if found]
    return Doubts(sentences, not told)


def num_examples(tasks: Sequence[EvalTask]) -> int:
    return sum(len(task.examples) for task in tasks)


def lost(scores: Scores, original: Scores) -> float:
    """How much more loss than the original has, nats a token, the mean over the tasks; what a search makes small."""
    return float(np.mean([np.mean(scores[name]["losses"]) - np.mean(original[name]["losses"]) for name in original]))


def share_right(scores: Scores) -> float | None:
    """The share of right answers, the mean over the tasks that have answers; None where none has."""
    shares = [np.mean(one["right"]) for one in scores.values() if "right" in one]
    return float(np.mean(shares)) if shares else None


def compared(scores: Scores, original: Scores, tasks: Sequence[EvalTask]) -> list[dict[str, Any]]:
    """A row for each figure of each task: [mean, low, high] of both, and of their paired difference, 95 % intervals."""
    rows = []
    for task in tasks:
        for figure in ("right", "losses") if task.answers else ("losses",):
            before, after = original[task.name][figure], scores[task.name][figure]
            of_shares = figure == "right"
            interval, difference = (accuracy_interval, paired_accuracy) if of_shares else (bootstrap, paired_bootstrap)
            rows.append(
                {
                    "task": task.name,
                    "figure": figure,
                    "n": len(before),
                    "original": list(interval(before)),
                    "adapted": list(interval(after)),
                    "difference": list(difference(after, before)),
                }
            )
    return rows
