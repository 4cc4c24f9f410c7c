"""A model on RULER's tasks: every (task, length, depth) generated, scored, and with its intervals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from swa_jax.base.errors import ConfigError
from swa_jax.base.estimates import accuracy_interval, bootstrap
from swa_jax.data.tokenizer import Tokenizer
from swa_jax.evaluate.examples import Example
from swa_jax.evaluate.generated_answers import generate_answers
from swa_jax.evaluate.ruler import Cell, Score, ruler_task
from swa_jax.evaluate.samples import NO_SAMPLES, Samples
from swa_jax.model.decoder import Decoder


@dataclass(frozen=True)
class RulerScore:
    """One cell. `score` is the mean of the task's own score (`RulerTask.score`), from 0 to 1."""

    task: str
    length: int
    depth: float | None
    score: float
    interval: list[float] | None  # Wilson's, 95 %
    # Percentile bootstrap over examples, 95 %: no width where all scores are equal, None for one example.
    bootstrap_interval: list[float] | None
    num_examples: int
    prompt_tokens: list[int]  # the shortest and the longest
    haystack: str


def ruler_scores(
    model: Decoder,
    tokenizer: Tokenizer,
    cells: dict[Cell, list[Example]],
    *,
    max_new_tokens: int | None = None,
    batch_size: int = 16,
    samples: Samples = NO_SAMPLES,
    advance: Callable[[int], None] = lambda _: None,
) -> list[RulerScore]:
    """Greedy answers to every cell of `ruler_grid`, in its order.

    Cells with the same length, score and room for an answer share batches.

    Args:
      max_new_tokens: None: as many as each cell was made with. An end-of-text token ends an answer earlier.
      samples: where what is known of the examples is found and kept.
      advance: called with how many more examples are answered.

    Raises:
      ConfigError: a cell was made for fewer new tokens, so that its prompts leave no room for these.
    """
    stop = tokenizer.end_ids
    alike: dict[tuple[int, int, Score], list[Cell]] = {}
    for cell, examples in cells.items():
        room = min(example.meta["max_new_tokens"] for example in examples)
        if max_new_tokens is not None and room < max_new_tokens:
            raise ConfigError(
                f"prompts of length {cell[1]} leave less than max_new_tokens = {max_new_tokens} for the answer"
            )
        new = room if max_new_tokens is None else max_new_tokens
        alike.setdefault((cell[1], new, ruler_task(cell[0]).score), []).append(cell)
    scores: dict[Cell, np.ndarray] = {}
    for (_, new, score), some in alike.items():
        answers = generate_answers(
            model,
            tokenizer,
            [example for cell in some for example in cells[cell]],
            max_new_tokens=new,
            batch_size=batch_size,
            timed=False,
            stop_tokens=stop,
            score=score,
            samples=samples,
            advance=advance,
        )
        ends = np.cumsum([len(cells[cell]) for cell in some])[:-1]
        scores |= dict(zip(some, np.split(answers.scores, ends), strict=True))
    return [_cell_score(cell, examples, scores[cell]) for cell, examples in cells.items()]


def _cell_score(cell: Cell, examples: Sequence[Example], scores: np.ndarray) -> RulerScore:
    wilson, resampled = accuracy_interval(scores), bootstrap(scores)
    tokens = [len(example.prompt) for example in examples]
    return RulerScore(
        *cell,
        score=wilson.mean,
        interval=wilson.interval,
        bootstrap_interval=resampled.interval,
        num_examples=len(examples),
        prompt_tokens=[min(tokens), max(tokens)],
        haystack=examples[0].meta["haystack"],
    )
