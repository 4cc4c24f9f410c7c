"""Times attention on this machine's device, this library beside its peers, as ratios from one interleaved run.

All candidates of a case are compiled, held against one another, and then take turns: in each round every one runs once,
in an order that changes with the round. A peer's ratio in a round is its time over ours; reported are the median over
the rounds and the quartiles. What disagrees with the others is not timed, and what fails says why.
"""

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from swa_jax.bench.candidates import BenchCase, Candidate, Runner, ours, peers

# Largest difference of two results, as a share of the norm of the first, gradients included.
AGREEMENT = {"bfloat16": 2e-2, "float16": 5e-3, "float32": 2e-3}
SAMPLE_SECONDS = 0.01  # a sample repeats its call until it takes about this long


class Result(NamedTuple):
    """One candidate in one case: seconds a call and the ratio to ours (median, quartiles), or why there are none."""

    name: str
    seconds: float | None = None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    missing: str | None = None


@dataclasses.dataclass(frozen=True)
class Row:
    case: BenchCase
    results: tuple[Result, ...]  # ours first

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self.case) | {"results": [result._asdict() for result in self.results]}


def grid(
    which: Iterable[str],
    lengths: Sequence[int],
    windows: Sequence[int | None],
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    batch: int,
    decode_batch: int,
    dtype: str,
    documents: int | None = None,
    variant: str = "plain",
) -> Iterator[BenchCase]:
    """The cases; a window that is not shorter than the sequence is full attention and left out.

    Rows are packed with documents of so many tokens, those of decoding aside. Variants have no decoding; routed
    attention and full rows have a window.
    """
    for kind in which:
        for length in lengths:
            for window in windows:
                decode = kind == "decode"
                if variant != "plain" and (decode or (variant in ("routed", "full-rows") and window is None)):
                    continue
                if window is None or window < length:
                    rows, packed = (decode_batch, None) if decode else (batch, documents)
                    yield BenchCase(kind, length, window, heads, kv_heads, head_dim, rows, dtype, packed, variant)


def candidates(case: BenchCase) -> list[Candidate]:
    device = jax.default_backend()
    return [*ours(device), *peers(device, case)]


def measure(case: BenchCase, contestants: Sequence[Candidate], rounds: int) -> Row:
    """Checks and times the candidates; ratios are to the first of them that runs."""
    runners: dict[str, Callable[[int], Any]] = {}
    missing: dict[str, str] = {}
    expected: list[np.ndarray] | None = None
    for candidate in contestants:
        try:
            run = candidate.prepare(case)
            result = candidate.to_numpy(candidate.finish(run()))
        except Exception as error:  # what refuses a case must not end the run
            missing[candidate.name] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            continue
        if expected is not None and (differs := distance(expected, result)) > AGREEMENT[case.dtype]:
            missing[candidate.name] = f"differs from {next(iter(runners))} by {differs:.1e} of its norm"
            continue
        expected = result if expected is None else expected
        runners[candidate.name] = _repeated(run, candidate)
    samples = interleaved(runners, rounds)
    first = next(iter(runners), None)
    results = []
    for candidate in contestants:
        name = candidate.name
        if name not in samples:
            results.append(Result(name, missing=missing[name]))
            continue
        ratios = np.asarray(samples[name]) / np.asarray(samples[first])  # type: ignore[index]
        low, median, high = np.quantile(ratios, [0.25, 0.5, 0.75]).tolist()
        results.append(Result(name, float(np.median(samples[name])), median, low, high))
    return Row(case, tuple(results))


def distance(expected: Sequence[np.ndarray], actual: Sequence[np.ndarray]) -> float:
    """The largest relative difference of two lists of arrays, by norm; infinite where one is not finite."""
    worst = 0.0
    for a, b in zip(expected, actual, strict=True):
        share = float(np.linalg.norm((a - b).ravel()) / max(np.linalg.norm(a.ravel()), 1e-30))
        worst = max(worst, share if np.isfinite(share) else float("inf"))
    return worst


def interleaved(runners: dict[str, Callable[[int], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds a call of every runner in each round; within a round they take turns, starting with another each time.

    A runner makes as many calls as it is asked for, and waits for the last of them.
    """
    repeats = {}
    for name, run in runners.items():
        run(1)  # a second warm-up: the first call has compiled
        start = time.perf_counter()
        run(1)
        repeats[name] = max(1, round(SAMPLE_SECONDS / max(time.perf_counter() - start, 1e-7)))
    samples: dict[str, list[float]] = {name: [] for name in runners}
    order = list(runners)
    for _ in range(rounds):
        for name in order:
            run, count = runners[name], repeats[name]
            start = time.perf_counter()
            run(count)
            samples[name].append((time.perf_counter() - start) / count)
        order = order[1:] + order[:1]
    return samples


def _repeated(run: Runner, candidate: Candidate) -> Callable[[int], Any]:
    """Starts calls one after the other without waiting in between, so that starting them is not what is timed."""

    def calls(count: int) -> None:
        for _ in range(count):
            result = run()
        candidate.finish(result)

    return calls
