"""Names in pictures: short, beside what they name, and never over one another."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import ArrayLike

from swa_jax.report.style import AXIS, SMALL


def short_names(names: Sequence[str]) -> list[str]:
    """Pattern files by their stems, as folders would fill the picture; by more where two would be named alike."""
    for shorter in (r"\2", r"\2.json"):
        short = [re.sub(r"^(.*[/\\])?([^/\\]+)\.json(?=, |$)", shorter, name) for name in names]
        if len(set(short)) == len(set(names)):
            return short
    return list(names)


def apart(values: ArrayLike, *, gap: float, low: float, high: float) -> np.ndarray:
    """Ascending values moved as little as a sweep up and one down need to lie `gap` apart within [low, high]."""
    places = np.clip(np.asarray(values, np.float64), low, high)
    for i in range(1, places.size):
        places[i] = max(places[i], places[i - 1] + gap)
    for i in reversed(range(places.size)):
        ceiling = high if i == places.size - 1 else places[i + 1] - gap
        places[i] = min(places[i], ceiling)
    return places


def label_line_ends(axes: Axes, last: Mapping[str, tuple[float, float]], colors: Mapping[str, str]) -> None:
    """Write each line's name right of its last point (x, y), moved up or down where names would touch.

    A thin line leads from a name to its point. The limits of the axes must be final.
    """
    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()  # lays the axes out, so that their height is known
    low, high = axes.get_ylim()
    points = axes.get_window_extent().height * 72 / figure.dpi
    gap = 1.35 * SMALL * (high - low) / points
    names = sorted(last, key=lambda name: last[name][1])
    heights = apart([last[name][1] for name in names], gap=gap, low=low, high=high)
    for name, short, height in zip(names, short_names(names), heights, strict=True):
        x, y = last[name]
        axes.annotate(
            short, (x, y), (1.03, float(height)), xycoords="data",
            textcoords=("axes fraction", "data"), color=colors[name], fontsize=SMALL, va="center",
            fontweight="bold", annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": AXIS, "linewidth": 0.5, "shrinkA": 1, "shrinkB": 2,
                        "relpos": (0, 0.5)},
        )  # fmt: skip
