"""What `swa-jax compare` found, contrast by contrast: is one method above another, and could these prompts tell?

    python -m scripts.compare contrasts runs/compare-chains --docs docs/data/methods.md

It reads `results.json` of that folder and prints two tables: each method's score at each share of windowed KV heads
and what choosing costs, and the contrasts that the papers claim, or that we do. With `--loss` the score is the loss of
the answers, where less is better, in place of how many are right. A contrast is paired by prompt, over the seeds that
both have. Beside its difference stands the smallest one that so many prompts would have shown in four cases of five
(the power).
Several folders are several models, asked the same prompts; each must have one seed, which stands for its model.
With `--margin`, of one folder, it prints instead which choices are not inferior to full attention by so many points.
The place in a document is named by the folders: `<!-- contrasts: compare-chains -->`.
"""

import argparse
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from scripts.compare.runner import ROOT, Comparison, markdown, told
from swa_jax.base.errors import ConfigError
from swa_jax.base.estimates import (
    Estimate,
    accuracy_interval,
    bootstrap,
    detectable,
    paired_accuracy,
    paired_bootstrap,
    paired_score,
)
from swa_jax.base.files import read_json


class Measure(NamedTuple):
    """What is compared: a number of each prompt.

    Attributes:
      field: its name in a row of results.json; words: the table's own for it; unit: of a difference.
      better: 1 where more is better, -1 where less is; scale, form: how it is printed.
      ceiling: means above it in both methods leave nothing to compare.
    """

    field: str
    words: str
    unit: str
    better: int
    scale: float
    form: str
    ceiling: float

    def mean(self, values: np.ndarray) -> Estimate:
        """Over prompts [N]."""
        return accuracy_interval(values) if self is FOUND else bootstrap(values)

    def paired(self, better: np.ndarray, worse: np.ndarray) -> Estimate:
        """How much better one is than the other."""
        return paired_accuracy(better, worse) if self is FOUND else paired_bootstrap(worse, better)

    def told(self, estimate: Estimate, sign: str = "") -> str:
        return told(estimate, self.form, sign, self.scale)


FOUND = Measure("right", "Answers right, %", "points", 1, 100, ".0f", 0.97)
LOSS = Measure("losses", "Loss of the answers, nats a token", "nats", -1, 1, ".2f", np.inf)


class Claim(NamedTuple):
    """`better` is above `worse`; by whom."""

    source: str
    better: str
    worse: str


_RANKINGS = ("dcam", "apl", "proxy", "qada", "razor", "fisher")
CLAIMS = (
    *(Claim("BOSCH, Table 1", "bosch", ranking) for ranking in _RANKINGS),
    *(Claim("BOSCH, Table 1", "bosch", other) for other in ("interleave", "begin-middle-end", "random")),
    *(Claim("BOSCH, Table 1", "bosch", other) for other in ("bosch-single", "bosch-layer")),
    *(Claim("NLL, Table 1", "nll", other) for other in ("interleave", "light-transfer")),
    *(Claim("ours", "nll-greedy", other) for other in ("nll", "interleave", "light-transfer")),
    *(Claim("ours", "bosch-swaps", other) for other in ("bosch", "fisher", "nll-greedy")),
    *(Claim("ours", "kl", other) for other in ("fisher", "razor", "qada", "patching", "nll-gradient", "kl-layers")),
    *(Claim("ours", "nll-heads", other) for other in ("kl", "razor", "nll-gradient")),
    *(Claim("ours", "nll-gradient", other) for other in ("nll", "light-transfer", "interleave", "random")),
    Claim("ours", "kl-layers", "nll-gradient"),
    Claim("ours", "patching-gradient", "patching"),
    Claim("ours", "razor", "fisher"),
    Claim("HydraHead", "patching", "kl-layers"),
    Claim("ours", "fisher-text", "fisher"),
)
Scores = Mapping[tuple[str, float], Mapping[int, np.ndarray]]  # by method and ratio: by seed [N]


def latest_rows(file: Path) -> list[dict[str, Any]]:
    """The rows of the latest comparison that a file holds. Raises `ConfigError` where no method chose anything."""
    rows = read_json(file)["rows"]
    latest = next((row["comparison"] for row in reversed(rows) if "ratio" in row), None)
    if latest is None:
        raise ConfigError(f"{file} has no choice of a method: name one to `swa-jax compare`")
    return [row for row in rows if row["comparison"] == latest]


def read_scores(file: Path, measure: Measure) -> tuple[Scores, dict[str, Any]]:
    """Scores by method and ratio, and the rows of `--pattern full` and the like, by name."""
    rows = latest_rows(file)
    scores: dict[tuple[str, float], dict[int, np.ndarray]] = {}
    plain = {row["name"]: row for row in rows if "ratio" not in row}
    for row in rows:
        if "ratio" in row:
            scores.setdefault((row["name"], row["ratio"]), {})[row["seed"]] = np.array(row[measure.field])
    return scores, plain


def read_models(folders: Sequence[Path], measure: Measure) -> tuple[Scores, dict[str, list[float]]]:
    """As `read_scores`, with a model in place of each seed where there are several; of `full` and the like all means.

    Raises:
      ConfigError: one of several folders has more than one seed, or other prompts.
    """
    every = [read_scores(folder / "results.json", measure) for folder in folders]
    plain: dict[str, list[float]] = {}
    for _, rows in every:
        for name, row in rows.items():
            plain.setdefault(name, []).append(float(np.mean(row[measure.field])))
    if len(every) == 1:
        return every[0][0], plain
    if len({row["scored_on"]["examples"] for _, rows in every for row in rows.values()}) != 1:
        raise ConfigError("the models were asked different prompts: give `swa-jax compare` the same settings")
    scores: dict[tuple[str, float], dict[int, np.ndarray]] = {}
    for model, (own, _) in enumerate(every):
        for cell, by_seed in own.items():
            if len(by_seed) > 1:
                raise ConfigError(f"{folders[model]} has {len(by_seed)} seeds; of several models each needs one")
            (scores.setdefault(cell, {})[model],) = by_seed.values()
    return scores, plain


def costs(folders: Sequence[Path]) -> dict[str, str]:
    """What each method's dearest choice cost: operations and seconds, the mean over seeds or models."""
    every: dict[str, dict[Any, tuple[float, float]]] = {}
    for folder in folders:
        for row in latest_rows(folder / "results.json"):
            said = row.get("pattern", {}).get("provenance", {})
            if "ratio" in row and "flops" in said:
                by_seed = every.setdefault(row["name"], {})
                cost, key = (said["flops"], said["seconds"]), (folder, row["seed"])
                by_seed[key] = max(cost, by_seed.get(key, cost))
    means = {name: np.mean(list(by_seed.values()), 0) for name, by_seed in every.items()}
    return {name: f"{flops / 1e12:.3g} TFLOP, {seconds:.0f} s" for name, (flops, seconds) in means.items()}


def mean_of(by_seed: Mapping[int, np.ndarray], measure: Measure) -> Estimate:
    """Over prompts, of the mean over seeds."""
    return measure.mean(np.mean(list(by_seed.values()), 0))


def contrast(
    better: Mapping[int, np.ndarray], worse: Mapping[int, np.ndarray], measure: Measure
) -> tuple[Estimate, list[Estimate]]:
    """By how much one is better, paired: of the means over the seeds that both have, and of each seed.

    Where no prompt tells the two apart, the interval is the first seed's.
    """
    seeds = sorted(set(better) & set(worse))
    first, second = (np.array([one[seed] for seed in seeds]) for one in (better, worse))
    by = [measure.paired(a, b) for a, b in zip(first, second, strict=True)]
    whole = paired_score(measure.better * first.mean(0), measure.better * second.mean(0))
    return (by[0] if np.ptp(first.mean(0) - second.mean(0)) == 0 else whole), by


def verdict(whole: Estimate, seeds: Sequence[Estimate], both: Sequence[Estimate], ceiling: float, of: str) -> str:
    """As docs/data/methods.md defines it."""
    low, high = whole.interval or (0, 0)
    if all(one.low is not None and one.low > 0 for one in seeds):
        return "reproduced"
    if low > 0:
        return f"in {sum(one.mean > 0 for one in seeds)} of {len(seeds)} {of}s"
    if high < 0:
        return "the other way"
    return "both at the ceiling" if min(one.mean for one in both) > ceiling else "a tie"


def tables(
    scores: Scores, plain: Mapping[str, Sequence[float]], costs: Mapping[str, str], measure: Measure, of: str = "seed"
) -> str:
    """Both tables as Markdown; `of` says what the scores of a method are by."""
    ratios = sorted({ratio for _, ratio in scores})
    methods = list(dict.fromkeys(name for name, _ in scores))
    some = next(iter(scores.values()))
    n, seeds = len(next(iter(some.values()))), max(len(one) for one in scores.values())

    def all_of(numbers: Iterable[float], sign: str = "") -> str:
        return ", ".join(f"{measure.scale * one:{sign}{measure.form}}" for one in numbers)

    plainly = "; ".join(f"`{name}`: {all_of(row)}" for name, row in plain.items())
    said = f"{measure.words}: the mean over {seeds} {of}s with its 95 % interval over {n} prompts, then each {of}."
    first = []
    for method in methods:
        cells = []
        for ratio in ratios:
            by_seed = scores.get((method, ratio))
            each = all_of(values.mean() for _, values in sorted((by_seed or {}).items()))
            cells.append(f"{measure.told(mean_of(by_seed, measure))}: {each}" if by_seed else "")
        first.append([method, *cells, *([costs.get(method, "")] if costs else [])])
    rows = []
    for claim in CLAIMS:
        for ratio in ratios:
            pair = [scores.get((name, ratio)) for name in (claim.better, claim.worse)]
            if pair[0] is None or pair[1] is None or not set(pair[0]) & set(pair[1]):
                continue
            whole, by = contrast(pair[0], pair[1], measure)
            found = verdict(whole, by, [mean_of(one, measure) for one in pair if one], measure.ceiling, of)
            cells = [
                claim.source,
                f"{claim.better} above {claim.worse}",
                f"{100 * ratio:g} %",
                measure.told(whole, "+"),
            ]
            seen = f"{measure.scale * detectable(whole):{measure.form}}"
            rows.append([*cells, all_of((one.mean for one in by), "+"), seen, found])
    shares = [f"{100 * ratio:g} %" for ratio in ratios]
    scored = markdown(["windowed KV heads", *shares, *(["choosing costs"] if costs else [])], first)
    head = ["claimed by", "claim", "windowed", f"difference, {measure.unit}", f"by {of}", "would have been seen from"]
    return f"{said} {plainly}.\n\n{scored}\n\n{markdown([*head, 'verdict'], rows)}"


def against_full(file: Path, margin: float) -> str:
    """Each choice beside full attention, paired by prompt, with its share of the KV cache, as a Markdown table.

    A choice is not inferior by a margin (in points) if the whole interval of the difference is above minus the margin.

    Raises:
      ConfigError: the file has no scores of full attention, or no choice of a method.
    """
    scores, plain = read_scores(file, FOUND)
    if "full" not in plain:
        raise ConfigError(f"{file} has no scores of full attention: give `swa-jax compare` a new --out")
    full = {seed: np.array(plain["full"]["right"]) for by_seed in scores.values() for seed in by_seed}
    bytes_of = {(row["name"], row.get("ratio")): row["kv_cache_bytes"] for row in latest_rows(file)}
    n, seeds = len(plain["full"]["right"]), len(full)
    of_choosing = f"{n} prompts, {seeds} {'seed' if seeds == 1 else 'seeds'} of choosing"
    head = ["method", "windowed KV heads", "KV cache, % of full", "difference to full, points"]
    head += ["would have been seen from", f"against a margin of {margin:g}"]
    rows = []
    for (method, ratio), by_seed in scores.items():
        whole, _ = contrast(by_seed, full, FOUND)
        low, high = whole.interval or (0, 0)
        found = "inferior" if 100 * high < -margin else "not inferior" if 100 * low > -margin else "cannot be told"
        share = bytes_of[method, ratio] / bytes_of["full", None]
        cells = [method, f"{100 * ratio:g} %", f"{100 * share:.1f}", told(whole, ".1f", "+")]
        rows.append([*cells, f"{100 * detectable(whole):.1f}", found])
    return f"{of_choosing}; full attention answers {told(mean_of(full, FOUND))} %.\n\n{markdown(head, rows)}"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("results", type=Path, nargs="+", help="the folders that `swa-jax compare --out` wrote")
    parser.add_argument("--loss", action="store_true", help="compare losses of answers, not how many are right")
    parser.add_argument("--margin", type=float, help="points: only which choices are not inferior to full attention")


def comparison(options: argparse.Namespace) -> Comparison:
    if options.margin is not None and (len(options.results) > 1 or options.docs or options.loss):
        raise ConfigError("--margin takes one folder, and neither --docs nor --loss: it prints a table of its own")

    def report() -> str:
        if options.margin is not None:
            return against_full(options.results[0] / "results.json", options.margin)
        measure, of = LOSS if options.loss else FOUND, "model" if len(options.results) > 1 else "seed"
        text = tables(*read_models(options.results, measure), costs(options.results), measure, of)
        return f"Made at revision {revision()}.\n\n{text}"

    names = " ".join(folder.name for folder in options.results)
    return Comparison(f"contrasts: {names}", [], lambda done: (report(), []))


def revision() -> str:
    """Of this repository, in brief."""
    told = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return told.stdout.strip() or "unknown"
