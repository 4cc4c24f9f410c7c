"""How many planted heads each selection method finds, at every placement of tests/plants.py.

A cell is one method on one plant: placement, seed (of the placement, the model's noise, the examples and the search),
hits (the share of the heads needed that it found) and masks tried.
"""

import argparse
import functools
import sys
from typing import Any

import numpy as np

from scripts.compare.runner import ROOT, Cell, Comparison, Done, markdown, told
from swa_jax.base.estimates import mean_score
from swa_jax.model.window import Window
from swa_jax.select.heads import head_mask
from swa_jax.select.methods import METHODS, choose
from swa_jax.select.task import Task

sys.path.insert(0, str(ROOT / "tests"))
from plants import FULL_HEADS, KV_HEADS, LAYERS, PLACEMENTS, WINDOW_SIZE, Plant, placement

RATIO = 1 - FULL_HEADS / (LAYERS * KV_HEADS)
NEAR = 0.95  # of the planted heads: as good as found


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--placement", nargs="+", choices=PLACEMENTS, default=PLACEMENTS, metavar="NAME")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--examples", type=int, default=16)


def comparison(options: argparse.Namespace) -> Comparison:
    keys = [(m, name, s) for s in options.seeds for name in options.placement for m in METHODS]
    cells = [Cell(key, functools.partial(work, *key, options.examples), lambda: options.examples) for key in keys]
    return Comparison("plants", cells, lambda done: (report(done), []))


def work(method: str, name: str, seed: int, examples: int) -> dict[str, Any]:
    plant = Plant(placement(name, seed))
    drawn = plant.examples(examples, seed)
    task = Task(plant.model(seed=seed), drawn, Window(WINDOW_SIZE), batch_size=examples, seed=seed, force=True)
    (pattern,) = choose(method, task, [RATIO])
    return {"hits": plant.hits(head_mask(pattern, KV_HEADS)), "masks": pattern.provenance.get("evaluations")}


def report(done: Done) -> str:
    """Rows by method: the mean share found at each placement, its interval, and at how many the heads are found."""
    cells = [dict(zip(("method", "placement", "seed"), one["cell"], strict=True)) | one for one in done.values()]
    names = [name for name in PLACEMENTS if any(c["placement"] == name for c in cells)]
    rows = []
    for method in METHODS:
        mine = [c for c in cells if c["method"] == method]
        hits = {name: [c["hits"] for c in mine if c["placement"] == name] for name in names}
        masks = [c["masks"] for c in mine if c["masks"] is not None]
        means = [np.mean(found) for found in hits.values() if found]
        if means:
            tried = f"{min(masks)} to {max(masks)}" if masks else ""
            whole = f"{sum(mean >= NEAR for mean in means)} of {len(means)}"
            rows.append([f"`{method}`", *map(share, hits.values()), whole, tried])
    head = ["method", *names, f"placements at {NEAR:.0%}", "masks tried"]
    return (
        f"Share of the {FULL_HEADS} heads needed that are found, in %: mean [95 % interval] over seeds of placement, "
        f"noise, examples and search; {len({c['seed'] for c in cells})} so far. Without an interval, all seeds are "
        f"alike.\n\n{markdown(head, rows)}"
    )


def share(hits: list[float]) -> str:
    """Its mean and interval; equal numbers tell no width."""
    if len(set(hits)) > 1:
        return told(mean_score(hits))
    return f"{100 * hits[0]:.0f}" if hits else ""
