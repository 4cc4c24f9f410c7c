"""Compare training methods at small scale, on a CPU, with several seeds, on real text.

    python scripts/compare_training.py swiattn --seeds 0 1 2 --out runs/compare-swiattn
    python scripts/compare_training.py swiattn-chains --seeds 0 1 2 --bases A B C    # a model for each seed
    python scripts/compare_training.py swiattn-ablations --seeds 0 1 2 --bases A B C
    python scripts/compare_training.py swat --seeds 0 1 2 --out runs/compare-swat
    python scripts/compare_training.py swat-longer --seeds 0 1 2

`swiattn` continues the bundled model `recall` by SwiAttn and by its four baselines, one configuration with `method` as
switch; `swiattn-chains` does so with models of chains, and `swiattn-ablations` varies the regulariser; `swat` trains
the rows of SWAT's Tables 2 and 3 from scratch, and `swat-longer` some of them for four times as long. Every run is
`swa_jax.train.loop.train` on a file of configs/compare with the overrides that the module of the comparison lists
(compare_swiattn.py and so on). Runs that are finished are skipped and a run that was cut off goes on, so the same
command may be started again at any time. The output folder gets `results.json`, `report.md` and pictures after every
run; `--report-only` makes them from what is there, `--docs FILE` also puts them into a document.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import shutil
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import compare_swat
import compare_swat_longer
import compare_swiattn
import compare_swiattn_ablations
import compare_swiattn_chains
import jax.numpy as jnp
import numpy as np
from documents import put_between

from swa_jax.checkpoint.folder import load_model, weights_sum
from swa_jax.checkpoint.named import model_folder
from swa_jax.data.tokenizer import load_tokenizer
from swa_jax.errors import ConfigError
from swa_jax.files import sum_of_json, write_text
from swa_jax.settings import load_config, to_dict
from swa_jax.train.loop import TrainConfig, train

ROOT = Path(__file__).resolve().parents[1]
BIN = compare_swat.BIN
COMPARISONS = {
    "swiattn": compare_swiattn,
    "swiattn-chains": compare_swiattn_chains,
    "swiattn-ablations": compare_swiattn_ablations,
    "swat": compare_swat,
    "swat-longer": compare_swat_longer,
}


# ---- running ----


def run_all(
    name: str, seeds: Sequence[int], out: Path, arms: Sequence[str], bases: Sequence[str], *, tiny: bool
) -> None:
    """Train and measure whatever is missing in `out`; results are written after each run."""
    comparison = COMPARISONS[name]
    results = read_results(out)
    tokenizer = ROOT / "swa_jax" / (comparison.BASE or "recall")
    for seed, arm in itertools.product(seeds, arms):
        key = f"{arm} | {seed}"
        run = out / "runs" / key.replace(" | ", "-seed-").replace(" ", "_")
        base = base_of(comparison, seed, bases)
        config = load_config(TrainConfig, ROOT / comparison.CONFIG, [
            *overrides_of(comparison, arm, seed, out, base), f"tokenizer={tokenizer}", f"output={run}", f"seed={seed}",
            *(comparison.TINY if tiny else ()),
        ])  # fmt: skip
        made_with = {"config": fingerprint(config)} | ({} if base is None else {"base": weights_sum(base)})
        if key in results:
            if any(results[key].get(what, total) != total for what, total in made_with.items()):
                raise ConfigError(f"{out} has results of '{key}' with other settings: name a new folder with --out")
            continue
        print(time.strftime("%H:%M:%S"), key, flush=True)
        started = time.perf_counter()
        values: dict[str, float] = {}
        diverged = None
        try:
            folder = train(config, quiet=True)
            model = load_model(folder, dtype=jnp.float32)
            values = comparison.measure(model, load_tokenizer(tokenizer), config, tiny)
        except FloatingPointError as error:
            diverged = str(error)
        results[key] = {
            "arm": arm,
            "seed": seed,
            **made_with,
            "continues": bases[seed] if bases else None,
            "pattern": config.attention,
            "values": values,
            "diverged": diverged,
            "seconds": round(time.perf_counter() - started, 1),
            **read_curves(run),
        }
        shutil.rmtree(run / "checkpoints", ignore_errors=True)
        write(out / "results.json", json.dumps(results, indent=1) + "\n")
        report(name, out)


def base_of(comparison: ModuleType, seed: int, bases: Sequence[str]) -> Path | None:
    """The folder of the model that a seed continues: the one of that number in `bases`, or the bundled model."""
    if comparison.BASE is None:
        return None
    if bases and seed >= len(bases):
        raise ConfigError(f"seed {seed} has no model to continue: --bases names {len(bases)}, from 0 on")
    return model_folder(bases[seed] if bases else comparison.BASE)


def overrides_of(comparison: ModuleType, arm: str, seed: int, out: Path, base: Path | None) -> list[str]:
    """Of an arm, and the model to continue; a pattern that is to be chosen for that model is named."""
    overrides = list(comparison.ARMS[arm])
    if base is None:
        return overrides
    chosen = f"pattern={compare_swiattn_chains.CHOSEN}"
    if chosen in overrides:
        pattern = compare_swiattn_chains.chosen_pattern(base, out / f"chosen-{seed}.json")
        overrides[overrides.index(chosen)] = f"pattern={pattern}"
    return [*overrides, f"init_from={base}"]


def fingerprint(config: TrainConfig) -> str:
    """The sum of the settings that decide a run's outcome; folders may differ."""
    settings = {key: value for key, value in to_dict(config).items() if key not in ("output", "init_from", "tokenizer")}
    return sum_of_json(settings)[:16]


def read_curves(run: Path) -> dict[str, list]:
    """Loss and full-attention ratio by layer, as means over `BIN` steps."""
    file = run / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    bins = [lines[i : i + BIN] for i in range(0, len(lines), BIN)]
    curves: dict[str, list] = {"loss": [float(np.mean([line["loss"] for line in part])) for part in bins]}
    if lines and "full_attention_ratio_by_layer" in lines[0]:
        ratios = [np.mean([line["full_attention_ratio_by_layer"] for line in part], axis=0) for part in bins]
        curves["ratio_by_layer"] = [np.round(ratio, 4).tolist() for ratio in ratios]
    return curves


def read_results(out: Path) -> dict[str, dict]:
    file = out / "results.json"
    return json.loads(file.read_text()) if file.exists() else {}


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, text)


# ---- reporting ----


def report(name: str, out: Path) -> tuple[str, list[tuple[str, str]]]:
    """Write `report.md` and the pictures of what is finished; returns the text and (picture, caption) pairs."""
    comparison, results = COMPARISONS[name], read_results(out)
    runs = {arm: [r for r in results.values() if r["arm"] == arm] for arm in comparison.ARMS}
    runs = {arm: sorted(of, key=lambda run: run["seed"]) for arm, of in runs.items() if of}
    if not runs:
        raise ConfigError(f"{out} has no results of '{name}': run without --report-only first, or name another --out")
    seeds = sorted({run["seed"] for run in results.values()})
    minutes = sum(run["seconds"] for run in results.values()) / 60
    continued = {run["seed"]: run.get("continues") for run in results.values()}
    bases = [continued[seed] for seed in seeds if continued[seed]]
    command = f"{name} --seeds {' '.join(map(str, seeds))}" + (f" --bases {' '.join(bases)}" if bases else "")
    text = (
        f"`python scripts/compare_training.py {command}`: {len(results)} runs, "
        f"{minutes:.0f} minutes on one core of a shared machine with {os.cpu_count()}. Mean ± standard deviation over "
        f"the seeds.\n\n{table(runs, comparison.COLUMNS)}\n{verdicts(runs, comparison.CLAIMS)}"
    )
    write(out / "report.md", text)
    return text, comparison.pictures(out, runs)


def table(runs: Mapping[str, list[dict]], columns: Mapping[str, str]) -> str:
    shown = [key for key in columns if any(key in run["values"] for of in runs.values() for run in of)]
    lines = [f"| | seeds | {' | '.join(columns[key] for key in shown)} |", "|---|---|" + "---|" * len(shown)]
    for arm, of in runs.items():
        cells = [cell([run["values"][key] for run in of if key in run["values"]]) for key in shown]
        diverged = sum(run["diverged"] is not None for run in of)
        count = f"{len(of)}, {diverged} diverged" if diverged else str(len(of))
        lines.append(f"| {arm} | {count} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def cell(values: Sequence[float]) -> str:
    if not values:
        return ""
    spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.3f}{spread}"


def verdicts(runs: Mapping[str, list[dict]], claims: Sequence[tuple]) -> str:
    """Each claim's difference, seed by seed; a run that diverged has an infinite loss."""
    lines = ["| the paper says | the paper's figures | difference here, by seed | |", "|---|---|---|---|"]
    for said, figures, higher, lower in claims:
        pair = []
        for arm, key in (higher, lower):
            of = runs.get(arm, [])
            pair.append({r["seed"]: math.inf if r["diverged"] else r["values"].get(key) for r in of})
        seeds = [s for s in pair[0] if pair[0][s] is not None and pair[1].get(s) is not None]
        differences = [pair[0][seed] - pair[1][seed] for seed in seeds]
        if differences:
            shown = ", ".join(f"{d:+.3f}" for d in differences)
            found = verdict(differences, equal="the paper: equal" in said)
            lines.append(f"| {said} | {figures} | {shown} | {found} |")
    return "\n".join(lines) + "\n"


def verdict(differences: Sequence[float], *, equal: bool = False) -> str:
    """Whether paired differences that a paper has above 0 are all of one sign and twice their standard error from 0.

    With `equal` the paper has no difference.
    """
    if len(differences) < 3 or any(math.isnan(d) for d in differences):
        return "too few seeds"
    same = all(d > 0 for d in differences) or all(d < 0 for d in differences)
    mean = statistics.mean(differences)
    clear = math.isinf(mean) or abs(mean) > 2 * statistics.stdev(differences) / math.sqrt(len(differences))
    if not (same and clear):
        return "no clear difference, as in the paper" if equal else "no clear difference"
    if equal:
        return f"a difference, {mean:+.3f} on average"
    return "reproduced in direction" if mean > 0 else "not reproduced: the opposite"


def put_into(document: Path, name: str, text: str, pictures: Sequence[tuple[str, str]], out: Path) -> None:
    """Replace what stands between the marks of this comparison in a document; pictures go to `images/` beside it."""
    begin, end = f"<!-- {name}: made by scripts/compare_training.py -->\n", f"<!-- end of {name} -->"
    images = document.parent / "images"
    images.mkdir(exist_ok=True)
    shown = []
    for file, caption in pictures:
        shutil.copy(out / file, images / f"compare-{name}-{file}")
        shown.append(f"![{caption}](images/compare-{name}-{file})\n")
    put_between(document, begin, end, "\n" + text + "\n" + "\n".join(shown) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare training methods at small scale.")
    parser.add_argument("comparison", choices=COMPARISONS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, help="default: runs/compare-NAME")
    parser.add_argument("--arms", nargs="+", help="only these rows of the table")
    parser.add_argument(
        "--bases",
        nargs="+",
        default=[],
        help="the checkpoints that seeds 0, 1, ... continue; default: the bundled model for every seed",
    )
    parser.add_argument("--tiny", action="store_true", help="a few steps of each, to test the command")
    parser.add_argument("--report-only", action="store_true", help="train nothing")
    parser.add_argument("--docs", type=Path, help="a document to put report and pictures into")
    args = parser.parse_args()
    name = args.comparison
    out = args.out or Path("runs") / f"compare-{name}"
    known = COMPARISONS[name].ARMS
    if unknown := [arm for arm in args.arms or () if arm not in known]:
        parser.error(f"no arm '{unknown[0]}'; there are: {', '.join(known)}")
    if args.bases and COMPARISONS[name].BASE is None:
        parser.error(f"--bases is for models that are continued; those of '{name}' start at random")
    try:
        if not args.report_only:
            run_all(name, args.seeds, out, args.arms or list(known), args.bases, tiny=args.tiny)
        text, pictures = report(name, out)
        if args.docs:
            put_into(args.docs, name, text, pictures, out)
    except ConfigError as error:
        sys.exit(f"error: {error}")
    print(text)
    print(f"{out}/report.md, results.json, {', '.join(file for file, _ in pictures)}")


if __name__ == "__main__":
    main()
