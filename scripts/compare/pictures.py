"""Pictures of comparisons of training: each kind writes files into a folder and returns (file, caption) pairs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scripts.compare.measures import HOPS, LENGTHS
from swa_jax.report.heat_maps import layer_ratio_map, loss_heat_map, needle_heat_map
from swa_jax.report.line_charts import training_curves
from swa_jax.report.style import GREY, HIGHLIGHTS, new_figure, percent_axis, save, styled

BIN = 10  # steps that a point of a curve is the mean of
Runs = Mapping[str, list[dict]]  # by arm
Made = list[tuple[str, str]]


def draw(out: Path, runs: Runs, what: Mapping[str, Any], *, kind: str, **settings: Any) -> Made:
    kinds = {"lengths": lengths, "curves": curves, "layers": layers, "depths": depths, "hops": hops, "tokens": tokens}
    return (kinds | {"ratios": ratios})[kind](out, runs, what, **settings)


def curves(
    out: Path, runs: Runs, what: Mapping[str, Any], title: str, ylabel: str, caption: str, without: Sequence[str] = ()
) -> Made:
    """Loss in training of the arms that finished; `without` those whose names hold one of these."""
    shown = {
        arm: [run["loss"] for run in of]
        for arm, of in runs.items()
        if not any(part in arm for part in without) and all(run["values"] and run["loss"] for run in of)
    }
    if not shown:
        return []
    training_curves(shown, BIN, out / "loss.png", title=title, ylabel=ylabel)
    return [("loss.png", caption)]


def lengths(out: Path, runs: Runs, what: Mapping[str, Any], file: str, title: str, sigmoid: bool) -> Made:
    """Held-out loss by arm and length, of the arms with sigmoid or of the others."""
    rows: dict[str, list[float]] = {}
    for arm, of in runs.items():
        finished = [run["values"] for run in of if run["values"]]
        for suffix in ("", ", sees 32", ", sees all"):
            keys = [f"{length}{suffix}" for length in LENGTHS if finished and f"{length}{suffix}" in finished[0]]
            if keys and arm.startswith("sigmoid") == sigmoid:
                rows[arm + suffix] = [float(np.mean([values[key] for values in finished])) for key in keys]
    if not rows:
        return []
    width = max(map(len, rows.values()))
    padded = [row + [np.nan] * (width - len(row)) for row in rows.values()]
    labels, column = [str(length) for length in LENGTHS[:width]], "Tokens a row in evaluation"
    loss_heat_map(padded, list(rows), labels, out / file, title=title, column_title=column)
    return [(file, f"{title}; held-out loss in nats a token, mean over the seeds")]


def layers(out: Path, runs: Runs, what: Mapping[str, Any]) -> Made:
    """Of each arm with routers: the full-attention ratio of its layers while it trains."""
    made = []
    for arm, of in runs.items():
        if of[0].get("ratio_by_layer"):
            name = f"ratio-{arm.split(', ')[-1].replace(' ', '-')}.png"
            ratio = np.mean([run["ratio_by_layer"] for run in of], axis=0).T  # [L, points]
            layer_ratio_map(ratio, BIN, out / name, title=f"Full-attention ratio in training: {arm}")
            made.append((name, f"Full-attention ratio by layer in training, mean over the seeds: {arm}"))
    return made


def depths(out: Path, runs: Runs, what: Mapping[str, Any]) -> Made:
    """Needles found by arm and depth."""
    keys = [key for key in next(iter(runs.values()))[0]["values"] if key.startswith("found at ")]
    grid = [[np.mean([run["values"][key] for run in of]) for key in keys] for of in runs.values()]
    needle_heat_map(grid, list(runs), [f"{100 * float(key.split()[-1]):.0f} %" for key in keys], out / "needles.png")
    return [("needles.png", "Needles found by depth, mean over the seeds")]


def hops(out: Path, runs: Runs, what: Mapping[str, Any]) -> Made:
    """Right answers by arm and hops."""
    right = [[np.mean([run["values"][f"right, {n}"] for run in of]) for n in HOPS] for of in runs.values()]
    labels = list(map(str, HOPS))
    needle_heat_map(right, list(runs), labels, out / "right.png", title="Answers right", column_title="Hops")
    return [("right.png", "Answers right by arm and hops, mean over the models, in percent")]


def tokens(out: Path, runs: Runs, what: Mapping[str, Any]) -> Made:
    """Of each arm with routers: which tokens take full attention in which layer."""
    made, start = [], "full ratio, "
    groups = {key: title.removeprefix(start) for key, title in what["columns"].items() if key.startswith(start)}
    for arm, of in runs.items():
        if not of[0].get("ratio_by_layer"):
            continue
        numbers = range(len(of[0]["ratio_by_layer"][0]))
        rows = {
            f"model {run['seed']}, {title}": [run["values"][f"{group}, layer {layer}"] for layer in numbers]
            for run in of
            for group, title in groups.items()
        }
        name, title = f"tokens-{arm.split(', ')[-1].replace(' ', '-')}.png", f"Full-attention ratio: {arm}"
        labels = list(map(str, numbers))
        needle_heat_map(list(rows.values()), list(rows), labels, out / name, title=title, column_title="Layer (from 0)")
        made.append((name, f"Full-attention ratio by model, kind of token and layer, in percent: {arm}"))
    return made


@styled
def ratios(out: Path, runs: Runs, what: Mapping[str, Any], forms: Sequence[str]) -> Made:
    """Right answers against the full-attention ratio on chains; variants of one form have one colour."""
    figure = new_figure(6.4, 4.2, "SwiAttn's regulariser: answers against the keys that are read")
    axes = figure.subplots()
    for form, color, marker in zip(forms, (*HIGHLIGHTS, GREY, GREY), "os^Dv<>P", strict=True):
        of = [run for arm, of in runs.items() if arm.split(",")[0] == form for run in of]
        points = [
            [run["values"][key] for run in of if key in run["values"]] for key in ("full ratio, prompts", "right")
        ]
        axes.scatter(*100 * np.array(points), color=color, marker=marker, label=form)
    percent_axis(axes)
    axes.set_xlabel("tokens of chains that take full attention (%), mean over layers")
    axes.set_ylabel("right answers (%)")
    axes.legend(ncols=2)
    save(figure, out / "ablations.png")
    return [("ablations.png", "Right answers against the full-attention ratio, a point for each model and variant")]
