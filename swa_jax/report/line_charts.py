"""Lines over training steps and over depths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import ArrayLike

from swa_jax.report import style
from swa_jax.report.labels import label_line_ends
from swa_jax.report.numbers import Row
from swa_jax.report.panels import MANY, draw_panels, panel_size
from swa_jax.report.style import BLUE, GREY, HIGHLIGHTS, VERMILION, styled

type Curve = tuple[np.ndarray, np.ndarray]  # steps [points], losses [seeds, points]


@styled
def training_curves(
    curves: Mapping[str, Sequence[ArrayLike]], interval: int, file: str | Path, *, title: str, ylabel: str
) -> None:
    """Draw a line for each name: the mean over its seeds [seeds][points] inside their range.

    A point is the mean of `interval` steps. More than four names get a panel each, the other lines grey behind it.
    """
    drawn: dict[str, Curve] = {}
    for name, seeds in curves.items():
        values = np.array(seeds, np.float64)  # [seeds, points]
        drawn[name] = interval * (np.arange(values.shape[1]) + 0.5), values
    if len(drawn) <= MANY:
        figure = style.new_figure(6.8, 3.6, title)
        axes = figure.add_subplot()
        axes.grid(axis="y")
        axes.set(xlabel="Training step", ylabel=ylabel)
        colors = dict(zip(drawn, HIGHLIGHTS, strict=False))
        for name, curve in drawn.items():
            _band(axes, curve, colors[name])
        last = {name: (float(steps[-1]), float(values.mean(0)[-1])) for name, (steps, values) in drawn.items()}
        axes.set_ylim(axes.get_ylim())
        label_line_ends(axes, last, colors)
    else:
        width, height = panel_size(len(drawn))
        figure = style.new_figure(width, height, title)
        for name, axes in draw_panels(figure, list(drawn), "Training step", ylabel).items():
            axes.grid(axis="y")
            for other, (steps, values) in drawn.items():
                if other != name:
                    axes.plot(steps, values.mean(0), color=GREY, linewidth=0.6)
            _band(axes, drawn[name], BLUE)
    style.save(figure, file)


def _band(axes: Axes, curve: Curve, color: str) -> None:
    steps, values = curve
    axes.plot(steps, values.mean(0), color=color, zorder=3)
    if len(values) > 1:
        axes.fill_between(steps, values.min(0), values.max(0), color=color, alpha=0.2, linewidth=0)


POINTS = 300  # of a line: more than a picture shows apart


@styled
def loss_curve(lines: Sequence[Row], file: str | Path) -> None:
    """Draw the training loss of a run, and the validation losses if there are any.

    Args:
      lines: those of `metrics.jsonl`, with `step` and `loss` or `validation_loss`. Of many steps, means are drawn.
    """
    figure = style.new_figure(6.8, 3.6, "Loss of the run")
    axes: Any = figure.subplots()
    axes.grid(axis="y")
    axes.set(xlabel="Training step", ylabel="Loss (nats a token)")
    axes.xaxis.get_major_locator().set_params(integer=True)
    for name, key, color in (("training", "loss", BLUE), ("validation", "validation_loss", VERMILION)):
        found = np.array([(line["step"], line[key]) for line in lines if key in line], np.float64).reshape(-1, 2)
        if not len(found):
            continue
        parts = np.array_split(found, min(POINTS, len(found)))
        steps, losses = np.array([part.mean(0) for part in parts]).T
        axes.plot(steps, losses, color=color, label=name, marker="o" if len(steps) <= 30 else None, markersize=3)
    axes.legend()
    style.save(figure, file)


@styled
def routed_cpt_chart(steps: Sequence[Row], file: str | Path, *, title: str = "Routed training (SwiAttn)") -> None:
    """Draw loss and full-attention ratio of each training step, one above the other."""
    figure = style.new_figure(6.4, 4.2, title)
    loss, ratio = figure.subplots(2, 1, sharex=True)
    number = [step["step"] for step in steps]
    marker = "o" if len(number) <= 60 else None
    loss.plot(number, [step["loss"] for step in steps], color=BLUE, marker=marker, markersize=3)
    percent = [100 * step["full_attention_ratio"] for step in steps]
    ratio.plot(number, percent, color=VERMILION, marker=marker, markersize=3)
    loss.set(ylabel="Loss (nats a token)")
    loss.grid(axis="y")
    style.percent_axis(ratio)
    ratio.set(xlabel="Training step", ylabel="Tokens that take\nfull attention (%)")
    ratio.xaxis.get_major_locator().set_params(integer=True)
    figure.align_ylabels([loss, ratio])
    style.save(figure, file)
