"""BOSCH against its ablations, the static rankings and the layer heuristics, on needles none of them chose by.

    python scripts/compare_heads.py runs/recall-checkpoint --out runs/heads --window 48

Every method windows the same number of KV heads, chosen on one set of needle prompts for each seed, and is scored on
another set, teacher-forced: all answer tokens right. Writes OUT/results.json, after every method, and prints a table.
Run again with the same OUT, it goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import get_args

import numpy as np

from swa_jax.checkpoint import load_model, write_json
from swa_jax.evaluate import accuracy_interval, needle_examples, paired_bootstrap
from swa_jax.select import MaskEvaluator, bosch, static_scores
from swa_jax.select.bosch import Variant
from swa_jax.select.heads import Heuristic, heuristic_mask, window_most_local
from swa_jax.select.static import LARGER_IS_LOCAL
from swa_jax.tokenizer import load_tokenizer

VARIANTS = {"bosch" if name == "bosch" else f"bosch-{name}": name for name in get_args(Variant)}
METHODS = (*VARIANTS, *LARGER_IS_LOCAL, *get_args(Heuristic))
HELD_OUT_SEED = 10**6  # no calibration seed comes near


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path, help="a checkpoint folder")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--window", type=int, required=True)
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.5, 0.75])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--examples", type=int, default=64, help="prompts to choose by")
    parser.add_argument("--held-out", type=int, default=200, help="prompts to score on")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--keys", type=int, default=1)
    parser.add_argument("--iterations", type=int, default=100, help="BOSCH's kappa")
    parser.add_argument("--batch-size", type=int, default=8)
    options = parser.parse_args()
    settings = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(options).items()
        if name not in ("out", "methods", "ratios", "seeds", "batch_size")
    }
    file = options.out / "results.json"
    options.out.mkdir(parents=True, exist_ok=True)
    results = json.loads(file.read_text()) if file.exists() else {"settings": settings, "exact": {}}
    if results["settings"] != settings:
        parser.error(f"{file} was made with {results['settings']}: name another --out")
    model, tokenizer = load_model(options.model, dtype="float32"), load_tokenizer(options.model)

    def needles(count: int, seed: int) -> list:
        return needle_examples(
            tokenizer, length=options.length, num_examples=count, num_keys=options.keys, seed=seed
        )

    def evaluator(examples: list, scores: Path | None = None) -> MaskEvaluator:
        return MaskEvaluator(
            model, examples, sliding_window=options.window, batch_size=options.batch_size, file=scores
        )

    held_out = evaluator(needles(options.held_out, HELD_OUT_SEED))

    def choose(method: str, ratio: float, seed: int) -> np.ndarray:
        if method in get_args(Heuristic):
            return heuristic_mask(method, *held_out.shape, ratio, seed)  # type: ignore[arg-type]
        examples = needles(options.examples, seed)
        if method in LARGER_IS_LOCAL:
            scores = static_scores(
                model, examples, method, sliding_window=options.window, batch_size=options.batch_size, seed=seed
            )  # fmt: skip
            return window_most_local(scores, ratio, larger_is_local=LARGER_IS_LOCAL[method])
        evaluate = evaluator(examples, options.out / f"evaluations-{seed}.json")
        try:
            return bosch(
                evaluate, ratio, variant=VARIANTS[method], iterations=options.iterations, seed=seed
            ).full
        finally:
            evaluate.save()

    everything = np.ones(held_out.shape, bool)
    wanted = [("full", 0.0, 0, everything), ("window", 1.0, 0, ~everything)]
    wanted += [(m, r, s, None) for r in options.ratios for s in options.seeds for m in options.methods]
    for method, ratio, seed, full in wanted:
        key = f"{method} {ratio} {seed}"
        if key not in results["exact"]:
            full = choose(method, ratio, seed) if full is None else full
            exact = held_out.answers(full).exact.astype(int).tolist()
            results["exact"][key] = {"full": full.astype(int).tolist(), "exact": exact}
            write_json(file, results)
            print(f"{key}: {np.mean(exact):.1%}, {int((~full).sum())} heads windowed", flush=True)
    for ratio in options.ratios:
        _table(results["exact"], ratio, options.seeds, options.methods)


def _table(results: dict, ratio: float, seeds: list[int], methods: list[str]) -> None:
    """Means over seeds and prompts; differences to BOSCH are paired by prompt."""

    def exact(method: str) -> np.ndarray:  # [seeds, prompts]
        return np.array([results[f"{method} {ratio} {seed}"]["exact"] for seed in seeds])

    print(f"\n| ratio {ratio} | right (95 % interval) | by seed | BOSCH - it (95 % interval over prompts) |")
    print("|---|---|---|---|")
    for method in methods:
        values = exact(method)
        mean = accuracy_interval(values.mean(0))
        by_seed = ", ".join(f"{100 * v:.0f}" for v in values.mean(1))
        gap = ""
        if "bosch" in methods and method != "bosch":
            found = paired_bootstrap(exact("bosch").mean(0), values.mean(0))
            gap = f"{100 * found.mean:.1f} [{100 * found.low:.1f}, {100 * found.high:.1f}]"
        print(
            f"| {method} | {100 * mean.mean:.1f} [{100 * mean.low:.1f}, {100 * mean.high:.1f}] | {by_seed} | {gap} |"
        )


if __name__ == "__main__":
    main()
