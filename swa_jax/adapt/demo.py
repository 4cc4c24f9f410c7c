"""`swa-jax demo`: the bundled model through the whole path, from import to a report, in minutes on two CPU cores.

Every stage is the one a user's own model would go through: import from Hugging Face format, layer selection,
evaluation of each pattern by generation, and a few steps of routed training.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from swa_jax.adapt.demo_tasks import CALIBRATION_SEED, Questions, chain_questions, needle_questions
from swa_jax.checkpoint.folder import load_model
from swa_jax.checkpoint.named import bundled, model_folder
from swa_jax.data.tokenizer import Tokenizer, load_tokenizer
from swa_jax.errors import ConfigError
from swa_jax.estimates import paired_score
from swa_jax.evaluate.measure import measure_pattern, score_by_depth
from swa_jax.files import write_json
from swa_jax.model.config import ModelConfig
from swa_jax.model.decoder import Decoder
from swa_jax.model.pattern import AttentionPattern
from swa_jax.report import (
    accuracy_memory_chart,
    layer_scores_chart,
    needle_heat_map,
    pattern_table,
    routed_cpt_chart,
    table_console,
)
from swa_jax.report.tables import ANSWERS_RIGHT
from swa_jax.select import NLLScores, greedy_pattern, nll_pattern
from swa_jax.select.methods import choose
from swa_jax.select.nll import LayerScorer
from swa_jax.settings import load_config
from swa_jax.train.loop import TrainConfig, train

SINK_TOKENS = 4  # of the pattern `streaming`
NLL_EXAMPLES = 16  # of those measured, how many are also scored for answer NLL (one batch)
BATCH = 16
BOSCH_ITERATIONS = 3  # masks tried for each layer: a tenth of what a careful choice takes
BUDGETS = (2, 4)  # one layer, or one KV head, in so many is full
CHOICES = ("nll", "nll-greedy", "bosch")
COMPARED = tuple(f"{choice}-1-in-{n}" for n in BUDGETS for choice in CHOICES)  # with interleaved layers
WITH_FA_DECODE = ("window", "interleave-1-in-2", "nll-1-in-2", "nll-greedy-1-in-2")
RECIPES = ("full", "window", "streaming", "interleave-1-in-2", "interleave-1-in-4")
NOTES = (
    "Answers are generated, greedily, and compared as text; the interval of needle_accuracy is Wilson's, 95 %. "
    "answer_nll is teacher-forced (nats a token).",
    f"Times exclude compilation: prefill_seconds is a prompt's share of a batch of {BATCH}, "
    "decode_tokens_per_second is of the whole batch. kv_cache_bytes is a sequence's share of the allocated cache.",
    "Layers and heads were chosen by examples of another seed, without full-attention decode; the +fa-decode rows keep "
    "the same layers. nll scores each layer once, as the paper does; nll-greedy scores the others again after each one "
    "that it has chosen.",
)
MARK = ".swa-jax-demo"  # says that a folder is the demo's own, to be written anew


def run_demo(out: str | Path = "runs/demo", model_dir: str | Path | None = None) -> dict[str, Any]:
    """Import, select, evaluate, train a little; write `report.json` and pictures to `out`, and return the report.

    Args:
      out: a new folder, or one of an earlier demo, whose results are replaced.
      model_dir: another model, by any of its names (`checkpoint.named`); None: `chains`.

    Raises:
      ConfigError: `out` holds something else, or the model is too shallow or too deep for the demo's context.
    """
    begin = time.perf_counter()
    console = table_console()
    out = Path(out)
    _claim(out)

    def stage(text: str) -> None:
        console.print(f"[dim]{time.perf_counter() - begin:5.0f} s[/dim]  {text}")

    stage("importing the model")
    folder = model_folder(model_dir or "chains")
    cpt = cpt_config(out, folder, model_dir is None)  # now, so that a mistake in it does not show after minutes only
    # Stored in bf16; a CPU multiplies f32 faster.
    model, tokenizer = load_model(folder, dtype=jnp.float32), load_tokenizer(folder)
    asked = needle_questions(tokenizer, model.config) if model_dir else chain_questions(tokenizer)

    layers = model.config.num_hidden_layers
    stage(f"scoring each of {layers} layers on {len(asked.calibration)} other examples (NLL-guided)")
    scorer = LayerScorer(
        model,
        asked.calibration,
        sliding_window=asked.sliding_window,
        num_sink_tokens=0,
        full_attention_decode=False,  # as the patterns run
        batch_size=BATCH,
    )
    rounds = scorer.greedy(max(1, layers // min(BUDGETS)))
    scores = rounds[0]
    stage("choosing KV heads (BOSCH)")
    heads, left_out = bosch_patterns(model, asked)
    patterns = demo_patterns(model.config, rounds, heads, asked)
    rows, by_example = _measure(model, tokenizer, patterns, asked, stage)

    stage("routed training (SwiAttn) from the same model")
    train(cpt, quiet=True)
    steps = [json.loads(line) for line in (Path(cpt.output) / "metrics.jsonl").read_text().splitlines()]
    verdicts = {name: compare(name, by_example) for name in COMPARED if name in by_example}
    notes = [*(sentence for sentence, _ in verdicts.values()), *left_out, *asked.notes, *NOTES]
    report: dict[str, Any] = {
        "rows": rows,
        "routed_cpt": steps,
        "selection": {
            "scores": scores.mean.tolist(),
            "intervals": [estimate.interval for estimate in scores.intervals()],
            "nll-1-in-4": list(patterns["nll-1-in-4"].full_layers),
            "nll-1-in-2": list(patterns["nll-1-in-2"].full_layers),
            "nll-greedy-1-in-2": list(patterns["nll-greedy-1-in-2"].full_layers),
        },
        "nll_beats_interleave": verdicts["nll-greedy-1-in-2"][1],
        "beats_interleave": {name: beats for name, (_, beats) in verdicts.items()},
        "notes": notes,
        "seconds": round(time.perf_counter() - begin, 1),
    }
    write_json(out / "report.json", report)
    _pictures(out, report, by_example, asked, scores, patterns["nll-1-in-2"])
    console.print(pattern_table(rows, ANSWERS_RIGHT))
    for note in notes:
        console.print(f"- {note}")
    console.print(routed_verdict(steps))
    console.print(f"Report and pictures: {out}/ ({time.perf_counter() - begin:.0f} s)")
    return report


def _measure(
    model: Decoder,
    tokenizer: Tokenizer,
    patterns: Mapping[str, AttentionPattern],
    asked: Questions,
    stage: Callable[[str], None],
) -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
    """A row of the report for every pattern, and its scores of the examples [N]."""
    rows: list[dict[str, Any]] = []
    by_example: dict[str, np.ndarray] = {}
    for number, (name, pattern) in enumerate(patterns.items(), start=1):
        stage(f"pattern {number} of {len(patterns)}: {name}")
        row, answers = measure_pattern(
            name,
            model.with_pattern(pattern),
            tokenizer,
            asked.examples,
            max_new_tokens=asked.max_new_tokens,
            batch_size=BATCH,
            num_nll_examples=NLL_EXAMPLES,
        )
        by_example[name] = answers.scores
        rows.append(row | {"by_kind": score_by_depth(answers.scores, len(asked.kinds))})
    return rows, by_example


def routed_verdict(steps: Sequence[Mapping[str, Any]], ends: int = 5) -> str:
    """The first and the last few steps of the routed training, in a sentence."""

    def mean(name: str, part: Sequence[Mapping[str, Any]]) -> float:
        return float(np.mean([step[name] for step in part]))

    first, last = steps[:ends], steps[-ends:]
    return (
        f"- Routed training: loss {mean('loss', first):.2f} to {mean('loss', last):.2f} in {len(steps)} steps, tokens "
        f"that take full attention {mean('full_attention_ratio', first):.0%} to "
        f"{mean('full_attention_ratio', last):.0%} (means of {ends} steps)."
    )


def bosch_patterns(model: Decoder, asked: Questions) -> tuple[dict[str, AttentionPattern], list[str]]:
    """BOSCH's heads at two budgets by name, or none of them and a sentence that says why."""
    try:
        found = choose(
            "bosch",
            model,
            asked.calibration,
            [1 - 1 / n for n in BUDGETS],
            sliding_window=asked.sliding_window,
            batch_size=BATCH,
            iterations=BOSCH_ITERATIONS,
            seed=CALIBRATION_SEED,
        )
    except ConfigError as error:
        return {}, [f"BOSCH was left out: {error}."]
    return {f"bosch-1-in-{n}": pattern for n, pattern in zip(BUDGETS, found, strict=True)}, []


def demo_patterns(
    config: ModelConfig, rounds: Sequence[NLLScores], heads: Mapping[str, AttentionPattern], asked: Questions
) -> dict[str, AttentionPattern]:
    """The patterns compared, by name.

    Args:
      rounds: the scores of the layers, and again after each layer that was chosen; heads: other patterns, by name.
    """
    made: dict[str, AttentionPattern] = {
        recipe: AttentionPattern.from_recipe(
            recipe,
            config,
            sliding_window=asked.sliding_window,
            num_sink_tokens=SINK_TOKENS if recipe == "streaming" else 0,
        )
        for recipe in RECIPES
    }
    drawn: dict[str, Any] = {"data": asked.about, "seed": CALIBRATION_SEED, "full_attention_decode": False}
    for n in BUDGETS:
        budget = max(1, config.num_hidden_layers // n)
        made[f"nll-1-in-{n}"] = nll_pattern(rounds[0], budget=budget, **drawn)
        made[f"nll-greedy-1-in-{n}"] = greedy_pattern(rounds[:budget], **drawn)
    made |= heads
    decoded = {
        f"{name}+fa-decode": dataclasses.replace(made[name], full_attention_decode=True) for name in WITH_FA_DECODE
    }
    return made | decoded


def compare(name: str, by_example: Mapping[str, np.ndarray]) -> tuple[str, bool]:
    """Whether a choice of layers or heads beats interleaved layers of the same memory: a sentence, and bool.

    Args:
      name: ends like the interleaved pattern that it is held against, as in `nll-1-in-4`.
      by_example: the scores [N] of each pattern on the same examples.
    """
    method, _, budget = name.rpartition("-1-in-")
    other = f"interleave-1-in-{budget}"
    chosen, interleave = by_example[name], by_example[other]
    difference = paired_score(chosen, interleave)
    low, high = difference.interval or (-1.0, 1.0)
    figures = (
        f"{name} answers {chosen.mean():.0%} of the questions, {other} {interleave.mean():.0%}: a difference of "
        f"{100 * difference.mean:.0f} points, 95 % interval [{100 * low:.0f}, {100 * high:.0f}] "
        f"(paired, n = {chosen.size})."
    )
    if low > 0:
        return f"{figures} The choice beats interleaving beyond its confidence interval.", True
    if max(chosen.mean(), interleave.mean()) < 0.2:
        why = "neither choice carries what is asked for"
    elif high < 0:
        why = "the interleaved layers happen to be the better ones"
        if method == "nll":
            why += ": layers are scored one at a time, and two of them may work only together"
    elif min(chosen.mean(), interleave.mean()) > 0.8:
        why = "the interleaved layers happen to be good ones already"
    else:
        why = "the difference is too small for this many examples"
    return f"{figures} It does not beat interleaving beyond the interval: {why}.", False


def cpt_config(out: Path, model: Path, own: bool) -> TrainConfig:
    """Some steps of SwiAttn's continued pretraining, from the demo's model: its own, or another."""
    overrides = [f"output={out / 'swiattn-cpt'}", f"init_from={model}", f"tokenizer={model}"]
    return load_config(TrainConfig, bundled("chains" if own else "recall") / "swiattn-cpt.yaml", overrides)


def _pictures(
    out: Path,
    report: Mapping[str, Any],
    by_example: Mapping[str, np.ndarray],
    asked: Questions,
    scores: NLLScores,
    chosen: AttentionPattern,
) -> None:
    names = [row["name"] for row in report["rows"]]
    grid = [score_by_depth(by_example[name], len(asked.kinds)) for name in names]
    needle_heat_map(grid, names, asked.kinds, out / "answers.png", title="Answers right", column_title=asked.about)
    layer_scores_chart(
        scores.intervals(),
        chosen.full_layers,
        out / "layer-scores.png",
        title="Which layers need full attention: NLL-guided, 1 in 2",
    )
    accuracy_memory_chart(report["rows"], out / "accuracy-memory.png", found_title="Answers right (%)")
    routed_cpt_chart(report["routed_cpt"], out / "routed-cpt.png")


def _claim(out: Path) -> None:
    """Make the folder, or empty it of what an earlier demo made."""
    if out.exists() and any(out.iterdir()) and not (out / MARK).exists():
        raise ConfigError(f"{out} holds files that no demo made: name a new folder")
    out.mkdir(parents=True, exist_ok=True)
    (out / MARK).touch()
    shutil.rmtree(out / "swiattn-cpt", ignore_errors=True)
