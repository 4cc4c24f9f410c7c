"""Swaps over all heads at a fixed count: BOSCH's fourth stage, which the paper does not have.

BOSCH decides how many heads of a layer are windowed before it searches which, in quarters of a layer. Where the heads
that matter lie otherwise, its three stages cannot reach them. A swap of a full and a windowed head, wherever they are,
can. Trying all swaps is quadratic in the heads, so heads are ranked first: a full one by what windowing it alone costs,
a windowed one by what making it full alone gives; of these the best pairs are tried.

A swap cannot see heads that help only together, one of which is missing: neither is worth a place alone. From full
attention each of them is seen to be needed. So `eliminate`, which starts there, is one of the starts.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from swa_jax.select.evaluator import Score
from swa_jax.select.search import Optimum, ScoreBits, with_ones

DEPTH = 4  # pairs of the ranked heads are tried whose ranks, from 0, add up to less
DROPPED = (0.25, 0.5, 1.0)  # shares of the full heads that a round of `eliminate` windows; the budget decides which


class _BudgetSpent(Exception):
    """Every candidate that may be looked at has been."""


def swap_search(score: ScoreBits, start: np.ndarray, budget: int, rng: np.random.Generator) -> Optimum:
    """The best bits [n] with as many ones as `start` that swaps find from `eliminate`, `start` and random places.

    `eliminate` comes first, as it finds most: it may look at half of the budget, or at what ranking every head once
    takes. Where the budget is too small for that it is left out. The others share what is left.

    Args:
      score: of bits [n] bool with any number of ones, True = full. No bits are asked for twice.
      start: [n] bool, such as what BOSCH's third stage chose.
      budget: different candidates, at least 1. A search that finds no better swap ends before.
    """
    seen: dict[bytes, Score] = {}
    ones, best = int(start.sum()), start

    def limited(most: int) -> ScoreBits:
        def counted(bits: np.ndarray) -> Score:
            key = bits.tobytes()
            if key not in seen:
                if len(seen) >= most:
                    raise _BudgetSpent
                seen[key] = score(bits)
            return seen[key]

        return counted

    limited(budget)(start)
    drawn = with_ones(np.zeros_like(start), ones, rng.permutation(start.size))
    ranking = start.size + 2  # every head once, `start` and what comes out
    half = max(budget // 2, ranking) if budget >= ranking else 0
    begins: list[tuple[np.ndarray | None, int]] = [(None, half)] if half else []
    begins += [(start, max(1, half + (budget - half) // 2)), (drawn, budget)]
    for begin, most in begins:
        share = limited(most)
        try:
            bits = _descend(share, eliminate(share, start.size, ones, most) if begin is None else begin)
        except _BudgetSpent:
            continue
        if bits.tobytes() in seen and seen[bits.tobytes()] > seen[best.tobytes()]:
            best = bits
    return Optimum(best, seen[best.tobytes()], list(seen.values()))


def eliminate(score: ScoreBits, size: int, ones: int, budget: int | None = None) -> np.ndarray:
    """Bits [size] with so many ones: from all full, round by round, the least missed are windowed.

    Args:
      budget: candidates to look at, about; None takes the smallest rounds.
    """
    plans = [_rounds(size, ones, share) for share in DROPPED]
    counts = next((plan for plan in plans if budget is None or sum(plan[:-1]) <= budget), plans[-1])
    bits = np.ones(size, bool)
    for before, after in itertools.pairwise(counts):
        bits[_ranked(score, bits, np.flatnonzero(bits))[: before - after]] = False
    return bits


def _rounds(size: int, ones: int, share: float) -> list[int]:
    """How many heads are full before each round of `eliminate`, and at its end; a round looks at each of them once."""
    counts = [size]
    while counts[-1] > ones:
        counts.append(counts[-1] - min(counts[-1] - ones, max(1, int(share * counts[-1]))))
    return counts


def _descend(score: ScoreBits, bits: np.ndarray) -> np.ndarray:
    """Better swaps of the ranked heads, until a round has none or the budget is spent."""
    try:
        value, better = score(bits), True
        while better:
            better = False
            full, windowed = np.flatnonzero(bits), np.flatnonzero(~bits)
            out, into = _ranked(score, bits, full), _ranked(score, bits, windowed)
            for drop, add in _pairs(out, into):
                if not bits[drop] or bits[add]:
                    continue  # an earlier swap of this round had it
                child = bits.copy()
                child[[drop, add]] = False, True
                if (new := score(child)) > value:
                    bits, value, better = child, new, True
    except _BudgetSpent:
        pass
    return bits


def _ranked(score: ScoreBits, bits: np.ndarray, heads: np.ndarray) -> np.ndarray:
    """`heads` by the score of `bits` with that head turned over, the best first."""
    scores = []
    for head in heads:
        turned = bits.copy()
        turned[head] = ~turned[head]
        scores.append(score(turned))
    return heads[sorted(range(len(heads)), key=scores.__getitem__, reverse=True)]


def _pairs(out: np.ndarray, into: np.ndarray) -> Sequence[tuple[int, int]]:
    """(head to window, head to make full), the best ranked first."""
    ranks = [(a, b) for a in range(len(out[:DEPTH])) for b in range(len(into[:DEPTH])) if a + b < DEPTH]
    return [(int(out[a]), int(into[b])) for a, b in sorted(ranks, key=sum)]
