"""A model on RULER's tasks: every (task, length, depth) generated, scored, and with its intervals.

Of several patterns each is compared with the first, prompt by prompt; and the tasks of a length have an average, in
which each counts the same, as in RULER.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from swa_jax.base.errors import ConfigError
from swa_jax.base.estimates import Estimate, accuracy_interval, mean_of_estimates, paired_score
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
    interval: list[float] | None  # Wilson's, 95 %; of an average, those of its tasks joined
    num_examples: int
    prompt_tokens: list[int]  # the shortest and the longest
    data: str  # whether the files that the prompts are made of are RULER's own; empty where there are none
    scores: list[float]  # of each example; of an average, of each task
    difference: float | None = None  # from the first pattern, on the same prompts
    difference_interval: list[float] | None = None  # 95 %


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
    wilson = accuracy_interval(scores)
    tokens = [len(example.prompt) for example in examples]
    return RulerScore(
        *cell,
        score=wilson.mean,
        interval=wilson.interval,
        num_examples=len(examples),
        prompt_tokens=[min(tokens), max(tokens)],
        data=examples[0].meta["data"],
        scores=scores.tolist(),
    )


AVERAGE = "average"


def against(scores: Sequence[RulerScore], first: Sequence[RulerScore]) -> list[RulerScore]:
    """The scores with what they differ by from the first pattern's, in the same cells."""
    return [_differing(one, paired_score(one.scores, other.scores)) for one, other in zip(scores, first, strict=True)]


def average(scores: Sequence[RulerScore], first: Sequence[RulerScore] | None) -> RulerScore:
    """The average of a length's tasks, each counting the same; `first`: the first pattern's, if these are another's."""
    mean = mean_of_estimates([accuracy_interval(one.scores) for one in scores])
    tokens = [one.prompt_tokens for one in scores]
    made = RulerScore(
        AVERAGE,
        scores[0].length,
        None,
        score=mean.mean,
        interval=mean.interval,
        num_examples=sum(one.num_examples for one in scores),
        prompt_tokens=[min(low for low, _ in tokens), max(high for _, high in tokens)],
        data="; ".join(dict.fromkeys(one.data for one in scores if one.data)),
        scores=[one.score for one in scores],
    )
    if first is None:
        return made
    pairs = zip(scores, first, strict=True)
    return _differing(made, mean_of_estimates([paired_score(one.scores, other.scores) for one, other in pairs]))


def _differing(score: RulerScore, difference: Estimate) -> RulerScore:
    return replace(score, difference=difference.mean, difference_interval=difference.interval)
