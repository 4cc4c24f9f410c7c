"""Patterns side by side: chosen by several methods at several budgets, scored on the same held-out needle prompts.

Prompts are scored teacher-forced: an answer is right if every token of its value (`Example.value`) is the likeliest.
A pattern costs the KV cache of one sequence as long as the prompts, by the cache's formula.

A row belongs to content and not to names: to the weights, the prompts and the pattern that was scored, or to the
prompts and options that a method chose by. What was scored on other content stays in the file, but is not shown.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from swa_jax.base.errors import ConfigError
from swa_jax.base.estimates import accuracy_interval, bootstrap, paired_bootstrap, paired_score
from swa_jax.base.files import digest, read_document, tell_found, write_json
from swa_jax.evaluate.examples import Example
from swa_jax.evaluate.nll import score_answers
from swa_jax.model.cache import cache_bytes
from swa_jax.model.decoder import Decoder
from swa_jax.model.pattern import AttentionPattern
from swa_jax.model.window import OWN, Window
from swa_jax.select.content import content_key, examples_sum
from swa_jax.select.methods import check_model, choose, find_method
from swa_jax.select.separation import By, doubt
from swa_jax.select.task import Task, refuse_nope

Row = Mapping[str, Any]


@dataclasses.dataclass
class PatternComparison:
    """`PatternComparison(...)(patterns)`: the rows of these patterns, and of what methods choose by other prompts.

    Attributes:
      held_out: the prompts that all patterns are scored on; draw: those that methods choose by, of a seed.
      out: a folder for `results.json` and `patterns/`; what methods chose there before, with the same settings on the
        same content, comes with the rows.
      settings: how the prompts came about, plain JSON values.
      ratios: shares of windowed KV heads, each reached by every method for every seed.
      window: of what methods choose, and while they choose; what it does not give is the model's own, and a size is
        needed with `methods` alone. eval_window: the size while scored; None: the same.
      iterations, by: BOSCH's; force: let methods choose also where the prompts do not tell `full` and `window` apart.
      weights: the sum of the weights, as in `content_key`.
      refused: the methods that refused to choose, which was reported; a model that one cannot take is an error at once.
      report: called with a line for each row; progress: with (patterns scored, those to be scored), without what is
        found in `out`, and while a method chooses also with a text that says how far it has come.
    """

    model: Decoder
    held_out: Sequence[Example]
    out: Path
    draw: Callable[[int], Sequence[Example]]
    settings: Mapping[str, Any]
    methods: Sequence[str] = ()
    ratios: Sequence[float] = ()
    seeds: Sequence[int] = ()
    window: Window = OWN
    eval_window: int | None = None
    iterations: int = 100
    by: By = "answers"
    batch_size: int = 8
    weights: str | None = None
    force: bool = False
    report: Callable[[str], None] = lambda _: None
    progress: Callable[..., None] = lambda *_: None

    def __post_init__(self) -> None:
        if self.methods:
            refuse_nope(self.model.pattern)
        for method in self.methods:
            check_model(method, self.model.config)
        self.window = self.window.of(self.model.pattern.window, needed=bool(self.methods))
        self._scored_on = content_key(self.model, self.held_out, weights=self.weights)
        named = {"eval_window": self.eval_window, "iterations": self.iterations, "by": self.by}
        self._choice = {"sliding_window": None, **self.window.fields, **named}
        self._done = self._total = 0
        self.refused: list[str] = []

    def __call__(self, patterns: Sequence[tuple[str, AttentionPattern]]) -> list[dict[str, Any]]:
        """Rows for `patterns`, then for each method, seed and ratio; written to `out` as they come, found there again.

        Raises:
          ConfigError: `out` holds something else; or the prompts tell nothing.
        """
        scored_on, choice = self._scored_on, self._choice
        results = self._results = _Rows(self.out / "results.json", digest([scored_on, choice, dict(self.settings)]))
        draws = {seed: self.draw(seed) for seed in (self.seeds if self.methods else ())}
        scoring = [scored_on, self.window.fields, self.by]
        masks = {seed: digest([*scoring, examples_sum(drawn)]) for seed, drawn in draws.items()}
        keys = {name: digest([scored_on, _content(pattern)]) for name, pattern in patterns}
        chosen_keys = {
            (method, ratio, seed): digest([masks[seed], choice, method, ratio, seed])
            for seed, method, ratio in itertools.product(draws, self.methods, self.ratios)
        }
        every = {*keys.values(), *chosen_keys.values()}
        missing = {key for key in every if results.find(key) is None}
        self._done, self._total = 0, len(missing)
        tell_found(results.file, len(every) - self._total, len(every), "patterns", self.report)
        rows = [
            results.find(keys[name], name=name) or self._score(keys[name], pattern, pattern, name=name)
            for name, pattern in patterns
        ]
        refuse = bool(self.methods) and not self.force
        _check_separation({row["name"]: row for row in rows}, self.by, refuse, self.report)
        for seed, drawn in draws.items():
            task = Task(self.model, drawn, self.window, self.batch_size, seed, weights=self.weights, force=self.force)
            for method in self.methods:
                wanted = {ratio: key for ratio in self.ratios if (key := chosen_keys[method, ratio, seed]) in missing}
                if wanted:
                    self._try(method, task, wanted)
        results.write_patterns(self.out / "patterns")
        results.note_others(self.report)
        return [*rows, *results.chosen]

    def _score(self, key: str, pattern: AttentionPattern, chosen: AttentionPattern, **names: Any) -> dict[str, Any]:
        """The row of `pattern`, which `chosen` is under the window of scoring."""
        scores = _score(self.model, self.held_out, pattern, self.batch_size)
        about = {"scored_on": self._scored_on, "settings": dict(self.settings) | self._choice}
        row = names | scores | {"pattern": json.loads(chosen.to_json()), **about}
        self.report(f"{_title(row)}: {100 * row['needle_accuracy']:.1f} % found")
        self._done += 1
        self.progress(self._done, self._total)
        return self._results.add(key, row)

    def _try(self, method: str, task: Task, keys: Mapping[float, str]) -> None:
        """Let a method choose; what it refuses is told, and ends no other's work."""
        try:
            self._choose(method, task, keys)
        except ConfigError as error:
            self.refused.append(method)
            self._total -= len(keys)
            self.report(f"{method}, seed {task.seed}, chooses nothing: {error}")

    def _choose(self, method: str, task: Task, keys: Mapping[float, str]) -> None:
        """Let a method choose at each ratio of `keys`, and score that, under `eval_window` if that is given."""
        row = find_method(method)
        task.file = self.out / "scores.jsonl" if row.keeps else None
        says = f"{method}, seed {task.seed} chooses"
        task.progress = lambda step, steps: self.progress(self._done, self._total, f"{says}: {step}/{steps}")
        own = {name: self._choice[name] for name in ("iterations", "by") if name in row.options}
        for (ratio, key), pattern in zip(keys.items(), choose(method, task, list(keys), **own), strict=True):
            scored = pattern.with_window(Window(self.eval_window))
            self._score(key, scored, pattern, name=method, ratio=ratio, seed=task.seed)


class _Rows:
    """The rows of `results.json`, found by their content; none is ever taken away."""

    def __init__(self, file: Path, comparison: str):
        self.file, self.comparison = file, comparison
        file.parent.mkdir(parents=True, exist_ok=True)
        self._rows = read_document(file, "results of `compare`", "rows", "name another --out").get("rows", [])

    @property
    def chosen(self) -> list[dict[str, Any]]:
        """What methods chose in this comparison; the latest, where the prompts of a seed have changed since."""
        rows = [row for row in self._rows if row.get("comparison") == self.comparison and "ratio" in row]
        return list({(row["name"], row["ratio"], row["seed"]): row for row in rows}.values())

    def note_others(self, report: Callable[[str], None]) -> None:
        """Say how many rows are of other content."""
        others = sum(row.get("comparison") != self.comparison for row in self._rows)
        if others:
            report(f"{self.file} also holds {others} rows of other weights, prompts or options: not shown")

    def find(self, key: str, **names: Any) -> dict[str, Any] | None:
        """The row of this content, under the names it has in this comparison."""
        same = [row for row in self._rows if row.get("key") == key]
        here = names | {"comparison": self.comparison}
        exact = next((row for row in same if row | here == row), None)
        return exact or (self.add(key, same[0] | names) if same else None)

    def add(self, key: str, row: dict[str, Any]) -> dict[str, Any]:
        row = row | {"key": key, "comparison": self.comparison}
        self._rows.append(row)
        write_json(self.file, {"rows": self._rows})
        return row

    def write_patterns(self, folder: Path) -> None:
        """What methods chose in this comparison, in place of what the same names stood for in another."""
        folder.mkdir(exist_ok=True)
        for row in self.chosen:
            name = f"{row['name']}-{row['ratio']:g}-seed-{row['seed']}.json"
            AttentionPattern.from_json(json.dumps(row["pattern"])).to_json(folder / name)


def _check_separation(rows: Mapping[str, Row], by: By, refuse: bool, report: Callable[[str], None]) -> None:
    """Say that the prompts tell nothing, if so, or raise `ConfigError` before methods choose by such prompts."""
    if not {"full", "window"} <= rows.keys():
        return
    figure = "right" if by == "answers" else "losses"
    if (found := doubt(rows["full"][figure], rows["window"][figure], by)) is None:
        return
    if refuse:
        raise ConfigError(
            f"{found.reason}: a choice by such prompts means nothing; {found.advice}, or go on with --force"
        )
    report(f"{found.reason}: {found.advice}")


def _score(model: Decoder, held_out: Sequence[Example], pattern: AttentionPattern, batch_size: int) -> dict[str, Any]:
    scored = score_answers(model, held_out, batch_size=batch_size, pattern=pattern)
    found = accuracy_interval(scored.right.astype(float))
    length = max(len(e.prompt) + len(e.answer) for e in held_out)
    return {
        "needle_accuracy": found.mean,
        "needle_interval": [found.low, found.high],
        "answer_nll": float(scored.nll.mean()),
        "kv_cache_bytes": cache_bytes(model.config, pattern, 1, length, 2),
        "full_layers": list(pattern.full_layers),
        "full_head_counts": list(pattern.full_head_counts),
        "right": scored.right.astype(int).tolist(),
        "losses": scored.nll.tolist(),
    }


def _content(pattern: AttentionPattern) -> dict[str, Any]:
    """What a pattern computes; how it came about does not count, nor does a window that no layer has."""
    content = dataclasses.asdict(pattern)
    del content["provenance"]
    return {"layer_types": content["layer_types"]} if pattern.is_full else content


def _title(row: Row) -> str:
    return row["name"] if "ratio" not in row else f"{row['name']} at {row['ratio']:g}, seed {row['seed']}"


# ---- summing up ----


def summary(
    rows: Iterable[Row], against: str | None = None, ratios: Sequence[float] | None = None
) -> list[dict[str, Any]]:
    """A row for each pattern and each (method, ratio), over its seeds.

    Intervals are over prompts, of the mean over seeds; `by_seed` shows how far seeds differ. `gap` and `loss_gap` are
    the paired differences to `against` (default: the first method there is) at the same ratio and the same seeds.
    """
    groups: dict[tuple[str, float | None], list[Row]] = {}
    for row in rows:
        if ratios is None or row.get("ratio") in (None, *ratios):
            groups.setdefault((row["name"], row.get("ratio")), []).append(row)
    first = against or next((name for name, ratio in groups if ratio is not None), None)
    result = []
    for (name, ratio), members in groups.items():
        exact = np.array([row["right"] for row in members], float)  # [seeds, N]
        losses = np.array([row["losses"] for row in members], float)
        found, loss = accuracy_interval(exact.mean(0)), bootstrap(losses.mean(0))
        one: dict[str, Any] = {
            "name": name,
            "ratio": ratio,
            "seeds": [row.get("seed") for row in members],
            "needle_accuracy": found.mean,
            "needle_interval": found.interval,
            "by_seed": exact.mean(1).tolist(),
            "answer_nll": loss.mean,
            "answer_nll_interval": loss.interval,
            "kv_cache_bytes": float(np.mean([row["kv_cache_bytes"] for row in members])),
        }
        if ratio is not None:  # what choosing cost, the mean over seeds
            costs = [row["pattern"]["provenance"] for row in members]
            one |= {name: float(np.mean([cost[name] for cost in costs])) for name in ("tokens", "flops", "seconds")}
        other = groups.get((str(first), ratio)) if ratio is not None and name != first else None
        if other and one["seeds"] == [row.get("seed") for row in other]:
            base = np.array([row["right"] for row in other], float)
            base_losses = np.array([row["losses"] for row in other], float)
            gap = paired_score(exact.mean(0), base.mean(0))
            loss_gap = paired_bootstrap(losses.mean(0), base_losses.mean(0))
            one |= {"against": first, "gap": list(gap), "loss_gap": list(loss_gap)}
            one["gap_by_seed"] = (exact.mean(1) - base.mean(1)).tolist()
        result.append(one)
    return result
