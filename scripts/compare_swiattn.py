"""SwiAttn's continued pretraining (CPT) against its four baselines: arms, measurements, claims and pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
BASE = "recall"  # the bundled model that is continued
COLUMNS = {
    "text loss": "held-out loss",
    "needles found": "needles found, far",
    "answer loss": "answer loss, far",
    "full ratio": "full ratio, text",
    "full ratio, far answers": "full ratio, far answers",
    "full ratio, near answers": "full ratio, near answers",
}
TINY = (
    "stages.0.steps=3",
    "stages.0.sequence_length=128",
    "stages.0.batch_size=2",
    "stages.0.data.2.num_keys=1",
    "stages.0.data.2.num_questions=1",
    "checkpoint_every=2",
)
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
    values = measure_text(model, tokenizer, config, tiny)
    length = config.stages[0].sequence_length
    depths = (0.02, 1.0) if tiny else FAR + NEAR
    examples = needle_examples(
        tokenizer,
        length=length,
        num_examples=len(depths) * (1 if tiny else PER_DEPTH),
        depths=depths,
        haystack=Haystack(tokenizer, library_files(held_out=True)),
        seed=1,
    )
    found = needle_accuracy(model, tokenizer, examples, max_new_tokens=20, batch_size=8)
    answer_loss = score_answers(model, examples, batch_size=8).nll
    answer_ratio = np.array([_answer_ratio(model, example) for example in examples])
    at = np.arange(len(examples)) % len(depths)
    far = np.isin(at, [i for i, depth in enumerate(depths) if depth in FAR])
    values |= {
        "needles found": float(found[far].mean()),
        "answer loss": float(answer_loss[far].mean()),
        "full ratio, far answers": float(answer_ratio[far].mean()),
        "full ratio, near answers": float(answer_ratio[at == len(depths) - 1].mean()),
    }
    for i, depth in enumerate(depths):
        values[f"found at {depth}"] = float(found[at == i].mean())
    return values


def measure_text(model: Decoder, tokenizer: Tokenizer, config: TrainConfig, tiny: bool) -> dict[str, float]:
    """Loss and full-attention ratios on the library's held-out files, in passes as long as the training's rows."""
    length = config.stages[0].sequence_length
    texts = [tokenizer.encode(f.read_text(errors="replace")) for f in library_files(held_out=True)]
    pieces = [t[: 8 * length + 1] for t in texts if len(t) > 8 * length][: 1 if tiny else None]
    ratio = full_ratio(take_full(model, np.array([piece[:length] for piece in pieces])))
    by_layer = {f"full ratio of layer {layer}": float(one) for layer, one in enumerate(ratio)}
    return {"text loss": held_out_loss(model, pieces, length), "full ratio": float(ratio.mean()), **by_layer}


def take_full(model: Decoder, tokens: np.ndarray, batch_size: int = 16) -> np.ndarray:
    """1 where a token of tokens [B, T] takes full attention, else 0: [L, B, T]."""
    pattern = model.pattern
    if SWITCH not in pattern.layer_types:
        full = np.isin(np.arange(pattern.num_layers), pattern.full_layers).astype(np.float64)
        return np.broadcast_to(full[:, None, None], (len(full), *tokens.shape))
    parts = [tokens[start : start + batch_size] for start in range(0, len(tokens), batch_size)]
    gates = [np.asarray(_gates(*nnx.split(model), jnp.asarray(part)), np.float64) for part in parts]
    return np.concatenate(gates, axis=1)


@jax.jit(static_argnums=0)
def _gates(graph: Any, state: Any, tokens: jax.Array) -> jax.Array:
    model: Decoder = nnx.merge(graph, state)
    return model.features(tokens)[1].gate


def full_ratio(takes: np.ndarray, counted: np.ndarray | None = None) -> np.ndarray:
    """Share of the counted tokens [B, T] that take full attention, by layer [L], given takes [L, B, T]."""
    weight = np.ones(takes.shape[1:]) if counted is None else counted
    return (takes * weight).sum((1, 2)) / weight.sum()


def answer_queries(examples: Sequence[Example]) -> tuple[np.ndarray, np.ndarray]:
    """Examples of one length as tokens [B, T], and 1 at the queries that predict their answers [B, T]."""
    tokens = np.array([[*example.prompt, *example.answer] for example in examples])
    counted = np.zeros(tokens.shape)
    for row, example in zip(counted, examples, strict=True):
        row[len(example.prompt) - 1 : -1] = 1
    return tokens, counted


def _answer_ratio(model: Decoder, example: Example) -> float:
    """The full-attention ratio of the queries that predict the answer, over all layers."""
    tokens, counted = answer_queries([example])
    return float(full_ratio(take_full(model, tokens), counted).mean())


# As in compare_swat.py. Those about loss are asked of other models too.
LOSS_CLAIMS = (
    (
        "CPT helps a windowed model: loss, SWA-ZS above SWA-CPT",
        "Wikitext ppl 16.6, 15.6",
        ("swa-zero-shot", "text loss"),
        ("swa-cpt", "text loss"),
    ),
    ("loss, SWA-CPT above SwiAttn", "Wikitext ppl 15.6, 15.0", ("swa-cpt", "text loss"), ("swiattn", "text loss")),
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
)
CLAIMS = (
    *LOSS_CLAIMS,
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


def draw_losses(out: Path, runs: Mapping[str, list[dict]], title: str) -> None:
    """The arms' losses in training, as `loss.png`."""
    curves = {arm: [run["loss"] for run in of] for arm, of in runs.items() if of[0]["loss"]}
    if curves:
        training_curves(curves, BIN, out / "loss.png", title=title, ylabel="Loss (nats)")


def pictures(out: Path, runs: Mapping[str, list[dict]]) -> list[tuple[str, str]]:
    draw_losses(out, runs, title="CPT of the bundled model")
    made = [("loss.png", "Training loss (text and needles), mean and range over the seeds")]
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
