"""SwiAttn's continued pretraining (CPT) against its four baselines: arms, measurements, claims and pictures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from compare_swat import BIN, held_out_loss
from flax import nnx

from swa_jax.data.haystack import Haystack, library_files
from swa_jax.data.tokenizer import Tokenizer
from swa_jax.evaluate import Example, needle_accuracy, needle_examples, score_answers
from swa_jax.model.decoder import Decoder
from swa_jax.model.layer_types import SWITCH
from swa_jax.report import layer_ratio_map, needle_heat_map, training_curves
from swa_jax.train.loop import TrainConfig

CONFIG = "configs/compare/swiattn.yaml"
COLUMNS = {
    "text loss": "held-out loss",
    "needles found": "needles found, far",
    "answer loss": "answer loss, far",
    "full ratio": "full ratio, text",
    "full ratio, far answers": "full ratio, far answers",
    "full ratio, near answers": "full ratio, near answers",
}
TINY = (
    "stages.0.steps=3", "stages.0.sequence_length=128", "stages.0.batch_size=2", "stages.0.data.2.num_keys=1",
    "stages.0.data.2.num_questions=1", "checkpoint_every=2",
)  # fmt: skip
NEAR, FAR = (0.7, 0.9, 1.0), (0.02, 0.1, 0.2, 0.3, 0.4)  # depths of needles; windows reach back to about 0.5
PER_DEPTH = 8
ARMS = {
    "swiattn": ("method=swiattn",),
    "full": ("method=full",),
    "static-hybrid": ("method=static-hybrid",),
    "swa-cpt": ("method=swa-cpt",),
    "swa-zero-shot": ("method=swa-zero-shot",),
    "swiattn, base 1e-3": ("method=swiattn", "switch_loss.base=1.0e-3"),
}


def measure(model: Decoder, tokenizer: Tokenizer, config: TrainConfig, tiny: bool) -> dict[str, float]:
    """Loss of files that no training read, needles found by generation, and where full attention is taken."""
    length = config.stages[0].sequence_length
    texts = [tokenizer.encode(f.read_text(errors="replace")) for f in library_files(held_out=True)]
    pieces = [t[: 8 * length + 1] for t in texts if len(t) > 8 * length][: 1 if tiny else None]
    values = {"text loss": held_out_loss(model, pieces, length)}
    depths = (0.02, 1.0) if tiny else FAR + NEAR
    examples = needle_examples(
        tokenizer, length=length, num_examples=len(depths) * (1 if tiny else PER_DEPTH), depths=depths,
        haystack=Haystack(tokenizer, library_files(held_out=True)), seed=1,
    )  # fmt: skip
    found = needle_accuracy(model, tokenizer, examples, max_new_tokens=20, batch_size=8)
    answer_loss = score_answers(model, examples, batch_size=8).nll
    text_ratio = full_ratio(model, np.array([piece[:length] for piece in pieces]))
    answer_ratio = np.array([_answer_ratio(model, example) for example in examples])
    at = np.arange(len(examples)) % len(depths)
    far = np.isin(at, [i for i, depth in enumerate(depths) if depth in FAR])
    values |= {
        "needles found": float(found[far].mean()),
        "answer loss": float(answer_loss[far].mean()),
        "full ratio": float(text_ratio.mean()),
        "full ratio, far answers": float(answer_ratio[far].mean()),
        "full ratio, near answers": float(answer_ratio[at == len(depths) - 1].mean()),
    }
    for i, depth in enumerate(depths):
        values[f"found at {depth}"] = float(found[at == i].mean())
    for layer, ratio in enumerate(text_ratio):
        values[f"full ratio of layer {layer}"] = float(ratio)
    return values


def full_ratio(model: Decoder, tokens: np.ndarray, counted: np.ndarray | None = None) -> np.ndarray:
    """Share of the counted tokens [B, T] that take full attention, by layer [L]; 0 and 1 where no layer is routed."""
    pattern = model.pattern
    if SWITCH not in pattern.layer_types:
        return np.isin(np.arange(pattern.num_layers), pattern.full_layers).astype(np.float64)
    gate = np.asarray(_gates(*nnx.split(model), jnp.asarray(tokens)), np.float64)  # [L, B, T]
    weight = np.ones(tokens.shape) if counted is None else counted
    return (gate * weight).sum((1, 2)) / weight.sum()


@jax.jit(static_argnums=0)
def _gates(graph: Any, state: Any, tokens: jax.Array) -> jax.Array:
    model: Decoder = nnx.merge(graph, state)
    return model.features(tokens)[1].gate


def _answer_ratio(model: Decoder, example: Example) -> float:
    """The full-attention ratio of the queries that predict the answer, over all layers."""
    tokens = np.array([[*example.prompt, *example.answer]])
    counted = np.zeros(tokens.shape)
    counted[0, len(example.prompt) - 1 : -1] = 1
    return float(full_ratio(model, tokens, counted).mean())


# As in compare_swat.py.
CLAIMS = (
    (
        "CPT helps a windowed model: loss, SWA-ZS above SWA-CPT",
        "Wikitext ppl 16.6, 15.6",
        ("swa-zero-shot", "text loss"),
        ("swa-cpt", "text loss"),
    ),
    (
        "loss, SWA-CPT above SwiAttn",
        "Wikitext ppl 15.6, 15.0",
        ("swa-cpt", "text loss"),
        ("swiattn", "text loss"),
    ),
    (
        "loss, StaticHybrid above SwiAttn",
        "Wikitext ppl 15.2, 15.0",
        ("static-hybrid", "text loss"),
        ("swiattn", "text loss"),
    ),
    (
        "loss, SwiAttn above FullAttn (the paper: equal)",
        "Wikitext ppl 15.0, 15.0",
        ("swiattn", "text loss"),
        ("full", "text loss"),
    ),
    (
        "needles, SwiAttn above SWA-CPT",
        "retrieval 52.9, 41.5",
        ("swiattn", "needles found"),
        ("swa-cpt", "needles found"),
    ),
    (
        "needles, SwiAttn above StaticHybrid",
        "retrieval 52.9, 50.6",
        ("swiattn", "needles found"),
        ("static-hybrid", "needles found"),
    ),
    (
        "full-attention ratio, StaticHybrid above SwiAttn (base 0.1)",
        "0.25, 0.13",
        ("static-hybrid", "full ratio"),
        ("swiattn", "full ratio"),
    ),
    (
        "the same with the paper's base, 1e-3",
        "0.25, 0.13",
        ("static-hybrid", "full ratio"),
        ("swiattn, base 1e-3", "full ratio"),
    ),
    (
        "ratio while answering, far needles above near ones",
        "0.30, 0.05",
        ("swiattn", "full ratio, far answers"),
        ("swiattn", "full ratio, near answers"),
    ),
)


def pictures(out: Path, runs: Mapping[str, list[dict]]) -> list[tuple[str, str]]:
    curves = {arm: [run["loss"] for run in of] for arm, of in runs.items() if of[0]["loss"]}
    made = [("loss.png", "Training loss (text and needles), mean and range over the seeds")]
    if curves:
        training_curves(curves, BIN, out / "loss.png", title="CPT of the bundled model", ylabel="Loss (nats)")
    routed = {arm: of for arm, of in runs.items() if of[0].get("ratio_by_layer")}
    for arm, of in routed.items():
        name = f"ratio-{arm.split(', ')[-1].replace(' ', '-')}.png"
        ratio = np.mean([run["ratio_by_layer"] for run in of], axis=0).T  # [L, points]
        layer_ratio_map(ratio, BIN, out / name, title=f"Full-attention ratio in training: {arm}")
        made.append((name, f"Full-attention ratio by layer in training, mean over the seeds: {arm}"))
    first = next(iter(runs.values()))[0]["values"]
    depths = [key for key in first if key.startswith("found at ")]
    grid = [[np.mean([run["values"][key] for run in of]) for key in depths] for of in runs.values()]
    labels = [f"{100 * float(key.split()[-1]):.0f} %" for key in depths]
    needle_heat_map(grid, list(runs), labels, out / "needles.png")
    return [*made, ("needles.png", "Needles found by depth, mean over the seeds")]
