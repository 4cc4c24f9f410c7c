"""Means with 95 % intervals: Wilson's for scores of 0 and 1; the bootstrap for other numbers, Student's t for few."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

Z_POWER = 0.8416212335729143  # of the normal distribution, 80 %
Z_95 = 1.959963984540054  # two-sided 95 % point of the normal distribution
FEW = 15  # numbers: of fewer, resamples vary too little, and of two of them hold the truth in half of the cases
CHUNK_BYTES = 2**25  # of the resamples that are in memory at once


class Estimate(NamedTuple):
    """A mean over examples and its 95 % interval; `low` and `high` are None where there is no interval."""

    mean: float
    low: float | None
    high: float | None

    @property
    def interval(self) -> list[float] | None:
        """[low, high], or None: what the results' JSON files hold."""
        return None if self.low is None or self.high is None else [self.low, self.high]

    def map(self, function: Callable[[float], float]) -> Estimate:
        """The estimate of a monotone function of the mean; where it falls, the ends change places."""
        ends = [None, None] if self.interval is None else sorted(map(function, self.interval))
        return Estimate(function(self.mean), *ends)


def bootstrap(
    values: ArrayLike, *, weights: ArrayLike | None = None, resamples: int = 10_000, seed: int = 0
) -> Estimate:
    """The mean of `values` [N] with its 95 % percentile-bootstrap interval (examples drawn with replacement).

    Of fewer than `FEW` values the interval is Student's t, with the linearised error of a weighted mean. There is no
    interval of one example: nothing says how far another one would lie. At most 64 MB are taken for up to two million
    examples.

    Args:
      weights: [N], how much each example counts, such as the tokens of a pass; None counts all the same.
      resamples: how many times N examples are drawn.
      seed: of the NumPy generator that draws; the same arguments give the same interval.

    Raises `ValueError`: `values` is empty or no list of numbers, or the weights do not fit it.
    """
    values = np.asarray(values, np.float64)
    if values.ndim != 1 or values.size == 0:
        raise ValueError(f"values must be a list of at least one number, got shape {values.shape}")
    weights = np.ones(values.size) if weights is None else np.asarray(weights, np.float64)
    if weights.shape != values.shape:
        raise ValueError(f"the weights have shape {weights.shape}, the values {values.shape}")
    if not (weights.min() >= 0 and weights.sum() > 0):
        raise ValueError("the weights must be at least 0 and not all 0")
    counted = weights > 0
    values, weights = values[counted], weights[counted]
    total = values * weights
    mean = float(total.sum() / weights.sum())
    if values.size == 1:
        return Estimate(mean, None, None)
    if values.size < FEW:
        spread = math.sqrt(values.size / (values.size - 1) * np.square(total - mean * weights).sum()) / weights.sum()
        half = float(t_95(values.size) * spread)
        return Estimate(mean, mean - half, mean + half)
    columns = np.stack([total, weights], axis=1)  # [N, 2]
    rng, rows = np.random.default_rng(seed), max(1, CHUNK_BYTES // (16 * values.size))
    means = []
    for first in range(0, resamples, rows):
        counts = rng.multinomial(  # [rows, N]
            values.size, np.full(values.size, 1 / values.size), size=min(rows, resamples - first)
        )
        sums = counts.astype(np.float64) @ columns
        means.append(sums[:, 0] / sums[:, 1])
    low, high = np.quantile(np.concatenate(means), [0.025, 0.975])
    return Estimate(mean, float(low), float(high))


def t_95(count: int) -> float:
    """The two-sided 95 % point of Student's t for the mean of `count` numbers, at least 2."""
    from scipy.special import stdtrit

    return float(stdtrit(count - 1, 0.975))


def paired_bootstrap(better: ArrayLike, worse: ArrayLike, *, resamples: int = 10_000, seed: int = 0) -> Estimate:
    """The mean difference better - worse over the *same* examples [N], and its 95 % interval.

    Pairing removes what makes an example hard for both, so the interval is narrower than that of two separate means.

    Raises `ValueError`: the two are not of the same length, or are empty.
    """
    better, worse = np.asarray(better, np.float64), np.asarray(worse, np.float64)
    if better.shape != worse.shape:
        raise ValueError(f"a paired difference needs the same examples, got shapes {better.shape} and {worse.shape}")
    return bootstrap(better - worse, resamples=resamples, seed=seed)


def paired_accuracy(better: ArrayLike, worse: ArrayLike) -> Estimate:
    """The mean difference better - worse of 0s and 1s over the *same* examples [N], and its 95 % interval.

    The interval is Newcombe's (Statistics in Medicine 17, 1998, paired data, method 10): Wilson's intervals of both
    means, joined with their correlation. Where both are right everywhere, a bootstrap of the differences would have
    width 0, which claims too much.

    Raises `ValueError`: the two are not of the same length, are empty, or hold something else than 0 and 1.
    """
    first, second = np.asarray(better, np.float64), np.asarray(worse, np.float64)
    if first.shape != second.shape or not np.isin([*first.ravel(), *second.ravel()], (0, 1)).all():
        raise ValueError("a paired difference of shares needs the same examples, each 0 or 1")
    one, other = accuracy_interval(first), accuracy_interval(second)
    assert one.interval is not None
    assert other.interval is not None
    both, neither = int((first * second).sum()), int(((1 - first) * (1 - second)).sum())
    only_one, only_other = int((first > second).sum()), int((first < second).sum())
    margins = (both + only_one) * (only_other + neither) * (both + only_other) * (only_one + neither)
    numerator = float(both * neither - only_one * only_other)
    if numerator > 0:
        numerator = max(0.0, numerator - first.size / 2)
    phi = numerator / math.sqrt(margins) if margins else 0.0

    def reach(down: float, up: float) -> float:
        return math.sqrt(max(0.0, down**2 - 2 * phi * down * up + up**2))

    mean = one.mean - other.mean
    low = mean - reach(one.mean - one.interval[0], other.interval[1] - other.mean)
    high = mean + reach(other.mean - other.interval[0], one.interval[1] - one.mean)
    return Estimate(mean, max(-1.0, low), min(1.0, high))


def accuracy_interval(scores: ArrayLike) -> Estimate:
    """The mean of scores in [0, 1] [N] with Wilson's 95 % interval (Wilson, 1927).

    A bootstrap of all-correct (or all-wrong) scores has width 0, which claims too much; Wilson's has not. For scores
    between 0 and 1 it errs on the wide side, as their variance is at most that of 0s and 1s with the same mean.

    Raises `ValueError`: there are no scores, or one is not from 0 to 1.
    """
    scores = np.asarray(scores, np.float64)
    if scores.ndim != 1 or scores.size == 0 or not (scores.min() >= 0 and scores.max() <= 1):
        raise ValueError("scores must be a list of at least one number from 0 to 1")
    n, mean = scores.size, float(scores.mean())
    centre = (mean + Z_95**2 / (2 * n)) / (1 + Z_95**2 / n)
    half = Z_95 / (1 + Z_95**2 / n) * math.sqrt(mean * (1 - mean) / n + Z_95**2 / (4 * n**2))
    # Rounding must not put the mean outside at 0 and 1, where it is an end of the interval.
    return Estimate(mean, min(mean, max(0.0, centre - half)), max(mean, min(1.0, centre + half)))


def mean_score(scores: ArrayLike) -> Estimate:
    """The mean of `scores` [N]: with Wilson's interval if all are 0 or 1, else with that of `bootstrap`.

    If all are from 0 to 1, so is the interval, and it has a width where they are all the same.
    """
    scores = np.asarray(scores, np.float64)
    if scores.size and np.isin(scores, (0, 1)).all():
        return accuracy_interval(scores)
    found = bootstrap(scores)
    return found if scores.min() < 0 or scores.max() > 1 else _within(found, scores.size, 0.0)


def paired_score(better: ArrayLike, worse: ArrayLike) -> Estimate:
    """The mean difference of two `mean_score`s over the *same* examples [N], and its 95 % interval.

    Raises `ValueError`: as `paired_accuracy` where all scores are 0 or 1, else as `paired_bootstrap`.
    """
    scores = np.array([*np.ravel(better), *np.ravel(worse)], np.float64)
    if np.isin(scores, (0, 1)).all():
        return paired_accuracy(better, worse)
    found = paired_bootstrap(better, worse)
    return found if scores.min() < 0 or scores.max() > 1 else _within(found, scores.size // 2, -1.0)


def _within(found: Estimate, count: int, least: float) -> Estimate:
    """An estimate from `count` numbers between `least` and 1: its ends lie there too.

    Numbers that are all the same give a bootstrap of width 0, which claims too much. As many others may differ as
    Wilson's interval says of none in `count`; for 0s or 1s the result is Wilson's interval itself.
    """
    mean, low, high = found
    if low is None or high is None:
        return found
    if high - low < 1e-9:
        share = Z_95**2 / (count + Z_95**2)
        low, high = mean - share * (mean - least), mean + share * (1 - mean)
    return Estimate(mean, max(least, low), min(1.0, high))


def detectable(difference: Estimate) -> float:
    """The smallest true difference that examples like these show in four cases of five (80 % power), two-sided at 5 %.

    From the half width h of the difference's interval: h (z_0.975 + z_0.8) / z_0.975.

    Raises `ValueError`: the estimate has no interval.
    """
    if difference.low is None or difference.high is None:
        raise ValueError("without an interval nothing is known of the power")
    return (difference.high - difference.low) / 2 * (Z_95 + Z_POWER) / Z_95


def mean_of_groups(groups: Sequence[ArrayLike]) -> Estimate:
    """The mean of the groups' means, each group counting the same, with its 95 % interval: `mean_of_estimates`."""
    return mean_of_estimates([mean_score(group) for group in groups])


def mean_of_estimates(groups: Sequence[Estimate]) -> Estimate:
    """The mean of independent estimates, each counting the same, with its 95 % interval.

    The intervals are joined by "square and add" (Zou and Donner, Statistics in Medicine 27, 2008): which groups there
    are is not left to chance. There is no interval if one group has none.
    """
    mean = sum(one.mean for one in groups) / len(groups)
    below, above = [], []
    for one in groups:
        if one.low is None or one.high is None:
            return Estimate(mean, None, None)
        below.append(one.mean - one.low)
        above.append(one.high - one.mean)
    return Estimate(mean, mean - math.hypot(*below) / len(groups), mean + math.hypot(*above) / len(groups))


def interval_of_score(score: float, values: Sequence[Any]) -> list[float] | None:
    """The 95 % interval of a score that another program made of the documents' values, or None if they do not make it.

    The score may be the mean of the values, the perplexity exp(-mean) or the bits -mean / ln 2.

    Args:
      values: [N] numbers, or [N] pairs (log-likelihood, number of words or bytes), which count by that number.
    """
    try:
        numbers = np.asarray(values)
    except ValueError:  # lists of several lengths
        return None
    if numbers.dtype.kind not in "biuf":
        return None
    if numbers.ndim == 1 and numbers.size:
        estimate = mean_score(numbers)
    elif numbers.ndim == 2 and numbers.shape[1] == 2 and (numbers[:, 1] > 0).all():
        estimate = bootstrap(numbers[:, 0] / numbers[:, 1], weights=numbers[:, 1])
    else:
        return None
    forms = (lambda mean: mean, lambda mean: math.exp(min(-mean, 700.0)), lambda mean: -mean / math.log(2))
    for form in forms:
        if math.isclose(score, form(estimate.mean), rel_tol=1e-6, abs_tol=1e-9):
            return estimate.map(form).interval
    return None
