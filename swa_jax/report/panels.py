"""Small multiples: a panel for each series, the others grey behind it."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import FigureBase

from swa_jax.report.labels import short_names

MANY = 4  # series; more than these are drawn in panels
PANEL = (1.75, 1.5)  # inches
TITLE = 22  # characters of a panel's title that fit above it


def panel_shape(count: int) -> tuple[int, int]:
    """Rows and columns for this many panels: up to five in a row, rows of nearly equal length."""
    rows = math.ceil(count / 5)
    return rows, math.ceil(count / rows)


def panel_size(count: int) -> tuple[float, float]:
    """Width and height in inches of this many panels together, with their axes."""
    rows, columns = panel_shape(count)
    return max(5.0, 0.8 + PANEL[0] * columns), 0.5 + PANEL[1] * rows


def draw_panels(figure: FigureBase, names: Sequence[str], xlabel: str, ylabel: str) -> dict[str, Axes]:
    """Axes with shared limits for each name, which is the title of its panel."""
    rows, columns = panel_shape(len(names))
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel()
    for axes in grid[len(names) :]:
        axes.remove()
    for number, (axes, short) in enumerate(zip(grid, short_names(names), strict=False)):
        axes.set_title(textwrap.fill(short, TITLE), fontsize=8.5)
        if number + columns >= len(names):  # nothing stands below it
            axes.tick_params(labelbottom=True)
    figure.supxlabel(xlabel, fontsize=9)
    figure.supylabel(ylabel, fontsize=9)
    return dict(zip(names, grid, strict=False))
