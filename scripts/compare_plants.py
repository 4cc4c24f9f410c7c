"""How many planted heads each selection method finds, at every placement of tests/plants.py.

    python scripts/compare_plants.py --out runs/compare-plants

A line of `cells.jsonl` is one method on one plant: placement, seed (of the placement, the model's noise, the examples
and the search), hits (the share of the heads needed that it found) and masks tried. What is there is not done again, so
the same command may be started again at any time. `--report-only` makes `table.md` of what is there; `--docs FILE`
puts it into a document as well, between `<!-- plants -->` and `<!-- end of plants -->`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import numpy as np
from documents import put_between
from plants import FULL_HEADS, KV_HEADS, LAYERS, PLACEMENTS, WINDOW_SIZE, Plant, placement

from swa_jax.errors import ConfigError
from swa_jax.estimates import bootstrap
from swa_jax.files import write_text
from swa_jax.select.heads import head_mask
from swa_jax.select.methods import METHODS, choose
from swa_jax.select.task import Task

RATIO = 1 - FULL_HEADS / (LAYERS * KV_HEADS)
NEAR = 0.95  # of the planted heads: as good as found
MARKS = ("<!-- plants -->\n", "<!-- end of plants -->")


def cell(method: str, name: str, seed: int, examples: int) -> dict:
    plant = Plant(placement(name, seed))
    begun = time.monotonic()
    model, drawn = plant.model(seed=seed), plant.examples(examples, seed)
    task = Task(model, drawn, WINDOW_SIZE, batch_size=examples, seed=seed, force=True)
    (pattern,) = choose(method, task, [RATIO])
    return {
        "method": method,
        "placement": name,
        "seed": seed,
        "examples": examples,
        "hits": plant.hits(head_mask(pattern, KV_HEADS)),
        "masks": pattern.provenance.get("evaluations"),
        "seconds": round(time.monotonic() - begun, 1),
    }


def report(cells: list[dict]) -> str:
    """Rows by method: the mean share found at each placement, its interval, and at how many the heads are found."""
    names = [name for name in PLACEMENTS if any(c["placement"] == name for c in cells)]
    seeds = sorted({c["seed"] for c in cells})
    lines = [
        f"Share of the {FULL_HEADS} heads needed that are found, in %: mean [95 % interval] over seeds of "
        f"placement, noise, examples and search; {len(seeds)} so far. Without an interval, all seeds are alike.",
        "",
        f"| method | {' | '.join(names)} | placements at {NEAR:.0%} | masks tried |",
        "|---|" + "---|" * (len(names) + 2),
    ]
    for method in METHODS:
        mine = [c for c in cells if c["method"] == method]
        if not mine:
            continue
        row, found, whole = [], 0, 0
        for name in names:
            hits = [c["hits"] for c in mine if c["placement"] == name]
            if not hits:
                row.append("")
                continue
            estimate = bootstrap(hits)
            found, whole = found + (estimate.mean >= NEAR), whole + 1
            alike = estimate.interval is None or len(set(hits)) == 1  # a bootstrap of equal numbers has no width
            ends = "" if alike else " [{:.0f}, {:.0f}]".format(*np.multiply(estimate.interval, 100))
            row.append(f"{100 * estimate.mean:.0f}{ends}")
        masks = [c["masks"] for c in mine if c["masks"] is not None]
        tried = f"{min(masks)} to {max(masks)}" if masks else ""
        lines.append(f"| `{method}` | {' | '.join(row)} | {found} of {whole} | {tried} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/compare-plants"))
    parser.add_argument("--method", action="append", choices=list(METHODS), help="default: all")
    parser.add_argument("--placement", action="append", choices=PLACEMENTS, help="default: all")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--examples", type=int, default=16)
    parser.add_argument("--report-only", action="store_true")
    parser.add_argument("--docs", type=Path)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "cells.jsonl"
    cells = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    done = {(c["method"], c["placement"], c["seed"], c["examples"]) for c in cells}
    if not options.report_only:
        for seed in range(options.seeds):
            for name in options.placement or PLACEMENTS:
                for method in options.method or METHODS:
                    if (method, name, seed, options.examples) in done:
                        continue
                    cells.append(cell(method, name, seed, options.examples))
                    with file.open("a") as lines:
                        lines.write(json.dumps(cells[-1]) + "\n")
                    print(json.dumps(cells[-1]), flush=True)
    table = report(cells)
    write_text(options.out / "table.md", table)
    if options.docs:
        try:
            put_between(options.docs, *MARKS, table)
        except ConfigError as error:
            sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
