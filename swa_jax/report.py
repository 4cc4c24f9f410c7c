"""Pictures and a table of what a pattern costs and keeps. Every picture is written atomically, without a display."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from numpy.typing import ArrayLike
from rich import box
from rich.console import Console
from rich.table import Table

from swa_jax.estimates import Estimate, in_brackets
from swa_jax.files import write_bytes

BLUE, ORANGE, GREY = "#2a6fbb", "#e07b39", "#b8bec6"
Row = Mapping[str, Any]


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
    """Accuracies [rows, columns] from 0 to 1 as a picture; NaN cells (no example) stay blank."""
    figure, axes = _grid(accuracy, row_labels, column_labels, f"{title} (%)")
    grid = np.asarray(accuracy, np.float64)
    image = axes.imshow(grid, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
    for i, j in np.argwhere(np.isfinite(grid)):
        ink = "black" if 0.12 < grid[i, j] < 0.88 else "white"
        axes.text(j, i, f"{100 * grid[i, j]:.0f}", ha="center", va="center", fontsize=8, color=ink)
    axes.set(xlabel=column_title, ylabel=row_title)
    bar = figure.colorbar(image, ax=axes, ticks=[0, 0.5, 1], fraction=0.05)
    bar.ax.set_yticklabels(["0", "50", "100"], fontsize=8)
    _save(figure, file)


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
    """Losses [rows, columns] in nats a token; NaN cells stay blank. Colours end at 1.5 nats above the lowest loss."""
    figure, axes = _grid(loss, row_labels, column_labels, title)
    grid = np.asarray(loss, np.float64)
    low = float(np.nanmin(grid))
    high = max(min(float(np.nanmax(grid)), low + 1.5), low + 1e-3)
    image = axes.imshow(grid, vmin=low, vmax=high, cmap="viridis_r", aspect="auto")
    for i, j in np.argwhere(np.isfinite(grid)):
        ink = "white" if grid[i, j] > low + 0.55 * (high - low) else "black"
        axes.text(j, i, f"{grid[i, j]:.2f}", ha="center", va="center", fontsize=8, color=ink)
    axes.set(xlabel=column_title, ylabel=row_title)
    figure.colorbar(image, ax=axes, fraction=0.05).set_label("Log of the perplexity", fontsize=8)
    _save(figure, file)


def _grid(
    values: ArrayLike, row_labels: Sequence[str], column_labels: Sequence[str], title: str
) -> tuple[Figure, Axes]:
    """An empty picture of a table with these labels, for values of this shape."""
    shape = np.shape(values)
    if shape != (len(row_labels), len(column_labels)):
        raise ValueError(
            f"the grid is {shape}, but there are {len(row_labels)} and {len(column_labels)} labels"
        )
    rows, columns = shape
    row_labels = _short(row_labels)
    label_inches = 0.08 * max(map(len, row_labels))
    width = max(1.6 + label_inches + 0.75 * columns, 0.1 * len(title))  # a title is as wide as it is
    figure = Figure(figsize=(width, 1.4 + 0.34 * rows), layout="constrained")
    axes = figure.add_subplot(title=title)
    axes.set_xticks(range(columns), column_labels, fontsize=8)
    axes.set_yticks(range(rows), row_labels, fontsize=8)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return figure, axes


def _short(names: Sequence[str]) -> list[str]:
    """Pattern files by their stems, as folders would fill the picture; by more where two would be named alike."""
    for shorter in (r"\2", r"\2.json"):
        short = [re.sub(r"^(.*[/\\])?([^/\\]+)\.json(?=, |$)", shorter, name) for name in names]
        if len(set(short)) == len(set(names)):
            return short
    return list(names)


def training_curves(
    curves: Mapping[str, Sequence[ArrayLike]], interval: int, file: str | Path, *, title: str, ylabel: str
) -> None:
    """A line for each name: the mean over its seeds [seeds][points] inside their range; a point is `interval` steps."""
    figure = Figure(figsize=(7.4, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for number, (name, seeds) in enumerate(curves.items()):
        values = np.array(seeds, np.float64)  # [seeds, points]
        steps = interval * (np.arange(values.shape[1]) + 0.5)
        axes.plot(steps, values.mean(0), color=f"C{number}", label=name, linewidth=1.4)
        axes.fill_between(steps, values.min(0), values.max(0), color=f"C{number}", alpha=0.15, linewidth=0)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set(title=title, xlabel="Training step", ylabel=ylabel)
    axes.legend(frameon=False, fontsize=8)
    _save(figure, file)


def layer_ratio_map(ratio: ArrayLike, interval: int, file: str | Path, *, title: str) -> None:
    """Full-attention ratios [L, points] over a training; a point is the mean of `interval` steps."""
    grid = np.asarray(ratio, np.float64)
    layers, points = grid.shape
    figure = Figure(figsize=(6.4, 1.6 + 0.22 * layers), layout="constrained")
    axes = figure.add_subplot()
    extent = (0, interval * points, layers - 0.5, -0.5)
    image = axes.imshow(
        grid, vmin=0, vmax=1, cmap="Blues", aspect="auto", extent=extent, interpolation="nearest"
    )
    axes.set_yticks(range(layers))
    axes.set(title=title, xlabel="Training step", ylabel="Layer (from 0)")
    bar = figure.colorbar(
        image, ax=axes, ticks=[0, 0.5, 1], fraction=0.05, label="Tokens that take\nfull attention (%)"
    )
    bar.ax.set_yticklabels(["0", "50", "100"], fontsize=8)
    _save(figure, file)


def routing_chart(
    by_layer: Sequence[Estimate],
    by_depth: Mapping[str, Sequence[tuple[float, Estimate]]],
    file: str | Path,
    *,
    title: str = "Where full attention is chosen (routed model)",
) -> None:
    """Full-attention ratios with 95 % intervals: one bar a layer, and one line a name over the needle's depth."""
    parts = [bool(by_layer), bool(by_depth)]
    figure = Figure(figsize=(7.2, 0.6 + 2.7 * sum(parts)), layout="constrained")
    figure.suptitle(title, fontsize=11)
    panels = iter(np.atleast_1d(figure.subplots(sum(parts), 1)))

    if by_layer:
        axes = next(panels)
        layers = np.arange(len(by_layer))
        axes.bar(layers, [100 * r.mean for r in by_layer], color=BLUE, zorder=2)
        axes.errorbar(
            layers,
            [100 * r.mean for r in by_layer],
            100 * _errors(by_layer),
            fmt="none",
            ecolor="black",
            capsize=3,
            linewidth=1,
            zorder=3,
        )
        axes.set(xlabel="Layer (from 0)", ylabel="Tokens that take\nfull attention (%)")
        axes.set_xticks(layers)
    if by_depth:
        axes = next(panels)
        for number, (name, points) in enumerate(by_depth.items()):
            depths, ratios = [100 * depth for depth, _ in points], [ratio for _, ratio in points]
            axes.errorbar(
                depths,
                [100 * r.mean for r in ratios],
                100 * _errors(ratios),
                color=f"C{number}",
                label=name,
                marker="o",
                markersize=3,
                capsize=2,
                linewidth=1.2,
            )
        axes.set(
            xlabel="Depth of the needle in the prompt (%)",
            ylabel="Answer queries that take\nfull attention (%)",
        )
        axes.legend(frameon=False, fontsize=8)
    for axes in figure.axes:
        axes.set_ylim(-3, 103)
        axes.grid(axis="y", alpha=0.3, zorder=0)
        axes.spines[["top", "right"]].set_visible(False)
    _save(figure, file)


def layer_scores_chart(
    scores: Sequence[Estimate],
    chosen: Sequence[int],
    file: str | Path,
    *,
    title: str,
    axis: str = "Answer loss saved by making\nthis layer full (nats a token)",
) -> None:
    """One bar a layer with its 95 % interval; the layers chosen to stay full stand out."""
    layers = np.arange(len(scores))
    means = np.array([s.mean for s in scores])
    errors = _errors(scores)
    figure = Figure(figsize=(max(5.0, 1.5 + 0.45 * len(scores)), 3.6), layout="constrained")
    axes = figure.add_subplot()
    for label, colour, some in (
        ("kept full", BLUE, np.isin(layers, chosen)),
        ("windowed", GREY, ~np.isin(layers, chosen)),
    ):
        axes.bar(layers[some], means[some], color=colour, label=label, zorder=2)
    axes.errorbar(layers, means, errors, fmt="none", ecolor="black", capsize=3, linewidth=1, zorder=3)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xticks(layers)
    axes.grid(axis="y", alpha=0.3, zorder=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set(
        title=title,
        xlabel="Layer (from 0)",
        ylabel=axis,
    )
    axes.legend(frameon=False, fontsize=8)
    _save(figure, file)


def head_map(
    full: ArrayLike,
    file: str | Path,
    *,
    title: str,
    scores: ArrayLike | None = None,
    larger_is_local: bool | None = None,
) -> None:
    """Which KV head of which layer stays full: mask [L, K], beside it the scores [L, K] it was chosen by, if any.

    `larger_is_local` says which end of the scores was windowed: True for the large ones.
    """
    mask = np.asarray(full, bool)
    panels = [mask.astype(float)] + ([] if scores is None else [np.asarray(scores, np.float64)])
    layers, heads = mask.shape
    width = len(panels) * (1.6 + 0.3 * heads)
    layout = ConstrainedLayoutEngine(
        compress=True, w_pad=0.12
    )  # inches, so that "windowed" ends before the scores
    figure = Figure(figsize=(max(width, 0.085 * len(title) + 1), 1.6 + 0.22 * layers), layout=layout)
    figure.suptitle(title, fontsize=10)
    large = {None: "", True: "\n(large: windowed)", False: "\n(large: stays full)"}[larger_is_local]
    for axes, values in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        chosen = values is panels[0]
        colours = ListedColormap([GREY, BLUE]) if chosen else "viridis"
        image = axes.imshow(values, cmap=colours, vmin=0 if chosen else None, vmax=1 if chosen else None)
        bar = figure.colorbar(image, ax=axes, fraction=0.08, ticks=[0.25, 0.75] if chosen else None)
        if chosen:
            bar.ax.set_yticklabels(["windowed", "full"], fontsize=8)
        axes.set_xticks(range(heads))
        axes.set_yticks(range(layers))
        axes.tick_params(length=0, labelsize=7)
        axes.set(xlabel="KV head", ylabel="Layer (from 0)" if chosen else "")
        axes.set_title("" if chosen else f"score{large}", fontsize=9)
    _save(figure, file)


def accuracy_memory_chart(
    rows: Sequence[Row], file: str | Path, *, title: str = "What the memory buys"
) -> None:
    """Needle accuracy with its interval against KV-cache memory, one labelled point a row of the report."""
    figure = Figure(figsize=(8.6, 0.8 + max(4.2, 0.3 * len(rows))), layout="constrained")
    axes = figure.add_subplot()
    megabytes = np.array([row["kv_cache_bytes"] for row in rows]) / 2**20
    accuracy = np.array([100 * row["needle_accuracy"] for row in rows])
    labels = _short([row["name"] for row in rows])
    decode = np.array([row["name"].endswith("+fa-decode") for row in rows])
    for label, colour, some in (("as named", BLUE, ~decode), ("with full-attention decode", ORANGE, decode)):
        if some.any():
            axes.scatter(megabytes[some], accuracy[some], s=42, color=colour, label=label, zorder=3)
    for x, row in zip(megabytes, rows, strict=True):
        if interval := row.get("needle_interval"):
            axes.vlines(x, 100 * interval[0], 100 * interval[1], color=GREY, linewidth=1, zorder=1)
    # Labels stand in a column right of the points they name, moved apart where they would touch.
    span = max(megabytes.max(), 1e-9)
    axes.set(xlim=(0, 1.5 * span), ylim=(-6, 108))
    for here in _clusters(megabytes, width=0.1 * span):
        here = here[np.argsort(accuracy[here], kind="stable")]
        for i, y in zip(here, _apart(accuracy[here], gap=5.5, low=-3, high=105), strict=True):
            axes.annotate(
                labels[i],
                (megabytes[i], accuracy[i]),
                (megabytes[here].max() + 0.025 * span, y),
                fontsize=7.5,
                va="center",
                arrowprops={
                    "arrowstyle": "-",
                    "color": GREY,
                    "linewidth": 0.6,
                    "shrinkA": 1,
                    "shrinkB": 3,
                    "relpos": (0, 0.5),
                },
                zorder=4,
            )
    axes.grid(alpha=0.3, zorder=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set(title=title, xlabel="KV cache, MB a sequence", ylabel="Needles found (%), with 95 % interval")
    figure.legend(frameon=False, fontsize=8, loc="outside lower center", ncols=2)
    _save(figure, file)


def frontier_chart(rows: Sequence[Row], file: str | Path, *, title: str) -> None:
    """Needle accuracy against KV-cache memory: a line for each method over its budgets, a mark for each pattern.

    Rows are those of `swa_jax.compare.summary`. The dashed step is the frontier: no choice finds more with less memory.
    Marks of methods are moved sideways a little, each by its own amount.
    """
    figure = Figure(figsize=(9.2, 5.0), layout="constrained")
    axes = figure.add_subplot()
    megabytes = np.array([row["kv_cache_bytes"] for row in rows]) / 2**20
    accuracy = np.array([100 * row["needle_accuracy"] for row in rows])
    best = np.maximum.accumulate(accuracy[order := np.lexsort((-accuracy, megabytes))])
    axes.step(
        megabytes[order], best, where="post", color=GREY, linestyle="--", linewidth=1, zorder=1,
        label="best for its memory",
    )  # fmt: skip
    names = list(dict.fromkeys(row["name"] for row in rows))
    labels = _short(names)
    marks = "osD^v<>pP*hX"
    colors = mpl.color_sequences["tab10" if len(names) <= 10 else "tab20"]
    methods = [name for name in names if sum(row["name"] == name for row in rows) > 1]
    for number, name in enumerate(names):
        here = [i for i, row in enumerate(rows) if row["name"] == name]
        here.sort(key=lambda i: megabytes[i])
        spread = 100 * _errors(
            [
                Estimate(rows[i]["needle_accuracy"], *(rows[i]["needle_interval"] or (None, None)))
                for i in here
            ]
        )
        # Choices that keep as much would hide one another.
        aside = methods.index(name) - (len(methods) - 1) / 2 if name in methods else 0
        axes.errorbar(
            megabytes[here] + 0.005 * megabytes.max() * aside, accuracy[here], spread,
            color=colors[number % len(colors)], marker=marks[number % len(marks)],
            markersize=5, linewidth=1.1, elinewidth=0.7, capsize=2, alpha=0.85, label=labels[number],
            linestyle="-" if len(here) > 1 else "none", zorder=2,
        )  # fmt: skip
    axes.set(title=title, xlabel="KV cache, MB a sequence", ylabel="Needles found (%), with 95 % interval")
    axes.set(xlim=(0, None), ylim=(-4, 104))
    axes.grid(alpha=0.3, zorder=0)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, fontsize=8, loc="outside right upper")
    _save(figure, file)


def _errors(estimates: Sequence[Estimate]) -> np.ndarray:
    """How far each interval reaches below and above its mean: [2, N]; NaN, which is not drawn, where there is none."""
    ends = [one.interval or (math.nan, math.nan) for one in estimates]
    reach = [(one.mean - low, high - one.mean) for one, (low, high) in zip(estimates, ends, strict=True)]
    return np.array(reach).T.clip(min=0)


def _clusters(values: np.ndarray, *, width: float) -> list[np.ndarray]:
    """Indices of values that lie within `width` of the smallest of their group."""
    groups: list[list[int]] = []
    for i in np.argsort(values, kind="stable").tolist():
        if groups and values[i] - values[groups[-1][0]] <= width:
            groups[-1].append(i)
        else:
            groups.append([i])
    return [np.array(group) for group in groups]


def _apart(values: ArrayLike, *, gap: float, low: float, high: float) -> np.ndarray:
    """Ascending values moved as little as a sweep up and one down need to lie `gap` apart within [low, high]."""
    places = np.clip(np.asarray(values, np.float64), low, high)
    for i in range(1, places.size):
        places[i] = max(places[i], places[i - 1] + gap)
    for i in reversed(range(places.size)):
        ceiling = high if i == places.size - 1 else places[i + 1] - gap
        places[i] = min(places[i], ceiling)
    return places


def routed_cpt_chart(
    steps: Sequence[Row], file: str | Path, *, title: str = "Routed training (SwiAttn)"
) -> None:
    """Loss and full-attention ratio of each training step, over one another."""
    figure = Figure(figsize=(6.4, 4.4), layout="constrained")
    loss, ratio = figure.subplots(2, 1, sharex=True)
    number = [step["step"] for step in steps]
    loss.plot(number, [step["loss"] for step in steps], color=BLUE, marker="o", markersize=3)
    ratio.plot(
        number, [100 * step["full_attention_ratio"] for step in steps], color=ORANGE, marker="o", markersize=3
    )
    loss.set(title=title, ylabel="Loss (nats a token)")
    ratio.set(xlabel="Training step", ylabel="Tokens that take\nfull attention (%)", ylim=(-3, 103))
    ratio.xaxis.get_major_locator().set_params(integer=True)
    for axes in (loss, ratio):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    _save(figure, file)


def wide_console() -> Console:
    """A console that the table fits, also where the output is no terminal."""
    console = Console()
    return console if console.width >= 125 else Console(width=125)


def pattern_table(rows: Sequence[Row]) -> Table:
    """The rows of a report as a table for the terminal."""
    table = Table(
        title="What each attention pattern keeps and costs",
        box=box.SIMPLE,
        title_justify="left",
        caption_justify="left",
    )
    table.caption = (
        "Read it against 'full': a good pattern finds nearly as many needles with much less memory.\n"
        "Needles found: share of hidden numbers the model repeats correctly, 95 % interval in brackets.\n"
        "Answer loss: how surprising the right answer is to the model; lower is better.\n"
        "+fa-decode: the answer is written with full attention, so the whole prompt stays in memory."
    )
    table.add_column("Pattern", no_wrap=True)
    table.add_column("Full layers", no_wrap=True)
    for title in (
        "Needles found",
        "Answer loss\n(nats/token)",
        "KV cache\n(MB/sequence)",
        "Prefill\n(ms/prompt)",
        "Decode\n(tokens/s)",
    ):
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row["name"],
            _layer_list(row["full_layers"], row.get("num_layers")),
            f"{100 * row['needle_accuracy']:.0f} %{in_brackets(row['needle_interval'], '{:.0f}', 100)}",
            f"{row['answer_nll']:.2f}",
            f"{row['kv_cache_bytes'] / 2**20:.2f}",
            f"{1000 * row['prefill_seconds']:.0f}",
            f"{row['decode_tokens_per_second']:.0f}",
        )
    return table


def _layer_list(layers: Sequence[int], num_layers: int | None) -> str:
    if not layers:
        return "none"
    return "all" if len(layers) == num_layers else ", ".join(map(str, layers))


def _save(figure: Figure, file: str | Path) -> None:
    picture = io.BytesIO()
    FigureCanvasAgg(figure)
    figure.savefig(picture, format="png", dpi=150)
    write_bytes(file, picture.getvalue())
