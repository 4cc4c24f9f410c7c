"""RULER's tasks (arXiv:2404.06654), made from local text in the model's own tokens.

The wordings, the numbers and the scores are RULER's. What each task has in place of what cannot be shipped, and where
it differs, stands in its own module; every example's `meta["haystack"]` says so too:

- needles (niah_*): `ruler_needles.py`. Essays are the files or the text that the user names; without any, the held-out
  modules of the Python standard library. Keys come from word lists of our own (`ruler_words.py`), not from
  `wonderwords`. Sentences end at a full stop, question or exclamation mark before a blank, or at an empty line (for the
  standard library, at every line end); not by NLTK's model;
- variable tracking (vt): `ruler_tracking.py`;
- common and frequent words (cwe, fwe): `ruler_counts.py`;
- questions among documents (qa_1: SQuAD, qa_2: HotpotQA), from the user's own files: `ruler_qa.py`.

One difference is meant for all: filler is cut where the length is reached, so that prompts end within 1 % of their
target (`ruler_prompts.py`). One draw does not depend on how many examples there are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from swa_jax.base.errors import ConfigError
from swa_jax.base.settings import nearest
from swa_jax.data.chat import Wrap
from swa_jax.data.haystack import TextTokenizer
from swa_jax.evaluate.examples import Example
from swa_jax.evaluate.ruler_counts import common_example, frequent_example
from swa_jax.evaluate.ruler_needles import NEEDLE_TASKS, HaystackSource, essay, needle_draft
from swa_jax.evaluate.ruler_prompts import Room
from swa_jax.evaluate.ruler_qa import READERS, QuestionFile, qa_example
from swa_jax.evaluate.ruler_tracking import tracking_example

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
    score: Score = string_match_all
    has_depth: bool = False  # what is asked for has one place
    needs_file: bool = False


RULER_TASKS: Mapping[str, RulerTask] = {
    **dict.fromkeys(NEEDLE_TASKS, RulerTask(128, has_depth=True)),
    "vt": RulerTask(30),
    "cwe": RulerTask(120),
    "fwe": RulerTask(50),
    **dict.fromkeys(READERS, RulerTask(32, string_match_part, has_depth=True, needs_file=True)),
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
    questions: QuestionFile | None = None,
    max_new_tokens: int | None = None,
    wrap: str | Wrap = "{prompt}",
    seed: int = 0,
) -> list[Example]:
    """Examples of one RULER task. A prompt and `max_new_tokens` together are at most 1 % below `length` tokens.

    The prompt ends with RULER's answer prefix ("... mentioned in the provided text is"). `references` are what is to be
    found; `answer` is what a perfect model would write, for the answer NLL. `meta["depth"]` is the place of the first
    needle that is asked for, as a share of the haystack's sentences (qa: of the documents); `meta["needle_start"]` is
    its first token. Lists of words (cwe) are cut between two words, which may be coarser than 1 % of a short length.

    Args:
      task: a name of `RULER_TASKS`.
      length: tokens of the prompt and of `max_new_tokens` together.
      depths: places from 0 to 1 for the first needle asked for, taken in turn; None draws them as RULER does.
      haystack: a text, or text files, for the tasks that take essays; None: Python standard library modules.
      questions: for qa_1 and qa_2, a file as `read_squad` and `read_hotpotqa` read it.
      max_new_tokens: tokens of an answer; None: as many as RULER gives the task.
      wrap: what a chat model wants around the question: a text that holds `{prompt}`, or a `Wrap`; the answer prefix
        follows it.

    Raises:
      ConfigError: no such task, a depth outside 0 to 1 or for a task without a depth, an empty haystack, no file of
        questions or too few in it, or a length that cannot hold what must be in the prompt.
    """
    kind = ruler_task(task)
    if depths is not None and (len(depths) == 0 or any(not 0 <= depth <= 1 for depth in depths)):
        raise ConfigError(f"depths must be fractions of the prompt from 0 to 1, got {list(depths)}")
    if depths is not None and not kind.has_depth:
        raise ConfigError(
            f"RULER's task {task} has no depth, because what it asks for is all over the prompt: leave out the depths, "
            "or the task"
        )
    if kind.needs_file and questions is None:
        raise ConfigError(f"RULER's task {task} needs a file of questions: name your copy of the data set")
    new = kind.new_tokens if max_new_tokens is None else max_new_tokens
    room = Room(tokenizer, length, new, Wrap.of(wrap))
    make = _maker(task, room, haystack, questions, seed)
    examples = []
    for index in range(num_examples):
        depth = None if depths is None else depths[index % len(depths)]
        example = make(np.random.default_rng([seed, index]), depth, index)
        example.meta["task"] = task
        examples.append(example)
    return examples


def _maker(
    task: str, room: Room, haystack: HaystackSource, questions: QuestionFile | None, seed: int
) -> Callable[[np.random.Generator, float | None, int], Example]:
    """What makes an example of a generator, a depth and the example's number."""
    if task in NEEDLE_TASKS:
        needles = NEEDLE_TASKS[task]
        name, sentences = essay(haystack) if needles.haystack == "essay" else (f"{needles.haystack} (RULER)", [])

        def needle(rng: np.random.Generator, depth: float | None, _: int) -> Example:
            example = room.fit(needle_draft(needles, rng, depth, sentences))
            example.meta["haystack"] = name
            return example

        return needle
    if questions is not None and task in READERS:
        return lambda rng, depth, index: qa_example(room, rng, depth, questions, questions.drawn(index, seed))
    plain = {"vt": tracking_example, "cwe": common_example, "fwe": frequent_example}[task]
    return lambda rng, depth, index: plain(room, rng)


def ruler_grid(
    tokenizer: TextTokenizer,
    tasks: Sequence[str],
    *,
    lengths: Sequence[int],
    depths: Sequence[float] | None,
    num_examples: int,
    haystack: HaystackSource = None,
    questions: Mapping[str, QuestionFile] | None = None,
    max_new_tokens: int | None = None,
    wrap: str | Wrap = "{prompt}",
    seed: int = 0,
) -> dict[Cell, list[Example]]:
    """`num_examples` for every task, length and depth. What is asked for is the same at every length, but for cwe.

    Args:
      depths: None leaves them to `ruler_examples`: one cell for each task and length.
      questions: the files of qa_1 and qa_2, by task.
    """
    return {
        (task, length, depth): ruler_examples(
            tokenizer,
            task,
            length=length,
            num_examples=num_examples,
            depths=None if depth is None else [depth],
            haystack=haystack,
            questions=(questions or {}).get(task),
            max_new_tokens=max_new_tokens,
            wrap=wrap,
            seed=seed + 7919 * number,
        )
        for task in tasks
        for length in lengths
        for number, depth in enumerate([None] if depths is None else depths)
    }
