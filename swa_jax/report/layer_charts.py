"""What each layer is worth, and where a routed model takes full attention."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from io import StringIO
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import FigureBase

from swa_jax.report import style
from swa_jax.report.labels import label_line_ends
from swa_jax.report.numbers import Estimate, error_bars
from swa_jax.report.panels import MANY, draw_panels, panel_size
from swa_jax.report.style import BLUE, GREY, HIGHLIGHTS, INK, styled

type DepthLine = Sequence[tuple[float, Estimate]]  # depth from 0 to 1, and the ratio there


@styled
def layer_scores_chart(
    scores: Sequence[Estimate],
    chosen: Sequence[int],
    file: str | Path | StringIO,
    *,
    title: str = "",
    axis: str = "Answer loss saved by making\nthis layer full (nats a token)",
) -> None:
    """Draw one bar a layer with its 95 % interval, where it has one; the layers chosen to stay full stand out.

    A layer whose mean is None or NaN has no bar.
    """
    layers = np.arange(len(scores))
    means = np.array([mean for mean, *_ in scores], np.float64)
    width = style.PAGE_WIDTH if isinstance(file, StringIO) else max(4.6, 1.5 + 0.34 * len(scores))
    figure = style.new_figure(width, 3.3, title)
    axes = figure.add_subplot()
    stays_full = np.isin(layers, chosen)
    for label, color, here in (("kept full", BLUE, stays_full), ("windowed", GREY, ~stays_full)):
        axes.bar(layers[here], means[here], color=color, label=label, zorder=2)
    _whiskers(axes, layers, means, error_bars(scores))
    axes.axhline(0, color=INK, linewidth=0.8)
    _layer_axis(axes, len(layers))
    axes.grid(axis="y")
    axes.set_ylabel(axis)
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, borderaxespad=0.2, handlelength=1)
    style.save(figure, file)


@styled
def routing_chart(
    by_layer: Sequence[Estimate],
    by_depth: Mapping[str, DepthLine],
    file: str | Path,
    *,
    title: str = "Where full attention is chosen (routed model)",
) -> None:
    """Draw full-attention ratios (0 to 1) with their 95 % intervals: a bar a layer, and lines over the needle's depth.

    More than four lines get a panel each, the other lines grey behind it.
    """
    many = len(by_depth) > MANY
    width, height = panel_size(len(by_depth)) if many else (6.8, 2.6)
    heights = ([2.4] if by_layer else []) + ([height] if by_depth else [])
    figure = style.new_figure(max(6.8, width), 0.4 + sum(heights), title)
    places = iter(figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0])
    if by_layer:
        axes = next(places).subplots()
        means = np.array([100 * mean for mean, *_ in by_layer])
        layers = np.arange(len(by_layer))
        axes.bar(layers, means, color=BLUE, zorder=2)
        _whiskers(axes, layers, means, error_bars(by_layer, 100))
        _layer_axis(axes, len(by_layer))
        style.percent_axis(axes)
        axes.set_ylabel("Tokens that take\nfull attention (%)")
    if by_depth:
        _depth_lines(next(places), by_depth, many)
    style.save(figure, file)


def _depth_lines(figure: FigureBase, by_depth: Mapping[str, DepthLine], many: bool) -> None:
    xlabel, ylabel = "Depth of the needle in the prompt (%)", "Answer queries that take\nfull attention (%)"
    if many:
        for name, axes in draw_panels(figure, list(by_depth), xlabel, ylabel).items():
            for other, line in by_depth.items():
                if other != name:
                    axes.plot(*_points(line), color=GREY, linewidth=0.8)
            _line_with_bars(axes, by_depth[name], BLUE)
            style.percent_axis(axes)
        return
    axes = figure.subplots()
    colors = dict(zip(by_depth, HIGHLIGHTS, strict=False))
    for name, line in by_depth.items():
        _line_with_bars(axes, line, colors[name])
    axes.set(xlabel=xlabel, ylabel=ylabel)
    style.percent_axis(axes)
    last = {name: (100 * line[-1][0], 100 * line[-1][1][0]) for name, line in by_depth.items() if line}
    label_line_ends(axes, last, colors)


def _points(line: DepthLine) -> tuple[list[float], list[float]]:
    """Depths and means in percent."""
    return [100 * depth for depth, _ in line], [100 * mean for _, (mean, *_) in line]


def _line_with_bars(axes: Axes, line: DepthLine, color: str) -> None:
    depths, means = _points(line)
    axes.errorbar(
        depths,
        means,
        error_bars([ratio for _, ratio in line], 100),
        color=color,
        marker="o",
        markersize=3.5,
        elinewidth=0.9,
        zorder=3,
    )


def _whiskers(axes: Axes, places: np.ndarray, means: np.ndarray, reach: np.ndarray) -> None:
    axes.errorbar(places, means, reach, fmt="none", ecolor=INK, elinewidth=0.9, zorder=3)


def _layer_axis(axes: Axes, layers: int) -> None:
    """A number for each layer, or for every second, third, ... one where they would touch."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    every = math.ceil(0.22 * layers / (figure.get_figwidth() - 1.2))  # inches
    axes.set(xticks=range(0, layers, every), xlabel="Layer (from 0)")
