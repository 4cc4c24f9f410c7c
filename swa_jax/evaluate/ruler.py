"""RULER's 13 tasks (arXiv:2404.06654), made from local data in the model's own tokens.

For the same data, seed and tokenizer the prompts are those of RULER's own generator, to the letter: of its release
nvidia-long-context-eval 26.3, without a model's template. Its seed is 42. `ruler_prompts.py`, `ruler_tracking.py` and
`ruler_qa.py` say where that generator has no prompts, or others. A depth can be asked for, which it has not.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from swa_jax.base.errors import ConfigError
from swa_jax.base.settings import nearest
from swa_jax.data.chat import Wrap
from swa_jax.data.haystack import TextTokenizer
from swa_jax.evaluate.examples import Example
from swa_jax.evaluate.ruler_counts import common_filler, frequent_drafts
from swa_jax.evaluate.ruler_data import ADJECTIVES, HOTPOTQA, NOUNS, SQUAD, VERBS, RulerData
from swa_jax.evaluate.ruler_needles import NEEDLE_TASKS, needle_filler
from swa_jax.evaluate.ruler_prompts import Draft, Room
from swa_jax.evaluate.ruler_qa import qa_filler
from swa_jax.evaluate.ruler_tracking import tracking_drafts

Cell = tuple[str, int, float | None]  # task, length, depth (None: drawn as RULER does)
Score = Callable[[str, Sequence[str]], float]  # a text, references


def string_match_all(text: str, references: Sequence[str]) -> float:
    """RULER's score of all tasks but qa: the fraction of the references that occur in the text, case ignored."""
    if not references:
        raise ValueError("references is empty; there is nothing to look for")
    return sum(reference.lower() in text.lower() for reference in references) / len(references)


def string_match_part(text: str, references: Sequence[str]) -> float:
    """RULER's score of qa: 1 if one of the references occurs in the text, case ignored."""
    return float(string_match_all(text, references) > 0)


@dataclass(frozen=True)
class RulerTask:
    """What tells one task from another, but for its prompts."""

    new_tokens: int  # of an answer
    files: tuple[str, ...] = ()  # of `RulerData`
    score: Score = string_match_all
    has_depth: bool = False  # what is asked for has one place


RULER_TASKS: Mapping[str, RulerTask] = {
    **{name: RulerTask(128, task.files, has_depth=True) for name, task in NEEDLE_TASKS.items()},
    "vt": RulerTask(30),
    "cwe": RulerTask(120, (NOUNS, ADJECTIVES, VERBS)),
    "fwe": RulerTask(50),
    "qa_1": RulerTask(32, (SQUAD,), string_match_part, has_depth=True),
    "qa_2": RulerTask(32, (HOTPOTQA,), string_match_part, has_depth=True),
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
    data: RulerData,
    depth: float | None = None,
    max_new_tokens: int | None = None,
    wrap: str | Wrap = "{prompt}",
    seed: int = 42,
) -> list[Example]:
    """Examples of one RULER task. A prompt and `max_new_tokens` together have at most about `length` tokens.

    As in RULER, a prompt of fwe alone has up to `length`, and the names of vt may take a few more than were counted.
    The prompt ends with RULER's answer prefix ("... mentioned in the provided text is"). `references` are what is to be
    found; `answer` is what a perfect model would write, for the answer NLL. The first examples do not depend on how
    many there are.

    Args:
      task: a name of `RULER_TASKS`.
      length: tokens of the prompt and of `max_new_tokens` together.
      depth: the place from 0 to 1 of the first needle asked for, or of the document with the answer; None draws it as
        RULER does.
      max_new_tokens: tokens of an answer; None: as many as RULER gives the task.
      wrap: what a chat model wants around the question: a text that holds `{prompt}`, or a `Wrap`; the answer prefix
        follows it.

    Raises:
      ConfigError: no such task, a depth outside 0 to 1 or for a task without a depth, data that is not there or ends
        too early, or a length that cannot hold what must be in the prompt (`TooShort`).
    """
    kind = ruler_task(task)
    if depth is not None and not 0 <= depth <= 1:
        raise ConfigError(f"a depth must be a fraction of the prompt from 0 to 1, got {depth}")
    if depth is not None and not kind.has_depth:
        raise ConfigError(
            f"RULER's task {task} has no depth, because what it asks for is all over the prompt: leave out the depths, "
            "or the task"
        )
    data.check(task, kind.files)
    new = kind.new_tokens if max_new_tokens is None else max_new_tokens
    room = Room(tokenizer, length, new, Wrap.of(wrap))
    drafts = _drafts(task, room, data, depth, seed)
    examples = [room.example(draft) for draft in itertools.islice(drafts, num_examples)]
    for example in examples:
        example.meta["data"] = data.named(kind.files)
    return examples


def _drafts(task: str, room: Room, data: RulerData, depth: float | None, seed: int) -> Iterator[Draft]:
    if task in NEEDLE_TASKS:
        return needle_filler(task, data, room.length, depth, seed).drafts(room)
    if task == "vt":
        return tracking_drafts(room, seed)
    if task == "cwe":
        return common_filler(room, data, seed).drafts(room)
    if task == "fwe":
        return frequent_drafts(room, seed)
    return qa_filler(task, data.squad if task == "qa_1" else data.hotpotqa, depth, seed).drafts(room)


def ruler_grid(
    tokenizer: TextTokenizer,
    tasks: Sequence[str],
    *,
    lengths: Sequence[int],
    depths: Sequence[float] | None,
    num_examples: int,
    data: RulerData,
    max_new_tokens: int | None = None,
    wrap: str | Wrap = "{prompt}",
    seed: int = 42,
) -> dict[Cell, list[Example]]:
    """`num_examples` for every task, length and depth.

    Args:
      depths: None leaves them to `ruler_examples`: one cell for each task and length.
    """
    return {
        (task, length, depth): ruler_examples(
            tokenizer,
            task,
            length=length,
            num_examples=num_examples,
            data=data,
            depth=depth,
            max_new_tokens=max_new_tokens,
            wrap=wrap,
            seed=seed + 7919 * number,
        )
        for task in tasks
        for length in lengths
        for number, depth in enumerate([None] if depths is None else depths)
    }
