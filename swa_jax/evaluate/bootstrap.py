"""Confidence intervals of means over examples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

Z_95 = 1.959964  # two-sided 95 % point of the normal distribution


class Estimate(NamedTuple):
    """A mean over examples and its 95 % interval."""

    mean: float
    low: float
    high: float


def bootstrap(values: ArrayLike, *, resamples: int = 10_000, seed: int = 0) -> Estimate:
    """The mean of `values` [N] with its 95 % percentile-bootstrap interval (examples drawn with replacement)."""
    return bootstrap_groups([values], resamples=resamples, seed=seed)


def bootstrap_groups(groups: Sequence[ArrayLike], *, resamples: int = 10_000, seed: int = 0) -> Estimate:
    """The mean of the groups' means, each group counting the same, with its 95 % interval.

    Examples are drawn with replacement within their group: which groups there are is not left to chance.
    """
    rng = np.random.default_rng(seed)
    drawn, means = np.zeros(resamples), []
    for values in (np.asarray(group, np.float64) for group in groups):
        if values.ndim != 1 or values.size == 0:
            raise ValueError(f"values must be a list of at least one number, got shape {values.shape}")
        counts = rng.multinomial(
            values.size, np.full(values.size, 1 / values.size), size=resamples
        )  # [resamples, N]
        drawn += counts @ values / values.size
        means.append(float(values.mean()))
    low, high = np.quantile(drawn / len(groups), [0.025, 0.975])
    return Estimate(sum(means) / len(means), float(low), float(high))


def paired_bootstrap(
    better: ArrayLike, worse: ArrayLike, *, resamples: int = 10_000, seed: int = 0
) -> Estimate:
    """The mean difference better - worse over the *same* examples [N], and its 95 % interval.

    Pairing removes what makes an example hard for both, so the interval is narrower than that of two separate means.
    """
    better, worse = np.asarray(better, np.float64), np.asarray(worse, np.float64)
    if better.shape != worse.shape:
        raise ValueError(
            f"a paired difference needs the same examples, got shapes {better.shape} and {worse.shape}"
        )
    return bootstrap(better - worse, resamples=resamples, seed=seed)


def accuracy_interval(scores: ArrayLike) -> Estimate:
    """The mean of scores in [0, 1] [N] with Wilson's 95 % interval.

    A bootstrap of all-correct (or all-wrong) scores has width 0, which claims too much; Wilson's has not. For scores
    between 0 and 1 it errs on the wide side, as their variance is at most that of 0s and 1s with the same mean.
    """
    scores = np.asarray(scores, np.float64)
    if scores.ndim != 1 or scores.size == 0 or scores.min() < 0 or scores.max() > 1:
        raise ValueError("scores must be a list of at least one number from 0 to 1")
    n, mean = scores.size, float(scores.mean())
    centre = (mean + Z_95**2 / (2 * n)) / (1 + Z_95**2 / n)
    half = Z_95 / (1 + Z_95**2 / n) * np.sqrt(mean * (1 - mean) / n + Z_95**2 / (4 * n**2))
    # Rounding must not put the mean outside at 0 and 1, where it is an end of the interval.
    return Estimate(
        mean, min(mean, max(0.0, float(centre - half))), max(mean, min(1.0, float(centre + half)))
    )
