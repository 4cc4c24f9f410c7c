"""Chains as an evaluation task: a number that only several look-ups, one after the other, can find.

What a prompt holds and how it is worded: `swa_jax.data.chains`. Every prompt asks one question, so that no answer gives
another away. Its difficulty has four scales: hops, rivals, length, and depth.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from swa_jax.base.errors import ConfigError
from swa_jax.base.estimates import accuracy_interval
from swa_jax.data.chains import STATEMENT, ChainWords, draw_chains, draw_order
from swa_jax.data.haystack import Haystack, TextTokenizer, insert_needles
from swa_jax.evaluate.examples import Example
from swa_jax.evaluate.nll import score_answers
from swa_jax.evaluate.samples import NO_SAMPLES, Samples
from swa_jax.model.decoder import Decoder

BOTH = 2  # the numbers that a sum takes


@dataclasses.dataclass(frozen=True)
class ChainCell:
    """One degree of difficulty.

    Attributes:
      hops: the statements that lead from the name that is asked for to its number.
      rivals: the other chains of the prompt, each of as many statements.
      length: tokens of prompt and answer together.
      depth: where the statement with the number stands: 0 is as early as the length allows, 1 as late. None: drawn.
      sums: ask for the sum of the number and a rival's.
    """

    hops: int
    rivals: int
    length: int
    depth: float | None = None
    sums: bool = False


@dataclasses.dataclass(frozen=True)
class ChainScore:
    """How often a model answers the prompts of a cell, teacher-forced: every token of the answer is the likeliest."""

    cell: ChainCell
    score: float  # share of right answers
    interval: list[float] | None  # 95 %, Wilson's
    answer_nll: float  # nats a token
    n: int


def chain_examples(
    tokenizer: TextTokenizer,
    cell: ChainCell,
    *,
    num_examples: int,
    gap: int = 0,
    haystack: Haystack | None = None,
    seed: int = 0,
) -> list[Example]:
    """Prompts of one cell; equal arguments give equal examples.

    Args:
      gap: at least so many tokens lie between the start of a statement of the asked chain and the start of the next
        one, and between the last and the question. A model with windows of up to `gap` tokens then needs a longer view
        for every hop, inside the prompt too.
      haystack: where the noise is from; None: filler words.
      seed: of a NumPy generator, with the cell.

    Raises:
      ConfigError: the cell does not fit its length, or its depth is no fraction.
    """
    if cell.depth is not None and not 0 <= cell.depth <= 1:
        raise ConfigError(f"a depth is a fraction of the prompt from 0 to 1, got {cell.depth:g}")
    if cell.sums and not cell.rivals:
        raise ConfigError("a sum needs a rival, whose number is the other one: set rivals to at least 1")
    words = ChainWords.of(tokenizer)
    place = [cell.hops, cell.rivals, cell.length, cell.sums]
    rng = np.random.default_rng([seed, *place])
    return [_one_example(rng, words, tokenizer, cell, gap, haystack) for _ in range(num_examples)]


def chains_in_turn(
    tokenizer: TextTokenizer, cells: Sequence[ChainCell], num_examples: int, **drawn: Any
) -> list[Example]:
    """`num_examples` prompts, of each of the cells in turn; `drawn`: as in `chain_examples`."""
    each = -(-num_examples // len(cells))
    kinds = [chain_examples(tokenizer, cell, num_examples=each, **drawn) for cell in cells]
    return [example for turn in zip(*kinds, strict=True) for example in turn][:num_examples]


def chain_grid(
    hops: Sequence[int],
    rivals: Sequence[int],
    lengths: Sequence[int],
    depths: Sequence[float] | None = None,
    sums: bool = False,
) -> list[ChainCell]:
    """Every combination, the shortest prompts first."""
    places: Sequence[float | None] = depths if depths is not None else (None,)
    return [
        ChainCell(hop, rival, length, depth, sums)
        for length, hop, rival, depth in itertools.product(lengths, hops, rivals, places)
    ]


def chain_scores(
    model: Decoder,
    cells: Mapping[ChainCell, Sequence[Example]],
    *,
    batch_size: int = 16,
    samples: Samples = NO_SAMPLES,
    advance: Callable[[int], None] = lambda _: None,
) -> Iterator[ChainScore]:
    """The score of each cell, as it is known; `advance` is called with how many more examples are scored.

    What `samples` knows of the examples is not computed again, and the rest is kept there.
    """
    for cell, examples in cells.items():
        scores = score_answers(model, examples, batch_size=batch_size, samples=samples, advance=advance)
        right = accuracy_interval(scores.right)
        yield ChainScore(cell, right.mean, right.interval, float(scores.nll.mean()), len(examples))


def _one_example(
    rng: np.random.Generator,
    words: ChainWords,
    tokenizer: TextTokenizer,
    cell: ChainCell,
    gap: int,
    haystack: Haystack | None,
) -> Example:
    """Chain 0 is the one that is asked for."""
    drawn = draw_chains(rng, words, cell.rivals + 1, cell.hops)
    asked = (0, cell.hops - 1)
    question, answer = drawn.sum(asked, (1, cell.hops - 1)) if cell.sums else drawn.question(*asked)
    room = cell.length - len(question) - len(answer)  # for statements and noise
    starts = _starts(rng, cell, room, max(gap, STATEMENT))
    free = np.diff([0, *(s + STATEMENT for s in starts)], append=room + STATEMENT) - STATEMENT  # [hops + 1]
    others = (
        [drawn.statement(chain + 1, level) for chain, level in draw_order(rng, cell.rivals, cell.hops)]
        if cell.rivals
        else []
    )
    prompt: list[int] = []
    taken = 0
    for part, count in enumerate(_share_out(rng, len(others), free)):
        here = others[taken : taken + count]
        size = int(free[part]) - STATEMENT * count
        noise = haystack.draw(rng, size) if haystack else rng.choice(words.fillers, size).tolist()
        prompt += insert_needles(noise, here, np.sort(rng.integers(size + 1, size=count)).tolist())
        taken += count
        if part < cell.hops:
            prompt += drawn.statement(0, part)
    meta = {
        "task": "sums" if cell.sums else "chains",
        "hops": cell.hops,
        "rivals": cell.rivals,
        "length": cell.length,
        "depth": cell.depth,
        "statements": starts,
    }
    references = [tokenizer.decode(answer[1:]).strip()]
    return Example(prompt + question, answer, references, meta)


def _starts(rng: np.random.Generator, cell: ChainCell, room: int, step: int) -> list[int]:
    """Where the statements of the asked chain begin, each at least `step` tokens before the next or the question."""
    slack = room - step * cell.hops
    if slack < STATEMENT * cell.rivals * cell.hops:
        least = cell.length - slack + STATEMENT * cell.rivals * cell.hops
        raise ConfigError(
            f"{cell.hops} hops {step} tokens apart and {cell.rivals} rivals take {least} tokens, more than length = "
            f"{cell.length}: raise the length, or lower the gap or the rivals"
        )
    first = int(rng.integers(slack + 1)) if cell.depth is None else round(cell.depth * slack)
    later = np.sort(rng.integers(first, slack + 1, size=cell.hops - 1)).tolist()
    return [step * i + offset for i, offset in enumerate([first, *later])]


def _share_out(rng: np.random.Generator, statements: int, free: np.ndarray) -> list[int]:
    """How many of the rivals' statements stand in each of the parts of `free` tokens, drawn by the room left there."""
    left = free // STATEMENT
    counts = np.zeros_like(left)
    for _ in range(statements):
        part = rng.choice(len(left), p=left / left.sum())
        counts[part] += 1
        left[part] -= 1
    return counts.tolist()
