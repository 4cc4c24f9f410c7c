"""Patterns side by side: chosen by several methods at several budgets, scored on the same held-out needle prompts.

Prompts are scored teacher-forced: an answer is right if each of its tokens is the likeliest, which is what greedy
decoding would write. A pattern costs the KV cache of one sequence as long as the prompts, by the cache's formula.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from swa_jax.cache import cache_bytes
from swa_jax.checkpoint import write_json
from swa_jax.config import ConfigError
from swa_jax.evaluate.bootstrap import accuracy_interval, paired_bootstrap
from swa_jax.evaluate.examples import Example
from swa_jax.evaluate.nll import score_answers
from swa_jax.model import Decoder
from swa_jax.pattern import AttentionPattern
from swa_jax.report import compare_table as compare_table  # its earlier place
from swa_jax.select.methods import choose

Row = Mapping[str, Any]


def compare(
    model: Decoder,
    patterns: Sequence[tuple[str, AttentionPattern]],
    held_out: Sequence[Example],
    out: Path,
    *,
    methods: Sequence[str] = (),
    ratios: Sequence[float] = (),
    seeds: Sequence[int] = (),
    draw: Callable[[int], Sequence[Example]],
    sliding_window: int,
    num_sink_tokens: int = 0,
    eval_window: int | None = None,
    iterations: int = 100,
    batch_size: int = 8,
    settings: Mapping[str, Any],
    report: Callable[[str], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """Rows for `patterns`, then for each method, seed and ratio; written to `out` as they come, found there again.

    Args:
      held_out: the prompts that all patterns are scored on.
      out: a folder for `results.json` and, under `patterns/`, what the methods chose.
      ratios: shares of windowed KV heads, each reached by every method for every seed.
      draw: the prompts to choose by, of a seed.
      sliding_window, num_sink_tokens: of the windowed heads while choosing.
      eval_window: of the chosen patterns while scored; None for the same.
      settings: what else decides the results; `out` made with others is refused.
      report: called with a line for each row.

    Raises:
      ConfigError: results of other settings in `out`, or what a method refuses.
    """
    file = out / "results.json"
    (out / "patterns").mkdir(parents=True, exist_ok=True)
    rows = _known(file, settings)
    config = model.config
    length = max(len(e.prompt) + len(e.answer) for e in held_out)

    def measure(name: str, pattern: AttentionPattern, **more: Any) -> None:
        scored = score_answers(model, held_out, batch_size=batch_size, pattern=pattern)
        found = accuracy_interval(scored.exact.astype(float))
        rows.append(
            {
                "name": name, **more,
                "needle_accuracy": found.mean,
                "needle_interval": [found.low, found.high],
                "answer_nll": float(scored.nll.mean()),
                "kv_cache_bytes": cache_bytes(config, pattern, 1, length, 2),
                "full_layers": list(pattern.full_layers),
                "full_head_counts": list(pattern.full_head_counts),
                "exact": scored.exact.astype(int).tolist(),
            }
        )  # fmt: skip
        write_json(file, {"settings": dict(settings), "rows": rows})
        report(f"{_title(rows[-1])}: {100 * found.mean:.1f} % found")

    known = {_key(row) for row in rows}
    for name, pattern in patterns:
        if (name, None, None) not in known:
            measure(name, pattern)
    for seed in seeds:
        for method in methods:
            missing = [ratio for ratio in ratios if (method, ratio, seed) not in known]
            if not missing:
                continue
            chosen = choose(
                method, model, draw(seed), missing,
                sliding_window=sliding_window, num_sink_tokens=num_sink_tokens, batch_size=batch_size,
                iterations=iterations, seed=seed, evaluations=out / f"evaluations-{seed}.json",
            )  # fmt: skip
            for ratio, pattern in zip(missing, chosen, strict=True):
                pattern.to_json(out / "patterns" / f"{method}-{ratio:g}-seed-{seed}.json")
                if eval_window is not None:
                    pattern = dataclasses.replace(pattern, sliding_window=eval_window)
                measure(method, pattern, ratio=ratio, seed=seed)
    return rows


def _known(file: Path, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    if not file.exists():
        return []
    try:
        stored = json.loads(file.read_text())
        rows, found = list(stored["rows"]), dict(stored["settings"])
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{file} holds no results of `compare`: name another --out") from None
    now = json.loads(json.dumps(dict(settings)))
    for name in now:
        if found.get(name) != now[name]:
            raise ConfigError(
                f"{file} was made with {name} = {found.get(name)}, this is {now[name]}: name another --out, or "
                "remove that folder to start over"
            )
    return rows


def _key(row: Row) -> tuple[str, float | None, int | None]:
    return row["name"], row.get("ratio"), row.get("seed")


def _title(row: Row) -> str:
    return row["name"] if "ratio" not in row else f"{row['name']} at {row['ratio']:g}, seed {row['seed']}"


# ---- summing up ----


def summary(
    rows: Iterable[Row], against: str | None = None, ratios: Sequence[float] | None = None
) -> list[dict[str, Any]]:
    """A row for each pattern and each (method, ratio), over its seeds.

    Intervals are over prompts, of the mean over seeds; `by_seed` shows how far seeds differ. `gap` is the paired
    difference to `against` (default: the first method there is) at the same ratio and the same seeds.
    """
    groups: dict[tuple[str, float | None], list[Row]] = {}
    for row in rows:
        if ratios is None or row.get("ratio") in (None, *ratios):
            groups.setdefault((row["name"], row.get("ratio")), []).append(row)
    first = against or next((name for name, ratio in groups if ratio is not None), None)
    result = []
    for (name, ratio), some in groups.items():
        exact = np.array([row["exact"] for row in some], float)  # [seeds, N]
        found = accuracy_interval(exact.mean(0))
        one: dict[str, Any] = {
            "name": name, "ratio": ratio, "seeds": [row.get("seed") for row in some],
            "needle_accuracy": found.mean, "needle_interval": [found.low, found.high],
            "by_seed": exact.mean(1).tolist(),
            "answer_nll": float(np.mean([row["answer_nll"] for row in some])),
            "kv_cache_bytes": float(np.mean([row["kv_cache_bytes"] for row in some])),
        }  # fmt: skip
        other = groups.get((str(first), ratio)) if ratio is not None and name != first else None
        if other and one["seeds"] == [row.get("seed") for row in other]:
            base = np.array([row["exact"] for row in other], float)
            gap = paired_bootstrap(exact.mean(0), base.mean(0))
            one |= {"against": first, "gap": [gap.mean, gap.low, gap.high]}
            one["gap_by_seed"] = (exact.mean(1) - base.mean(1)).tolist()
        result.append(one)
    return result
