"""Maps: numbers by row and column. Larger numbers are darker in all of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from swa_jax.report import style
from swa_jax.report.labels import short_names
from swa_jax.report.numbers import Row
from swa_jax.report.style import BLUE, GREY, INK, SEQUENTIAL, SMALL, luminance, styled

type Grid = tuple[list[list[float]], list[str], list[str]]  # values [rows, columns], names of rows and columns


@styled
def needle_heat_map(
    accuracy: ArrayLike,
    row_labels: Sequence[str],
    column_labels: Sequence[str],
    file: str | Path,
    *,
    title: str = "Needles found",
    row_title: str = "",
    column_title: str = "Depth of the needle in the prompt",
) -> None:
    """Draw accuracies [rows, columns] from 0 to 1 in percent; NaN cells (no example) stay blank."""
    percent = 100 * np.asarray(accuracy, np.float64)
    figure, axes = _table(percent, row_labels, column_labels, f"{title} (%)", row_title, column_title)
    _cells(axes, percent, 0, 100, ".0f")
    style.save(figure, file)


@styled
def loss_heat_map(
    loss: ArrayLike,
    row_labels: Sequence[str],
    column_labels: Sequence[str],
    file: str | Path,
    *,
    title: str,
    row_title: str = "",
    column_title: str = "",
) -> None:
    """Draw losses [rows, columns] in nats a token; NaN cells stay blank. Colours end 1.5 nats above the lowest loss."""
    grid = np.asarray(loss, np.float64)
    figure, axes = _table(grid, row_labels, column_labels, title, row_title, column_title)
    low, top = float(np.nanmin(grid)), float(np.nanmax(grid))
    high = max(min(top, low + 1.5), low + 1e-3)
    _cells(axes, grid, low, high, ".2f")
    if top > high:
        figure.supxlabel(f"From {high:.2f} on the colour is the same.", fontsize=SMALL, x=0.99, ha="right")
    style.save(figure, file)


def _table(
    values: np.ndarray,
    row_labels: Sequence[str],
    column_labels: Sequence[str],
    title: str,
    row_title: str,
    column_title: str,
) -> tuple[Figure, Axes]:
    """An empty picture of a table with these labels, for values of this shape."""
    if values.shape != (len(row_labels), len(column_labels)):
        raise ValueError(f"the grid is {values.shape}, but there are {len(row_labels)} and {len(column_labels)} labels")
    rows, columns = values.shape
    row_labels = short_names(row_labels)
    # In inches. The cells together are at least as wide and as high as what is written along them.
    left = 0.5 + 0.08 * max(map(len, row_labels))
    width = max(0.62 * columns, 0.085 * max(map(len, column_labels)) * columns, 0.085 * len(column_title))
    height = max(0.27 * rows, 0.085 * len(row_title))
    figure = style.new_figure(left + width, 1.1 + height, title)
    axes = figure.add_subplot()
    axes.set(xlabel=column_title, ylabel=row_title)
    axes.set_xticks(range(columns), column_labels)
    axes.set_yticks(range(rows), row_labels)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return figure, axes


def _cells(axes: Axes, grid: np.ndarray, low: float, high: float, form: str) -> None:
    """The cells with their numbers, in ink that can be read on the colour below it."""
    image = axes.imshow(grid, vmin=low, vmax=high, cmap=SEQUENTIAL, aspect="auto")
    for edges, line in ((grid.shape[0], axes.axhline), (grid.shape[1], axes.axvline)):
        for edge in range(1, edges):
            line(edge - 0.5, color="white", linewidth=1.5)
    for i, j in np.argwhere(np.isfinite(grid)):
        dark = luminance(image.to_rgba(grid[i, j])) < 0.22  # white is then the ink of more contrast
        axes.text(
            j, i, f"{grid[i, j]:{form}}", ha="center", va="center", fontsize=SMALL, color="white" if dark else INK
        )


@styled
def layer_ratio_map(ratio: ArrayLike, interval: int, file: str | Path, *, title: str) -> None:
    """Draw full-attention ratios [L, points], from 0 to 1, over a training; a point is the mean of `interval` steps."""
    percent = 100 * np.asarray(ratio, np.float64)
    layers, points = percent.shape
    figure = style.new_figure(6.4, 1.3 + 0.2 * layers, title)
    axes = figure.add_subplot()
    image = axes.imshow(
        percent,
        vmin=0,
        vmax=100,
        cmap=SEQUENTIAL,
        aspect="auto",
        extent=(0, interval * points, layers - 0.5, -0.5),
        interpolation="nearest",
    )
    _layer_ticks(axes, layers)
    for edge in range(1, layers):
        axes.axhline(edge - 0.5, color="white", linewidth=1)
    axes.spines[:].set_visible(False)
    axes.set(xlabel="Training step", ylabel="Layer (from 0)")
    bar = figure.colorbar(image, ax=axes, ticks=[0, 50, 100], fraction=0.05)
    bar.set_label("Tokens that take\nfull attention (%)")
    bar.outline.set_visible(False)
    style.save(figure, file)


def _layer_ticks(axes: Axes, layers: int) -> None:
    """A number for each layer, or for every other one where they would touch."""
    axes.set_yticks(range(0, layers, 1 if layers <= 20 else 2))
    axes.tick_params(axis="y", length=0)


@styled
def head_map(
    full: ArrayLike,
    file: str | Path,
    *,
    title: str,
    scores: ArrayLike | None = None,
    larger_is_local: bool | None = None,
) -> None:
    """Draw which KV head of which layer stays full: mask [L, K], beside it the scores [L, K] it was chosen by, if any.

    `larger_is_local` says which end of the scores was windowed: True for the large ones.
    """
    mask = np.asarray(full, bool)
    layers, heads = mask.shape
    count = 1 if scores is None else 2
    figure = style.new_figure(max(3.2, count * (1.5 + 0.24 * heads)), 1.5 + max(0.2 * layers, 0.6), title)
    places = figure.subplots(1, count, squeeze=False, sharey=True)[0]
    chosen = places[0].imshow(mask, cmap=ListedColormap([GREY, BLUE]), vmin=0, vmax=1, aspect="auto")
    bar = figure.colorbar(chosen, ax=places[0], fraction=0.08, ticks=[0.25, 0.75])
    bar.ax.set_yticklabels(["windowed", "full"])
    bar.ax.tick_params(length=0)
    if scores is not None:
        image = places[1].imshow(np.asarray(scores, np.float64), cmap=SEQUENTIAL, aspect="auto")
        figure.colorbar(image, ax=places[1], fraction=0.08)
        large = {None: "", True: "large: windowed", False: "large: stays full"}[larger_is_local]
        places[1].set_title(f"Score\n({large})" if large else "Score")
        places[0].set_title("Choice\n" if large else "Choice")
    for axes in places:
        axes.set_xticks(range(0, heads, 1 if heads <= 16 else 4))
        axes.tick_params(length=0)
        axes.set(xlabel="KV head")
        axes.spines[:].set_visible(False)
        for edge in range(1, heads):
            axes.axvline(edge - 0.5, color="white", linewidth=0.8)
        for edge in range(1, layers):
            axes.axhline(edge - 0.5, color="white", linewidth=0.8)
    _layer_ticks(places[0], layers)
    places[0].set_ylabel("Layer (from 0)")
    style.save(figure, file)


# ---- rows of measurements as grids ----


def ruler_heat(rows: Sequence[Row]) -> Grid:
    """RULER's scores for a map, with its labels: depths across where they were asked for, else tasks."""
    deep = any(row["depth"] is not None for row in rows)

    def place(row: Row) -> tuple[str, str]:
        if deep:
            return f"{row['name']}, {row['task']}, {row['length']}", f"{row['depth']:.0%}"
        return f"{row['name']}, {row['length']}", row["task"].removeprefix("niah_")

    return _grid([(place(row), row["score"]) for row in rows])


def sweep_heat(rows: Sequence[Row]) -> Grid:
    """Losses in nats a token for a map, with its labels: windows down, lengths across."""

    def window(row: Row) -> str:
        return "full" if row["window"] is None else str(row["window"])

    return _grid([((f"{row['name']}, window {window(row)}", str(row["length"])), row["nll"]) for row in rows])


def _grid(cells: Sequence[tuple[tuple[str, str], float]]) -> Grid:
    values = dict(cells)
    rows, columns = (list(dict.fromkeys(place[axis] for place, _ in cells)) for axis in (0, 1))
    return [[values[row, column] for column in columns] for row in rows], rows, columns
