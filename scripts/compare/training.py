"""Training methods, with several seeds, on real text: what the YAML files beside this one declare.

Every run is `swa_jax.train.loop.train` on a file of configs/compare with an arm's overrides. One that was cut off goes
on. `--bases A B C` are the models that seeds 0, 1, 2 continue; default: the bundled one for every seed.
"""

import argparse
import functools
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import yaml

from scripts.compare import measures, pictures
from scripts.compare.runner import ROOT, Cell, Comparison, Done, markdown
from swa_jax.base.errors import ConfigError
from swa_jax.base.estimates import t_95
from swa_jax.base.files import sum_of_json
from swa_jax.base.settings import load_config, to_dict
from swa_jax.checkpoint.folder import load_model, weights_sum
from swa_jax.checkpoint.named import load_tokenizer, model_folder
from swa_jax.model.pattern import AttentionPattern
from swa_jax.train.loop import TrainConfig, train

CHOSEN = "nll-greedy"  # as a pattern: the layers that this method chooses for the model that is continued


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--bases", nargs="+", default=[], help="the checkpoints that seeds 0, 1, ... continue")
    parser.add_argument("--tiny", action="store_true", help="a few steps of each, to test the command")


@functools.cache
def declared(name: str) -> dict[str, Any]:
    """The file of a comparison; what it does not say is as in the one that it is `like`."""
    given = yaml.safe_load(Path(__file__).with_name(f"{name}.yaml").read_text())
    base = declared(given["like"]) if "like" in given else {"base": None}
    arms = {}
    for arm, overrides in given["arms"].items():
        same = base["arms"][overrides["like"]] if "like" in overrides else {}
        arms[arm] = same | {key: value for key, value in overrides.items() if key != "like"}
    return base | given | {"arms": arms}


def words(overrides: Mapping[str, Any]) -> list[str]:
    """As on a command line."""
    return [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in overrides.items()]


def comparison(options: argparse.Namespace) -> Comparison:
    what = declared(options.name)
    if options.bases and what["base"] is None:
        raise ConfigError(f"--bases is for models that are continued; those of '{options.name}' start at random")
    cells = [cell(what, arm, seed, options) for seed in options.seeds for arm in what["arms"]]
    return Comparison(options.name, cells, lambda done: report(options.name, done, options.out))


def cell(what: Mapping[str, Any], arm: str, seed: int, options: argparse.Namespace) -> Cell:
    run = options.out / "runs" / f"{arm}-seed-{seed}".replace(" ", "_")
    more = [f"output={run}", f"seed={seed}", *words(what["tiny"] if options.tiny else {})]

    @functools.cache
    def base_and_config() -> tuple[Path | None, TrainConfig]:
        base = base_of(what, seed, options.bases)
        overrides = overrides_of(what, arm, seed, options.out, base)
        return base, load_config(TrainConfig, ROOT / what["config"], [*overrides, *more])

    def settings() -> dict[str, str]:
        base, config = base_and_config()
        return {"config": fingerprint(config)} | ({} if base is None else {"base": weights_sum(base)})

    def measure() -> dict[str, Any]:
        _, config = base_and_config()
        values, diverged = {}, None
        try:
            model = load_model(train(config, quiet=True), dtype=jnp.float32)
            measured = getattr(measures, what["measure"])
            values = measured(model, load_tokenizer(config.tokenizer), config, options.tiny)
        except FloatingPointError as error:
            diverged = str(error)
        curves = read_curves(run)
        shutil.rmtree(run / "checkpoints", ignore_errors=True)
        continues = options.bases[seed] if options.bases else None
        return {"continues": continues, "pattern": config.attention, "values": values, "diverged": diverged, **curves}

    return Cell((arm, seed), measure, settings)


def base_of(what: Mapping[str, Any], seed: int, bases: Sequence[str]) -> Path | None:
    """The folder of the model that a seed continues: the one of that number in `bases`, or the bundled model."""
    if what["base"] is None:
        return None
    if bases and seed >= len(bases):
        raise ConfigError(f"seed {seed} has no model to continue: --bases names {len(bases)}, from 0 on")
    return model_folder(bases[seed] if bases else what["base"])


def overrides_of(what: Mapping[str, Any], arm: str, seed: int, out: Path, base: Path | None) -> list[str]:
    """Of an arm, and the model to continue; a pattern that is to be chosen for that model is named."""
    overrides = what["arms"][arm]
    if base is None:
        return words(overrides)
    if overrides.get("pattern") == CHOSEN:
        overrides = overrides | {"pattern": chosen_pattern(base, out / f"chosen-{seed}.json")}
    return [*words(overrides), f"init_from={base}"]


def chosen_pattern(base: Path, file: Path) -> str:
    """The recipe of half of the layers, chosen on other chains than those that are measured, and kept in `file`."""
    if not file.exists():
        prompts = f"hops={measures.HOPS[0]}-{measures.HOPS[-1]},rivals={measures.RIVALS},gap={measures.WINDOW}"
        command = [sys.executable, "-m", "swa_jax.cli", "select", CHOSEN, base, "--one-in", 2, "--chains", prompts]
        command += ["--window", measures.WINDOW, "--length", measures.LENGTH, "--examples", 24]
        command += ["--dtype", "float32", "--out", file]
        subprocess.run([str(word) for word in command], check=True, stdout=subprocess.DEVNULL)
    return "layers:" + ",".join(map(str, AttentionPattern.from_json(file).full_layers))


def fingerprint(config: TrainConfig) -> str:
    """The sum of the settings that decide a run's outcome; folders may differ."""
    settings = {key: value for key, value in to_dict(config).items() if key not in ("output", "init_from", "tokenizer")}
    return sum_of_json(settings)[:16]


def read_curves(run: Path) -> dict[str, list]:
    """Loss, and full-attention ratio by layer, as means over some steps."""
    file, size = run / "metrics.jsonl", pictures.BIN
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    bins = [lines[i : i + size] for i in range(0, len(lines), size)]
    curves: dict[str, list] = {"loss": [float(np.mean([line["loss"] for line in part])) for part in bins]}
    if lines and "full_attention_ratio_by_layer" in lines[0]:
        ratios = [np.mean([line["full_attention_ratio_by_layer"] for line in part], axis=0) for part in bins]
        curves["ratio_by_layer"] = [np.round(ratio, 4).tolist() for ratio in ratios]
    return curves


# ---- reporting ----


def report(name: str, done: Done, out: Path) -> tuple[str, list[tuple[str, str]]]:
    what = declared(name)
    lines = [line | dict(zip(("arm", "seed"), line["cell"], strict=True)) for line in done.values()]
    runs = {arm: sorted((r for r in lines if r["arm"] == arm), key=lambda run: run["seed"]) for arm in what["arms"]}
    runs = {arm: of for arm, of in runs.items() if of}
    if not runs:
        raise ConfigError(f"{out} has no results of '{name}': run without --report-only first, or name another --out")
    seeds = sorted({run["seed"] for run in lines})
    continued = {run["seed"]: run["continues"] for run in lines}
    bases = [continued[seed] for seed in seeds if continued[seed]]
    command = f"{name} --seeds {' '.join(map(str, seeds))}" + (f" --bases {' '.join(bases)}" if bases else "")
    minutes = sum(run["seconds"] for run in lines) / 60
    text = (
        f"`python -m scripts.compare {command}`: {len(lines)} runs, {minutes:.0f} minutes on one core of a shared "
        f"machine with {os.cpu_count()}. Mean ± standard deviation over the seeds.\n\n"
        f"{table(runs, what['columns'])}\n\n{verdicts(runs, what['claims'])}"
    )
    return text, [made for one in what["pictures"] for made in pictures.draw(out, runs, what, **one)]


def table(runs: Mapping[str, list[dict]], columns: Mapping[str, str]) -> str:
    shown = [key for key in columns if any(key in run["values"] for of in runs.values() for run in of)]
    rows = []
    for arm, of in runs.items():
        cells = [mean_and_spread([run["values"][key] for run in of if key in run["values"]]) for key in shown]
        diverged = sum(run["diverged"] is not None for run in of)
        rows.append([arm, f"{len(of)}, {diverged} diverged" if diverged else str(len(of)), *cells])
    return markdown(["", "seeds", *(columns[key] for key in shown)], rows)


def mean_and_spread(values: Sequence[float]) -> str:
    if not values:
        return ""
    spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.3f}{spread}"


def verdicts(runs: Mapping[str, list[dict]], claims: Sequence[Sequence[Any]]) -> str:
    """Each claim's difference, seed by seed; a run that diverged has an infinite loss."""
    rows = []
    for said, figures, higher, lower in claims:
        pair = []
        for arm, key in (higher, lower):
            of = runs.get(arm, [])
            pair.append({r["seed"]: math.inf if r["diverged"] else r["values"].get(key) for r in of})
        seeds = [s for s in pair[0] if pair[0][s] is not None and pair[1].get(s) is not None]
        if differences := [pair[0][seed] - pair[1][seed] for seed in seeds]:
            shown = ", ".join(f"{d:+.3f}" for d in differences)
            rows.append([said, figures, shown, verdict(differences, equal="the paper: equal" in said)])
    return markdown(["the paper says", "the paper's figures", "difference here, by seed", ""], rows)


def verdict(differences: Sequence[float], *, equal: bool = False) -> str:
    """Whether paired differences that a paper has above 0 are of one sign, and Student's interval of their mean is too.

    With `equal` the paper has no difference.
    """
    if len(differences) < 3 or any(math.isnan(d) for d in differences):
        return "too few seeds"
    same = all(d > 0 for d in differences) or all(d < 0 for d in differences)
    mean = statistics.mean(differences)
    count = len(differences)
    clear = math.isinf(mean) or abs(mean) > t_95(count) * statistics.stdev(differences) / math.sqrt(count)
    if not (same and clear):
        return "no clear difference, as in the paper" if equal else "no clear difference"
    if equal:
        return f"a difference, {mean:+.3f} on average"
    return "reproduced in direction" if mean > 0 else "not reproduced: the opposite"
