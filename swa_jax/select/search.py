"""Finding the best mask of a few heads of which a fixed number is full: all of them, a (1+1) search, or NOMAD.

A budget counts the different candidates a search looks at, not what their scores cost: a search that finds scores in
memory, being started again after an interruption, goes the same way.
"""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np

from swa_jax.base.errors import not_installed
from swa_jax.select.evaluator import Score

Optimizer = Literal["one-plus-one", "nomad"]
ALPHA = 100.0  # BOSCH's weight of the penalty in Eq. 5
ScoreBits = Callable[[np.ndarray], Score]  # bits [n] bool, True = full


class Optimum(NamedTuple):
    """What a search found."""

    bits: np.ndarray  # [n] bool
    score: Score
    tried: list[Score]  # of every candidate looked at


def search(
    score: ScoreBits,
    start: np.ndarray,
    budget: int,
    rng: np.random.Generator,
    *,
    optimizer: Optimizer = "one-plus-one",
    normalise: Callable[[Score], float] = lambda score: score.value,
) -> Optimum:
    """The best bits [n] with as many ones as `start` has; every candidate where the budget covers them.

    Args:
      start: [n] bool, the first candidate of a search.
      budget: candidates, at least 1.
      normalise: the score of Eq. 2, for NOMAD's penalty to be in proportion to.
    """
    if math.comb(start.size, int(start.sum())) <= budget:
        return _brute_force(score, start)
    if optimizer == "nomad":
        return _nomad(score, start, budget, rng, normalise)
    return _one_plus_one(score, start, budget, rng)


def num_candidates(heads: int, full: int, budget: int) -> int:
    """How many candidates `search` looks at, at most."""
    return min(math.comb(heads, full), budget)


def with_ones(bits: np.ndarray, ones: int, order: np.ndarray) -> np.ndarray:
    """`bits` [n] with ones added or removed, in `order` (a permutation of n), until there are `ones` of them."""
    bits = bits.copy()
    surplus = int(bits.sum()) - ones
    changed = [i for i in order if bits[i] == (surplus > 0)][: abs(surplus)]
    bits[changed] = surplus < 0
    return bits


def _brute_force(score: ScoreBits, start: np.ndarray) -> Optimum:
    """Between equals the first in lexical order of the full heads."""
    candidates = [
        np.isin(np.arange(start.size), ones) for ones in itertools.combinations(range(start.size), int(start.sum()))
    ]
    tried = [score(bits) for bits in candidates]
    best = max(range(len(tried)), key=tried.__getitem__)
    return Optimum(candidates[best], tried[best], tried)


def _one_plus_one(score: ScoreBits, start: np.ndarray, budget: int, rng: np.random.Generator) -> Optimum:
    """The (1+1) evolutionary algorithm (Droste et al., 2002) with swaps, which keep the count, for bit flips.

    A child that is no worse replaces its parent, so that the search drifts over ties.
    """
    best, best_score = start, score(start)
    seen, tried = {start.tobytes()}, [best_score]
    while len(seen) < budget:
        child = _swap_some(best, rng)
        if child.tobytes() in seen:
            continue
        seen.add(child.tobytes())
        tried.append(score(child))
        if tried[-1] >= best_score:
            best, best_score = child, tried[-1]
    return Optimum(best, best_score, tried)


def _swap_some(bits: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """One swap of a full and a windowed head, sometimes more."""
    ones, zeros = np.flatnonzero(bits), np.flatnonzero(~bits)
    most = min(ones.size, zeros.size)
    swaps = 1 + rng.binomial(most - 1, 1 / most)
    child = bits.copy()
    child[rng.choice(ones, swaps, replace=False)] = False
    child[rng.choice(zeros, swaps, replace=False)] = True
    return child


def _nomad(
    score: ScoreBits, start: np.ndarray, budget: int, rng: np.random.Generator, normalise: Callable[[Score], float]
) -> Optimum:
    """The paper's optimiser, mesh-adaptive direct search as NOMAD has it, on Eq. 5.

    Eq. 5 only fines a wrong count, and a large subproblem can afford the fine. So what is scored is the candidate
    with its count put right, in an order drawn once; the fine stays, to draw the search to where the counts are right.
    """
    nomad = require_nomad()
    ones, order = int(start.sum()), rng.permutation(start.size)
    seen: dict[bytes, Score] = {}
    failures: list[BaseException] = []

    def blackbox(point) -> int:
        if failures:  # counted as done, so that NOMAD comes to its end
            point.setBBO(b"0")
            return 1
        try:
            raw = np.array([point.get_coord(i) > 0.5 for i in range(start.size)])
            bits = with_ones(raw, ones, order)
            seen[bits.tobytes()] = score(bits)
            fine = ALPHA * ((raw.sum() - ones) / start.size) ** 2
            loss = -_scalar(seen[bits.tobytes()], normalise) + fine
            point.setBBO(f"{loss:.17g}".encode())
            return 1
        except BaseException as error:  # it must not go through NOMAD's C++; raised again below
            failures.append(error)
            return 0

    seed = int(rng.integers(1, 2**15))  # small: NOMAD draws and drops as many random numbers as it says
    nomad.setSeed(seed + 1)  # NOMAD goes on with its old random numbers unless SEED *changes* its seed
    settings = [
        f"DIMENSION {start.size}",
        "BB_INPUT_TYPE * B",
        "BB_OUTPUT_TYPE OBJ",
        f"MAX_BB_EVAL {budget}",
        f"SEED {seed}",
        "DISPLAY_DEGREE 0",
    ]
    nomad.optimize(blackbox, start.astype(float).tolist(), [0.0] * start.size, [1.0] * start.size, settings)
    if failures:
        raise failures[0]
    best = max(seen, key=lambda bits: seen[bits])
    return Optimum(np.frombuffer(best, bool).copy(), seen[best], list(seen.values()))


def _scalar(score: Score, normalise: Callable[[Score], float]) -> float:
    """The normalised score with the likelihood as a tie-break too small to outweigh an example of a thousand."""
    loss = -score.log_likelihood
    return normalise(score) - 1e-3 * loss / (1 + loss)


def require_nomad() -> Any:
    """The module PyNomad. Raises `ConfigError` where it is not installed."""
    try:
        return importlib.import_module("PyNomad")
    except ImportError:
        raise not_installed("the optimizer nomad needs PyNomadBBO", extra="nomad") from None
