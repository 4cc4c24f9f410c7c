"""Does a large window delay long look-ups when a hybrid is trained? `python scripts/compare_windows.py --seeds 0 1 2`

Each run is scripts/train_chains.py on configs/compare/windows.yaml from a random start, with another window or pattern.
It ends when look-ups are learned whose statement stands at least 64 tokens back, beyond every window here. What counts
is how many tokens that took. Runs that are finished are kept and one that was cut off goes on, so that the same command
may be started again at any time. The output folder gets `table.md`; `--docs FILE` also puts it into a document, and
`--report-only` makes it of what is there.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from documents import put_between

from swa_jax.errors import ConfigError
from swa_jax.files import write_text
from swa_jax.settings import load_config
from swa_jax.train.config import TrainConfig

SCRIPTS = Path(__file__).resolve().parent
CONFIG = SCRIPTS.parent / "configs" / "compare" / "windows.yaml"
GAP = 64  # tokens between a statement and its question in the prompts that end a run
ARMS: dict[str, tuple[str, ...]] = {
    **{f"window {size}": (f"sliding_window={size}",) for size in (4, 8, 16, 32, 64)},
    "window 4, full layers without RoPE": ("sliding_window=4", "nope_full_layers=true"),
    "window 4 in the first layer alone": ("sliding_window=4", "pattern=layers:1,2,3,4,5,6,7"),
    "full attention": ("pattern=full",),
}
MARKS = "<!-- windows: made by scripts/compare_windows.py -->\n", "<!-- end of windows -->"


def folder_of(out: Path, arm: str, seed: int) -> Path:
    return out / f"{arm.replace(',', '').replace(' ', '-')}-{seed}"


def run(out: Path, arm: str, seed: int, minutes: float | None) -> None:
    command = [
        sys.executable, SCRIPTS / "train_chains.py", "--config", CONFIG, "--seed", seed, "--gap", GAP,
        "--tokenizer", out / "tokenizer", "--output", folder_of(out, arm, seed),
        *(() if minutes is None else ("--minutes", minutes)), *ARMS[arm],
    ]  # fmt: skip
    subprocess.run([str(word) for word in command], check=True)


def read_run(folder: Path) -> list[dict[str, Any]] | None:
    """The last line of each stage of a run that is over; None while it is not."""
    log, stages = folder / "log.jsonl", len(load_config(TrainConfig, CONFIG, []).stages)
    if not log.exists() or not (folder / f"stage-{stages}").is_dir():
        return None
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return [[line for line in lines if line["stage"] == stage][-1] for stage in range(stages)]


def table(out: Path, seeds: Sequence[int]) -> str:
    """Millions of tokens, by arm and seed."""
    lines = ["| trained with | seeds | rows of 32 learned after | all learned after | mean |", "|---|---|---|---|---|"]
    for arm in ARMS:
        runs = {seed: ends for seed in seeds if (ends := read_run(folder_of(out, arm, seed)))}
        if not runs:
            continue
        columns = [[_millions(ends[stage]) for ends in runs.values()] for stage in (0, -1)]
        named, mean = ", ".join(map(str, runs)), sum(ends[-1]["tokens"] for ends in runs.values()) / len(runs)
        lines.append(f"| {arm} | {named} | {', '.join(columns[0])} | {', '.join(columns[1])} | {mean / 1e6:.2f} |")
    return "\n".join(lines) + "\n"


def _millions(end: dict[str, Any]) -> str:
    """A stage whose steps were over before it was passed is marked."""
    passed = min(end["accuracy"].values()) >= 0.9
    return f"{end['tokens'] / 1e6:.2f}" + ("" if passed else " (not learned)")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM")
    parser.add_argument("--out", type=Path, default=Path("runs/compare-windows"))
    parser.add_argument("--minutes", type=float, help="stop each run after so many; the same command goes on")
    parser.add_argument("--docs", type=Path, help="a document to put the table into")
    parser.add_argument("--report-only", action="store_true")
    options = parser.parse_args()
    for seed, arm in itertools.product(options.seeds, options.arms):
        if not options.report_only and read_run(folder_of(options.out, arm, seed)) is None:
            print(f"seed {seed}, {arm}", flush=True)
            run(options.out, arm, seed, options.minutes)
    text = table(options.out, options.seeds)
    write_text(options.out / "table.md", text)
    if options.docs:
        try:
            put_between(options.docs, *MARKS, f"\n{text}\n")
        except ConfigError as error:
            sys.exit(str(error))
    print(text)


if __name__ == "__main__":
    main()
