"""`swa-jax demo`: the bundled model through the whole path, from import to a report, in minutes on two CPU cores.

Every stage is the one a user's own model would go through: import from Hugging Face format, layer selection,
evaluation of each pattern by generation, and a few steps of routed training.
"""

from __future__ import annotations

import importlib.resources
import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from swa_jax.adapt.source import RECALL
from swa_jax.checkpoint.folder import load_model
from swa_jax.checkpoint.hf_import import import_model
from swa_jax.data.haystack import Haystack, library_files
from swa_jax.data.tokenizer import Tokenizer, load_tokenizer
from swa_jax.errors import ConfigError
from swa_jax.estimates import paired_score
from swa_jax.evaluate import Example, needle_examples
from swa_jax.evaluate.measure import measure_pattern
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
from swa_jax.select import NLLScores, nll_deltas, nll_pattern
from swa_jax.settings import load_config
from swa_jax.train.loop import TrainConfig, train

LENGTH = 1024  # tokens of prompt and answer together
WINDOW = 48  # with 8 layers, what windows can pass on reaches back 384 tokens; the needles lie further back
SINK_TOKENS = 4  # of the pattern `streaming`
DEPTHS = 6
EXAMPLES = 48  # needle examples a pattern, 8 a depth
NLL_EXAMPLES = 16  # of those, how many are also scored for answer NLL (one batch)
CALIBRATION_EXAMPLES = 16  # for layer selection, drawn with another seed
BATCH = 16
NEW_TOKENS = 20  # the answer has about 18
EVALUATION_SEED, CALIBRATION_SEED = 1, 2
RECIPES = ("full", "window", "streaming", "interleave-1-in-2", "interleave-1-in-4")
MARK = ".swa-jax-demo"  # says that a folder is the demo's own, to be written anew


def run_demo(out: str | Path = "runs/demo", model_dir: str | Path | None = None) -> dict[str, Any]:
    """Import, select, evaluate, train a little; write `report.json` and pictures to `out`, and return the report.

    Args:
      out: a new folder, or one of an earlier demo, whose results are replaced.
      model_dir: a model in Hugging Face format with a `tokenizer.json`; None is the bundled one.

    Raises:
      ConfigError: `out` holds something else, or the model is too shallow or too deep for the demo's context.
    """
    begin = time.perf_counter()
    console = table_console()
    out = Path(out)
    cpt = cpt_config(out)  # now, so that a mistake in it does not show after minutes only
    _claim(out)

    def stage(text: str) -> None:
        console.print(f"[dim]{time.perf_counter() - begin:5.0f} s[/dim]  {text}")

    stage("importing the model")
    with ExitStack() as stack:
        source = Path(model_dir) if model_dir else stack.enter_context(importlib.resources.as_file(RECALL))
        import_model(source, out / "model")
    # Stored in bf16; a CPU multiplies f32 faster.
    model, tokenizer = load_model(out / "model", dtype=jnp.float32), load_tokenizer(out / "model")
    highest = deepest_needle(model.config)
    depths = np.linspace(0.02, highest, DEPTHS).round(3).tolist()
    haystack = Haystack(tokenizer, library_files(held_out=True))  # the bundled model was not trained on these

    def draw(num_examples: int, seed: int) -> list[Example]:
        return needle_examples(
            tokenizer, length=LENGTH, num_examples=num_examples, depths=depths, haystack=haystack, seed=seed
        )

    examples, calibration = draw(EXAMPLES, EVALUATION_SEED), draw(CALIBRATION_EXAMPLES, CALIBRATION_SEED)

    stage(
        f"scoring each of {model.config.num_hidden_layers} layers on {len(calibration)} other examples (NLL-guided)"
    )
    # Scored as nll-1-in-4 runs. With full-attention decode this model's answers need no full layer, so the paper's
    # setting would rank noise.
    scores = nll_deltas(
        model,
        calibration,
        sliding_window=WINDOW,
        num_sink_tokens=0,
        full_attention_decode=False,
        batch_size=BATCH,
    )
    patterns = demo_patterns(model.config, scores)
    rows, by_example = _measure(model, tokenizer, patterns, examples, stage)

    stage("routed training (SwiAttn) from the same model")
    train(cpt, quiet=True)
    steps = [json.loads(line) for line in (Path(cpt.output) / "metrics.jsonl").read_text().splitlines()]
    verdict, beats = compare(by_example["nll-1-in-4"], by_example["interleave-1-in-4"])
    notes = [verdict, *_notes(model.config, highest)]
    report: dict[str, Any] = {
        "rows": rows,
        "routed_cpt": steps,
        "selection": {
            "scores": scores.mean.tolist(),
            "intervals": [estimate.interval for estimate in scores.intervals()],
            "nll-1-in-4": list(patterns["nll-1-in-4"].full_layers),
            "nll-1-in-2": list(patterns["nll-1-in-2"].full_layers),
        },
        "nll_beats_interleave": beats,
        "notes": notes,
        "seconds": round(time.perf_counter() - begin, 1),
    }
    write_json(out / "report.json", report)
    _pictures(out, report, by_example, examples, scores, patterns["nll-1-in-4"])
    console.print(pattern_table(rows))
    for note in notes:
        console.print(f"- {note}")
    console.print(routed_verdict(steps))
    console.print(f"Report and pictures: {out}/ ({time.perf_counter() - begin:.0f} s)")
    return report


def _measure(
    model: Decoder,
    tokenizer: Tokenizer,
    patterns: Mapping[str, AttentionPattern],
    examples: Sequence[Example],
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
            examples,
            max_new_tokens=NEW_TOKENS,
            batch_size=BATCH,
            num_nll_examples=NLL_EXAMPLES,
        )
        rows.append(row)
        by_example[name] = answers.scores
    by_example["full+fa-decode"] = by_example["full"]
    rows.insert(len(RECIPES) + 2, rows[0] | {"name": "full+fa-decode"})
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


def deepest_needle(config: ModelConfig) -> float:
    """The greatest depth at which a whole needle lies beyond what the windows of all layers can pass on."""
    reach, needle = config.num_hidden_layers * WINDOW, 32
    depth = 1 - (reach + needle) / (LENGTH - NEW_TOKENS)
    if depth < 0.2 or config.num_hidden_layers < 4:
        raise ConfigError(
            f"the demo needs a model of at least 4 and at most {int(0.76 * LENGTH / WINDOW)} layers: with "
            f"{config.num_hidden_layers} layers and a window of {WINDOW}, {LENGTH} tokens would not tell patterns apart"
        )
    return depth


def demo_patterns(config: ModelConfig, scores: NLLScores) -> dict[str, AttentionPattern]:
    """The patterns compared, by name; `full+fa-decode` is left out, being the same function as `full`."""
    patterns = {}
    for suffix, decode in (("", False), ("+fa-decode", True)):
        for recipe in RECIPES:
            patterns[recipe + suffix] = AttentionPattern.from_recipe(
                recipe,
                config,
                sliding_window=WINDOW,
                num_sink_tokens=SINK_TOKENS if recipe == "streaming" else 0,
                full_attention_decode=decode,
            )
        for n in (2, 4):
            patterns[f"nll-1-in-{n}{suffix}"] = nll_pattern(
                scores,
                one_in_n=n,
                full_attention_decode=decode,
                data=f"single needles, {LENGTH} tokens",
                seed=CALIBRATION_SEED,
            )
    del patterns["full+fa-decode"]
    return patterns


def compare(nll: np.ndarray, interleave: np.ndarray) -> tuple[str, bool]:
    """A sentence that says whether NLL-guided 1-in-4 beats interleaved 1-in-4 (scores [N], same examples), and bool."""
    difference = paired_score(nll, interleave)
    low, high = difference.interval or (-1.0, 1.0)
    figures = (
        f"nll-1-in-4 finds {nll.mean():.0%} of the needles, interleave-1-in-4 {interleave.mean():.0%}: a difference of "
        f"{100 * difference.mean:.0f} points, 95 % interval [{100 * low:.0f}, {100 * high:.0f}] "
        f"(paired, n = {nll.size})."
    )
    if low > 0:
        return (
            f"{figures} Choosing layers by answer NLL beats interleaving beyond its confidence interval.",
            True,
        )
    if max(nll.mean(), interleave.mean()) < 0.2:
        why = "neither choice of a quarter of the layers carries the needle"
    elif high < 0:
        why = (
            "the interleaved layers happen to be the better ones: NLL-guided selection scores layers one at a time and "
            "cannot see that two of them work only together"
        )
    elif min(nll.mean(), interleave.mean()) > 0.8:
        why = "the interleaved layers happen to be good ones already"
    else:
        why = "the difference is too small for this many examples"
    return f"{figures} It does not beat interleaving beyond the interval: {why}.", False


def cpt_config(out: Path) -> TrainConfig:
    """Some steps of SwiAttn's continued pretraining, from the demo's model."""
    folder, model = out / "swiattn-cpt", out / "model"
    overrides = [f"output={folder}", f"init_from={model}", f"tokenizer={model}", f"sliding_window={WINDOW}"]
    with importlib.resources.as_file(RECALL / "swiattn-cpt.yaml") as file:
        return load_config(TrainConfig, file, overrides)


def _notes(config: ModelConfig, highest: float) -> list[str]:
    return [
        f"Needles lie at depths of 2 % to {highest:.0%}, further from the question than the "
        f"{config.num_hidden_layers} x {WINDOW} tokens that windows alone can pass on. The haystack is Python library "
        "source held out from the bundled model's training; keys, numbers and places are drawn anew.",
        "needle_accuracy is by real greedy generation and string match; its interval is Wilson's, 95 %. answer_nll is "
        "teacher-forced (nats a token).",
        f"Times exclude compilation: prefill_seconds is a prompt's share of a batch of {BATCH}, "
        "decode_tokens_per_second is of the whole batch. kv_cache_bytes is a sequence's share of the allocated cache.",
        "full+fa-decode is the same function as full and repeats its figures.",
        f"NLL-guided layers were scored on {CALIBRATION_EXAMPLES} examples of another seed, without full-attention "
        "decode; the +fa-decode rows keep the same layers. (The paper scores with it. There, answers see the whole "
        "prompt in every layer, and a model that reads its needle only then shows no need for any full layer.)",
    ]


def _pictures(
    out: Path,
    report: Mapping[str, Any],
    by_example: Mapping[str, np.ndarray],
    examples: Sequence[Example],
    scores: NLLScores,
    chosen: AttentionPattern,
) -> None:
    names = [row["name"] for row in report["rows"]]
    at = np.arange(len(examples)) % DEPTHS  # needle_examples takes the depths in turn
    grid = [[by_example[name][at == depth].mean() for depth in range(DEPTHS)] for name in names]
    places = [e.meta["needle_start"] / len(e.prompt) for e in examples[:DEPTHS]]
    needle_heat_map(grid, names, [f"{100 * place:.0f} %" for place in places], out / "needles.png")
    layer_scores_chart(
        scores.intervals(),
        chosen.full_layers,
        out / "layer-scores.png",
        title="Which layers need full attention: NLL-guided, 1 in 4",
    )
    accuracy_memory_chart(report["rows"], out / "accuracy-memory.png")
    routed_cpt_chart(report["routed_cpt"], out / "routed-cpt.png")


def _claim(out: Path) -> None:
    """Make the folder, or empty it of what an earlier demo made."""
    if out.exists() and any(out.iterdir()) and not (out / MARK).exists():
        raise ConfigError(f"{out} holds files that no demo made: name a new folder")
    out.mkdir(parents=True, exist_ok=True)
    (out / MARK).touch()
    for made in ("model", "swiattn-cpt"):
        shutil.rmtree(out / made, ignore_errors=True)
