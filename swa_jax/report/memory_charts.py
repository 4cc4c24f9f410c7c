"""What the memory of a pattern buys: needles found, or the loss, against the KV cache."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from swa_jax.report import style
from swa_jax.report.labels import short_names
from swa_jax.report.numbers import MEGABYTE, Row, error_bars, row_estimate
from swa_jax.report.panels import draw_panels, panel_size
from swa_jax.report.style import AXIS, BLUE, GREY, INK, SMALL, VERMILION, styled

FOUND, MEMORY, UNIT = "Needles found (%)", "KV cache", "(MB a sequence)"
BARS = "Bars: 95 % intervals."
REFERENCES = ("full", "window")  # shown in every panel of `frontier_chart`


@styled
def accuracy_memory_chart(
    rows: Sequence[Row], file: str | Path, *, title: str = "What the memory buys", memory: str = MEMORY
) -> None:
    """Draw a line for each row, the least memory first: needles found with their interval, and the KV cache beside it.

    Rows have `name`, `needle_accuracy` (0 to 1), `needle_interval` (two numbers, or None) and `kv_cache_bytes`. Blue is
    what no other row beats: none finds more with as much memory, or as much with less.
    """
    rows = sorted(rows, key=lambda row: (row["kv_cache_bytes"], -row["needle_accuracy"]))
    megabytes, accuracy = _megabytes(rows), _percent(rows)
    best = _unbeaten(megabytes, accuracy)
    colors = np.where(best, BLUE, AXIS)
    places = np.arange(len(rows))
    figure = style.new_figure(7.0, 1.3 + 0.24 * len(rows), title)
    figure.supxlabel(
        "Blue: no other finds more with as much memory, or as much with less.", fontsize=SMALL, x=0.99, ha="right"
    )
    found, taken = figure.subplots(1, 2, sharey=True, width_ratios=[1.7, 1])
    style.percent_axis(found, "x")
    reach = error_bars([*map(row_estimate, rows)], 100)
    found.errorbar(accuracy, places, xerr=reach, fmt="none", ecolor=colors, elinewidth=1.2, capsize=0)
    found.scatter(accuracy, places, s=30, color=colors, zorder=3, clip_on=False)
    taken.barh(places, megabytes, height=0.55, color=np.where(best, BLUE, GREY))
    for y, value in zip(places, megabytes, strict=True):
        taken.annotate(f"{value:.2f}", (value, y), (3, 0), textcoords="offset points", fontsize=SMALL, va="center")
    taken.set_xlim(0, 1.2 * max(float(megabytes.max()), 1e-9))
    taken.set_xticks([])  # the numbers stand beside the bars
    taken.spines["bottom"].set_visible(False)
    found.set(xlabel=f"{FOUND}, with 95 % interval", ylim=(len(rows) - 0.5, -0.5))
    found.set_yticks(places, short_names([row["name"] for row in rows]))
    for label, blue in zip(found.get_yticklabels(), best, strict=True):
        label.set(color=BLUE if blue else INK, fontweight="bold" if blue else "normal")
    found.tick_params(axis="y", length=0)
    taken.tick_params(axis="y", length=0)
    taken.set_xlabel(f"{memory} {UNIT}")
    figure.align_xlabels([found, taken])
    for axes in (found, taken):
        axes.spines["left"].set_visible(False)
        axes.hlines(places[:-1] + 0.5, *axes.get_xlim(), color="#EEF0F2", linewidth=0.7, zorder=0)
    style.save(figure, file)


@styled
def frontier_chart(rows: Sequence[Row], file: str | Path, *, title: str, memory: str = MEMORY) -> None:
    """Draw needles found against the KV cache: a panel for each method over its budgets, all others grey behind it.

    Rows are those of `accuracy_memory_chart`; a method is a name that several rows have. `full` and `window` are shown
    in every panel, other patterns have their own. The dashed step is the best that any row finds with that memory or
    less. `memory` says what `kv_cache_bytes` is of. Without a method the rows are drawn by `accuracy_memory_chart`.
    """
    by_name: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row["kv_cache_bytes"]):
        by_name.setdefault(row["name"], []).append(row)
    if all(len(same) == 1 for same in by_name.values()):
        accuracy_memory_chart(rows, file, title=title, memory=memory)
        return
    in_order = dict.fromkeys(row["name"] for row in rows)
    references = {name: by_name[name] for name in REFERENCES if len(by_name.get(name, [])) == 1}
    names = [name for name in in_order if name not in references]
    width, height = panel_size(len(names))
    figure = style.new_figure(width, height + 0.2, title)
    others = "Grey: the other methods. Dashed: the best that any finds with that memory or less."
    note = textwrap.fill(f"{others} {BARS}", int(width / 0.075))
    megabytes, accuracy = _megabytes(rows), _percent(rows)
    order = np.lexsort((-accuracy, megabytes))
    best = np.maximum.accumulate(accuracy[order])
    for name, axes in draw_panels(figure, names, f"{memory} {UNIT}\n{note}", FOUND).items():
        axes.step(megabytes[order], best, where="post", color=AXIS, linestyle=(0, (4, 3)), linewidth=0.8, zorder=2)
        for other in names:
            if other != name:
                same = by_name[other]
                axes.plot(_megabytes(same), _percent(same), color=GREY, linewidth=0.8, zorder=1)
        _method(axes, by_name[name])
        _references(axes, references)
        axes.set_xlim(0, 1.08 * float(megabytes.max()))
        style.percent_axis(axes, low=-18)  # room for a name below `window`
    style.save(figure, file)


@styled
def candidates_chart(
    candidates: Sequence[tuple[float, float]],
    chosen: int,
    budget: float,
    file: str | Path | StringIO,
    *,
    xlabel: str,
    ylabel: str,
) -> None:
    """Draw the candidates of a search: loss against their share of full attention's cache, each (share, loss).

    The original model, which has the whole cache and loses nothing, is an open circle; `budget` is a dashed line.
    """
    figure = style.new_figure(style.PAGE_WIDTH, 3.2)
    axes = figure.add_subplot()
    shares, losses = np.array(candidates, np.float64).T * [[100], [1]]
    axes.axvline(100 * budget, color=VERMILION, linestyle=(0, (4, 3)), linewidth=1)
    axes.scatter(shares, losses, s=26, color=GREY, zorder=3)
    axes.scatter([shares[chosen]], [losses[chosen]], s=52, color=BLUE, zorder=5)
    axes.scatter([100], [0], s=36, facecolor="white", edgecolor=INK, zorder=4)
    above: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "va": "bottom", "fontsize": SMALL}
    axes.annotate("budget", (100 * budget, 1), (0, 2), xycoords=("data", "axes fraction"), **above)
    axes.annotate("original", (100, 0), (0, 6), **above)
    axes.annotate("chosen", (shares[chosen], losses[chosen]), (0, 6), fontweight="bold", **above)
    axes.set(xlabel=xlabel, ylabel=ylabel, xlim=(0, max(108.0, 1.06 * float(shares.max()))))
    axes.margins(y=0.12)
    axes.grid(axis="y")
    style.save(figure, file)


def _method(axes: Axes, rows: Sequence[Row]) -> None:
    reach = error_bars([*map(row_estimate, rows)], 100)
    axes.errorbar(_megabytes(rows), _percent(rows), reach, color=BLUE, marker="o", markersize=4, elinewidth=1, zorder=4)


def _references(axes: Axes, references: Mapping[str, Sequence[Row]]) -> None:
    for name, (row,) in references.items():
        x, y = _megabytes([row])[0], _percent([row])[0]
        axes.plot([x], [y], marker="o", markersize=4, color=INK, markerfacecolor="white", zorder=3)
        far_right = x > 0.5 * axes.get_xlim()[1]
        axes.annotate(
            name,
            (x, y),
            (2 if far_right else 0, -6),
            textcoords="offset points",
            fontsize=7,
            ha="right" if far_right else "left",
            va="top",
            color=INK,
        )


def _megabytes(rows: Sequence[Row]) -> np.ndarray:
    return np.array([row["kv_cache_bytes"] for row in rows]) / MEGABYTE


def _percent(rows: Sequence[Row]) -> np.ndarray:
    return np.array([100 * row["needle_accuracy"] for row in rows])


def _unbeaten(megabytes: np.ndarray, accuracy: np.ndarray) -> np.ndarray:
    """Whether no other row has more accuracy with as little memory, or as much accuracy with less [N]."""
    no_worse = (megabytes <= megabytes[:, None]) & (accuracy >= accuracy[:, None])  # [N, others]
    better = (megabytes < megabytes[:, None]) | (accuracy > accuracy[:, None])
    return ~(no_worse & better).any(1)
