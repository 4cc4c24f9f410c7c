"""SwiAttn's CPT against its baselines on models of chains: arms, measurements, claims and pictures.

Where compare_swiattn.py asks for one look-up, which a single layer does, an answer here takes a look-up for each hop.
All but the last can happen inside the prompt: at the last token of a statement that names another name.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import compare_swiattn
import numpy as np
from compare_swiattn import LOSS_CLAIMS, answer_queries, draw_losses, full_ratio, take_full

from swa_jax.adapt.tasks import HOPS, RIVALS
from swa_jax.data.chains import STATEMENT, ChainWords
from swa_jax.data.tokenizer import Tokenizer
from swa_jax.evaluate.chains import ChainCell, chain_examples
from swa_jax.evaluate.examples import Example
from swa_jax.evaluate.nll import score_answers
from swa_jax.model.decoder import Decoder
from swa_jax.model.pattern import AttentionPattern
from swa_jax.report import needle_heat_map
from swa_jax.train.loop import TrainConfig

CONFIG = "configs/compare/swiattn-chains.yaml"
BASE = "chains"
WINDOW = 32  # of CONFIG
LENGTH = 384  # tokens of a prompt with its answer
PER_HOPS = 48  # prompts of each number of hops
SEED = 1  # of the prompts; those of training are drawn otherwise
TINY = ("stages.0.steps=3", "stages.0.sequence_length=128", "stages.0.batch_size=2", "checkpoint_every=2")
CHOSEN = "nll-greedy"  # stands for the layers that this method chooses for the model that is continued
ARMS = {
    **compare_swiattn.ARMS,
    "swiattn, base 100": ("method=swiattn", "switch_loss.base=100.0"),
    "static-hybrid, chosen layers": ("method=null", f"pattern={CHOSEN}"),
}
# Where the full-attention ratio is taken: in prompts with far statements, and in those with the same chain right before
# the question.
GROUPS = {
    "prompts": "all tokens, far",
    "far hops": "hops, far",
    "near hops": "hops, near",
    "numbers": "numbers, far",
    "filler": "filler words",
    "far answers": "answers, far",
    "near answers": "answers, near",
}
COLUMNS = {
    "text loss": "held-out loss",
    **{f"right, {hops}": f"{hops} hop{'s' if hops > 1 else ''} right" for hops in HOPS},
    "answer loss": "answer loss",
    "full ratio": "full ratio, text",
    **{f"full ratio, {group}": f"full ratio, {title}" for group, title in GROUPS.items()},
}


def chosen_pattern(base: Path, file: Path) -> str:
    """The recipe of half of the layers, chosen on other chains than those that are measured, and kept in `file`."""
    if not file.exists():
        command = [
            sys.executable, "-m", "swa_jax.cli", "select", CHOSEN, base, "--one-in", 2, "--window", WINDOW,
            "--chains", f"hops={HOPS[0]}-{HOPS[-1]},rivals={RIVALS},gap={WINDOW}", "--length", LENGTH,
            "--examples", 24, "--dtype", "float32", "--out", file,
        ]  # fmt: skip
        subprocess.run([str(word) for word in command], check=True, stdout=subprocess.DEVNULL)
    return "layers:" + ",".join(map(str, AttentionPattern.from_json(file).full_layers))


def measure(model: Decoder, tokenizer: Tokenizer, config: TrainConfig, tiny: bool) -> dict[str, float]:
    """Loss of files that no training read, answers by hops, and which tokens take full attention in which layer."""
    values = compare_swiattn.measure_text(model, tokenizer, config, tiny)
    far, near = [], []
    losses = []
    for hops in HOPS:
        count = 2 if tiny else PER_HOPS
        cell, close = ChainCell(hops, RIVALS, LENGTH), ChainCell(hops, RIVALS, LENGTH, depth=1.0)
        asked = chain_examples(tokenizer, cell, num_examples=count, gap=WINDOW, seed=SEED)
        scores = score_answers(model, asked, batch_size=8)
        values[f"right, {hops}"] = float(scores.right.mean())
        losses.append(scores.nll.mean())
        far += asked
        near += chain_examples(tokenizer, close, num_examples=count, seed=SEED)
    values["right"] = float(np.mean([values[f"right, {hops}"] for hops in HOPS]))
    values["answer loss"] = float(np.mean(losses))
    fillers = ChainWords.of(tokenizer).fillers
    for place, examples in (("far", far), ("near", near)):
        tokens, answers = answer_queries(examples)
        takes = take_full(model, tokens)
        numbers, hops_done = _statement_ends(examples, tokens.shape)
        counted = {f"{place} hops": hops_done, f"{place} answers": answers}
        if place == "far":
            filler = np.isin(tokens, fillers).astype(float)
            counted |= {"prompts": np.ones(tokens.shape), "numbers": numbers, "filler": filler}
        for group, these in counted.items():
            ratio = full_ratio(takes, these)
            values[f"full ratio, {group}"] = float(ratio.mean())
            values |= {f"full ratio, {group}, layer {layer}": float(one) for layer, one in enumerate(ratio)}
    return values


def _statement_ends(examples: Sequence[Example], shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """1 at the last tokens of the asked chain's statements [B, T]: of the one with a number, and of the others."""
    numbers, names = np.zeros(shape), np.zeros(shape)
    for row, example in enumerate(examples):
        first, *others = [start + STATEMENT - 1 for start in example.meta["statements"]]
        numbers[row, first] = 1
        names[row, others] = 1
    return numbers, names


# As in compare_swat.py; of Figure 6 the paper has answers only.
CLAIMS = (
    *LOSS_CLAIMS,
    ("chains, SwiAttn above SWA-CPT", "retrieval 52.9, 41.5", ("swiattn", "right"), ("swa-cpt", "right")),
    ("chains, SwiAttn above StaticHybrid", "retrieval 52.9, 50.6", ("swiattn", "right"), ("static-hybrid", "right")),
    (
        "chains, SwiAttn above StaticHybrid with the chosen half of the layers",
        "-",
        ("swiattn", "right"),
        ("static-hybrid, chosen layers", "right"),
    ),
    (
        "chains, SwiAttn above FullAttn (the paper: equal)",
        "retrieval 52.9, 52.9",
        ("swiattn", "right"),
        ("full", "right"),
    ),
    (
        "full-attention ratio on text, StaticHybrid above SwiAttn (base 10)",
        "0.25, 0.13",
        ("static-hybrid", "full ratio"),
        ("swiattn", "full ratio"),
    ),
    ("the same on chains", "0.25, 0.13", ("static-hybrid", "full ratio, prompts"), ("swiattn", "full ratio, prompts")),
    *(
        (said, figures, (arm, f"full ratio, {higher}"), (arm, f"full ratio, {lower}"))
        for arm in ("swiattn", "swiattn, base 100")
        for said, figures, higher, lower in (
            (f"{arm}: ratio while answering, far chains above near ones", "0.30, 0.05", "far answers", "near answers"),
            (f"{arm}: ratio at hops, far above near", "-", "far hops", "near hops"),
            (f"{arm}: ratio at far hops above filler words", "-", "far hops", "filler"),
            (f"{arm}: ratio at far hops above numbers", "-", "far hops", "numbers"),
        )
    ),
)


def pictures(out: Path, runs: Mapping[str, list[dict]]) -> list[tuple[str, str]]:
    draw_losses(out, runs, title="CPT of models of chains")
    made = [("loss.png", "Training loss (text, passages and chains), mean and range over the models")]
    right = [[np.mean([run["values"][f"right, {hops}"] for run in of]) for hops in HOPS] for of in runs.values()]
    needle_heat_map(
        right, list(runs), list(map(str, HOPS)), out / "right.png", title="Answers right", column_title="Hops"
    )
    made.append(("right.png", "Answers right by arm and hops, mean over the models, in percent"))
    for arm, of in runs.items():
        if not of[0].get("ratio_by_layer"):
            continue
        layers = range(len(of[0]["ratio_by_layer"][0]))
        rows = {
            f"model {run['seed']}, {title}": [run["values"][f"full ratio, {group}, layer {layer}"] for layer in layers]
            for run in of
            for group, title in GROUPS.items()
        }
        name = f"tokens-{arm.split(', ')[-1].replace(' ', '-')}.png"
        needle_heat_map(
            list(rows.values()),
            list(rows),
            list(map(str, layers)),
            out / name,
            title=f"Full-attention ratio: {arm}",
            column_title="Layer (from 0)",
        )
        made.append((name, f"Full-attention ratio by model, kind of token and layer, in percent: {arm}"))
    return made
