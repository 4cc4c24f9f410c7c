"""Does a large window delay long look-ups when a hybrid is trained?

Each run is `python -m scripts.train_chains` on configs/compare/windows.yaml from a random start, with another window
or pattern. It ends when look-ups are learned whose statement stands at least 64 tokens back, beyond every window here.
What counts is how many tokens that took.
"""

import argparse
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from scripts import train_chains
from scripts.compare.runner import ROOT, Cell, Comparison, Done, key_of, markdown
from scripts.compare.training import words
from swa_jax.base.settings import load_config
from swa_jax.train.config import TrainConfig

CONFIG = ROOT / "configs" / "compare" / "windows.yaml"
GAP = 64  # tokens between a statement and its question in the prompts that end a run
ARMS = yaml.safe_load(Path(__file__).with_name("windows.yaml").read_text())


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--tiny", action="store_true", help="a step of each stage, to test the command")


def comparison(options: argparse.Namespace) -> Comparison:
    arms = [(arm, seed) for seed in options.seeds for arm in ARMS]
    steps = ["stages.0.steps=1", "stages.1.steps=1"] if options.tiny else []
    cells = [Cell(key, functools.partial(work, options.out, steps, *key), lambda: options.tiny) for key in arms]
    return Comparison("windows", cells, lambda done: (table(done, options.seeds), []))


def work(out: Path, more: Sequence[str], arm: str, seed: int) -> dict[str, Any]:
    """Train, or go on where training was cut off; the last line of each stage."""
    run = out / f"{arm.replace(',', '').replace(' ', '-')}-{seed}"
    settings = [*words(ARMS[arm]), *more, f"seed={seed}", f"output={run}", f"tokenizer={out / 'tokenizer'}"]
    train_chains.CurriculumRun(load_config(TrainConfig, CONFIG, settings), GAP).train()
    return {"ends": ends_of(run)}


def ends_of(run: Path) -> list[dict[str, Any]]:
    last: dict[int, dict[str, Any]] = {}
    for line in map(json.loads, (run / "log.jsonl").read_text().splitlines()):
        last[line["stage"]] = line
    return [last[stage] for stage in sorted(last)]


def table(done: Done, seeds: Sequence[int]) -> str:
    """Millions of tokens, by arm and seed."""
    rows = []
    for arm in ARMS:
        runs = {seed: done[key]["ends"] for seed in seeds if (key := key_of(arm, seed)) in done}
        if runs:
            columns = [", ".join(_millions(ends[stage]) for ends in runs.values()) for stage in (0, -1)]
            mean = sum(ends[-1]["tokens"] for ends in runs.values()) / len(runs)
            rows.append([arm, ", ".join(map(str, runs)), *columns, f"{mean / 1e6:.2f}"])
    return markdown(["trained with", "seeds", "rows of 32 learned after", "all learned after", "mean"], rows)


def _millions(end: dict[str, Any]) -> str:
    """A stage whose steps were over before it was passed is marked."""
    passed = min(end["accuracy"].values()) >= train_chains.PASSED
    return f"{end['tokens'] / 1e6:.2f}" + ("" if passed else " (not learned)")
