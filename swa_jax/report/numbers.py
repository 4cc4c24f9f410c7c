"""Means and their 95 % intervals as pictures and tables take them: plain numbers; the interval may be missing."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

type Row = Mapping[str, Any]
# Mean, lower and upper end of the 95 % interval; the ends are None where there is no interval.
type Estimate = tuple[float, float | None, float | None]
MEGABYTE = 2**20


def ends(interval: Sequence[float | None] | None) -> tuple[float, float] | None:
    """Both ends of an interval, or None where one of them is missing or not finite."""
    if interval is None or None in interval:
        return None
    low, high = (float(end) for end in interval if end is not None)
    return (low, high) if math.isfinite(low) and math.isfinite(high) else None


def row_estimate(row: Row) -> Estimate:
    """The share of needles that a row says were found, with its interval."""
    low, high = ends(row.get("needle_interval")) or (None, None)
    return row["needle_accuracy"], low, high


def error_bars(estimates: Sequence[Estimate], scale: float = 1.0) -> np.ndarray:
    """What reaches below and above each mean [2, N], for matplotlib; NaN, which draws nothing, without an interval."""
    reach = np.full((2, len(estimates)), np.nan)
    for i, (mean, *interval) in enumerate(estimates):
        if (both := ends(interval)) is not None:
            reach[:, i] = max(0.0, mean - both[0]), max(0.0, both[1] - mean)
    return scale * reach


def with_interval(
    mean: float | None, interval: Sequence[float | None] | None, form: Callable[[float], str], unit: str = ""
) -> str:
    """`mean unit` and, where there is an interval, `[low, high]` after a newline, at which a table may break it."""
    if mean is None:
        return ""
    both = ends(interval)
    return f"{form(mean)}{unit}" + ("" if both is None else f"\n[{form(both[0])}, {form(both[1])}]")
