"""SWAT's Tables 2 and 3 at a quarter of their windows and lengths: arms, measurements, claims and pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from swa_jax.data.batches import open_source
from swa_jax.data.tokenizer import Tokenizer
from swa_jax.evaluate import perplexity
from swa_jax.model.decoder import Decoder
from swa_jax.model.pattern import AttentionPattern
from swa_jax.report import loss_heat_map, training_curves
from swa_jax.train.loop import TrainConfig

BIN = 10  # steps that a point of a curve is the mean of
CONFIG = "configs/compare/swat.yaml"
BASE = None  # every arm starts at random
TINY = (
    "stages.0.steps=3",
    "model.num_hidden_layers=1",
    "model.hidden_size=24",
    "model.head_dim=4",
    "checkpoint_every=2",
)
LENGTHS = (32, 256, 1024, 4096)  # a quarter of Table 2's
COLUMNS = {str(length): f"loss at {length}" for length in LENGTHS} | {
    "4096, sees 32": "at 4096, 32 visible",
    "4096, sees all": "at 4096, all visible",
}
PIECES = 24  # of the greatest length, out of held-out documents
SOFTMAX = (
    "model.attention_activation=softmax",
    "model.position_embedding=rope",
    "model.alibi_negative_heads=0",
    "model.alibi_positive_heads=0",
)
SIGMOID_ROPE = SOFTMAX[1:]


def _rows(window: int | None, length: int) -> tuple[str, ...]:
    """2048 tokens a step in rows of `length`; without a window the rows are as long as the model sees."""
    where = (f"sliding_window={window}",) if window else ("pattern=full", "sliding_window=null")
    return *where, f"stages.0.sequence_length={length}", f"stages.0.batch_size={2048 // length}"


def _slopes(negative: int, positive: int, position: str, schedule: str) -> tuple[str, ...]:
    return (
        f"model.alibi_negative_heads={negative}",
        f"model.alibi_positive_heads={positive}",
        f"model.position_embedding={position}",
        f"model.slope_schedule={schedule}",
    )


ARMS = {
    # Table 2: softmax and RoPE; the names say what the model sees in training.
    "vanilla 32": (*SOFTMAX, *_rows(None, 32)),
    "sliding 32": (*SOFTMAX, *_rows(32, 256)),
    "vanilla 256": (*SOFTMAX, *_rows(None, 256)),
    "sliding 256": (*SOFTMAX, *_rows(256, 1024)),
    "vanilla 1024": (*SOFTMAX, *_rows(None, 1024)),
    # Table 3: sigmoid
    "sigmoid RoPE, vanilla 32": (*SIGMOID_ROPE, *_rows(None, 32)),
    "sigmoid RoPE": SIGMOID_ROPE,
    "sigmoid ALiBi (-)": _slopes(6, 0, "alibi", "press"),
    "sigmoid ALiBi (-+)": _slopes(3, 3, "alibi", "swat"),
    "sigmoid AliRope (-)": _slopes(6, 0, "alirope", "press"),
    "sigmoid AliRope (-), Eq. 4": _slopes(6, 0, "alirope", "swat"),
    "sigmoid AliRope (+), Press": _slopes(0, 6, "alirope", "press"),
    "sigmoid AliRope (+)": _slopes(0, 6, "alirope", "swat"),
    "sigmoid AliRope (-+)": (),
    "sigmoid AliRope (-+), bias -log 32": ("model.sigmoid_bias=-3.4657",),  # zero logits then weigh 1 in all, not 16
    "sigmoid AliRope (-+) 256": _rows(256, 1024),
}


def measure(model: Decoder, tokenizer: Tokenizer, config: TrainConfig, tiny: bool) -> dict[str, float]:
    """Held-out loss at each length under the training window, and for "vanilla 256" under Table 2's other windows."""
    stage = config.stages[0]
    lengths = LENGTHS[:2] if tiny else LENGTHS
    longest = lengths[-1]
    held_out = open_source(stage.data[0], tokenizer, length=longest, seed=None, held_out=True).documents
    pieces = [
        document[start : start + longest + 1]
        for start in range(0, 4 * longest, longest)  # at most four of a document
        for document in held_out
        if len(document) > start + longest
    ][: 2 if tiny else PIECES]
    train_window = config.sliding_window or stage.sequence_length
    windows: list[int | None] = [train_window]
    if config.sliding_window is None and train_window == 256:
        windows += [32, None]
    values = {}
    for window in windows:
        recipe = "full" if window is None else "window"
        pattern = AttentionPattern.from_recipe(recipe, model.config, sliding_window=window)
        seeing = model.with_pattern(pattern)
        name = {train_window: "", None: ", sees all"}.get(window, f", sees {window}")
        for length in lengths:
            values[f"{length}{name}"] = held_out_loss(seeing, pieces, length)
    return values


# (what is said, the paper's figures, higher, lower): of each seed, higher - lower should be above 0. Each of the two is
# (arm, value).
CLAIMS = (
    (
        "No. 2, 1: sigmoid for softmax without ALiBi degrades, at 32",
        "(at 16384 only)",
        ("sigmoid RoPE, vanilla 32", "32"),
        ("vanilla 32", "32"),
    ),
    ("No. 2, 1: the same, at 4096", "14.26, 4.84", ("sigmoid RoPE, vanilla 32", "4096"), ("vanilla 32", "4096")),
    (
        "sigmoid for softmax without ALiBi degrades, sliding, at 4096",
        "-",
        ("sigmoid RoPE", "4096"),
        ("sliding 32", "4096"),
    ),
    (
        "ALiBi mends it: RoPE above ALiBi (-), both sigmoid and sliding",
        "-",
        ("sigmoid RoPE", "4096"),
        ("sigmoid ALiBi (-)", "4096"),
    ),
    (
        "ALiBi mends it: RoPE above AliRope (-+), both sigmoid and sliding",
        "-",
        ("sigmoid RoPE", "4096"),
        ("sigmoid AliRope (-+)", "4096"),
    ),
    (
        "No. 3, 4: softmax RoPE above sigmoid ALiBi (-)",
        "3.014, 3.007",
        ("sliding 32", "4096"),
        ("sigmoid ALiBi (-)", "4096"),
    ),
    (
        "No. 6, 8: ALiBi (-+) above AliRope (-+)",
        "average 2.73, 2.51; OpenWebText 3.0484, 3.0486",
        ("sigmoid ALiBi (-+)", "4096"),
        ("sigmoid AliRope (-+)", "4096"),
    ),
    (
        "No. 6, 4: ALiBi (-+) above ALiBi (-)",
        "OpenWebText 3.048, 3.007; 4.4 says the opposite",
        ("sigmoid ALiBi (-+)", "4096"),
        ("sigmoid ALiBi (-)", "4096"),
    ),
    (
        "AliRope (-+) above AliRope (-)",
        "average accuracy 45.85, 46.88",
        ("sigmoid AliRope (-+)", "4096"),
        ("sigmoid AliRope (-)", "4096"),
    ),
    (
        "AliRope (+) above AliRope (-), slopes of Press et al.",
        "average accuracy 45.05, 46.88",
        ("sigmoid AliRope (+), Press", "4096"),
        ("sigmoid AliRope (-)", "4096"),
    ),
    (
        "AliRope (+) above AliRope (-), slopes of Eq. 4",
        "-",
        ("sigmoid AliRope (+)", "4096"),
        ("sigmoid AliRope (-), Eq. 4", "4096"),
    ),
    ("Vanilla A loses at 128 times its length", "4.841, 3.249", ("vanilla 32", "4096"), ("vanilla 32", "32")),
    ("Sliding A gains at 16 times its length", "3.129, 3.005", ("sliding 32", "256"), ("sliding 32", "4096")),
    (
        "SWAT (-+), window 32, gains at 16 times its length",
        "-",
        ("sigmoid AliRope (-+)", "256"),
        ("sigmoid AliRope (-+)", "4096"),
    ),
    ("Sliding B gains at 4 times its length", "2.964, 2.913", ("sliding 256", "1024"), ("sliding 256", "4096")),
    (
        "at 4096 with 32 visible: Vanilla A above Sliding A",
        "4.841, 3.005",
        ("vanilla 32", "4096"),
        ("sliding 32", "4096"),
    ),
    (
        "at 4096 with 256 visible: Vanilla B above Sliding B",
        "2.964, 2.913",
        ("vanilla 256", "4096"),
        ("sliding 256", "4096"),
    ),
    (
        "at 4096 Vanilla B is worse with everything visible than with 256",
        "3.079, 2.964",
        ("vanilla 256", "4096, sees all"),
        ("vanilla 256", "4096"),
    ),
    ("at 4096: Vanilla C above Sliding B", "2.952, 2.913", ("vanilla 1024", "4096"), ("sliding 256", "4096")),
)


def pictures(out: Path, runs: Mapping[str, list[dict]]) -> list[tuple[str, str]]:
    rows: dict[str, list[float]] = {}
    for arm, of in runs.items():
        finished = [run["values"] for run in of if run["values"]]
        for suffix in ("", ", sees 32", ", sees all"):
            keys = [f"{length}{suffix}" for length in LENGTHS if finished and f"{length}{suffix}" in finished[0]]
            if keys:
                rows[arm + suffix] = [float(np.mean([values[key] for values in finished])) for key in keys]
    width = max(map(len, rows.values()))
    captions = []
    for name, title, wanted in (
        ("table-2.png", "Softmax and RoPE: what was seen in training × evaluation length", False),
        ("table-3.png", "Sigmoid: positions × evaluation length", True),
    ):
        chosen = {arm: row for arm, row in rows.items() if arm.startswith("sigmoid") == wanted}
        if chosen:
            loss_heat_map(
                [row + [np.nan] * (width - len(row)) for row in chosen.values()],
                list(chosen),
                [str(length) for length in LENGTHS[:width]],
                out / name,
                title=title,
                column_title="Tokens a row in evaluation",
            )
            captions.append((name, f"{title}; held-out loss in nats a token, mean over the seeds"))
    # Rows of 32 have another loss than rows of 256, whatever the model.
    curves = {
        arm: [run["loss"] for run in of]
        for arm, of in runs.items()
        if "vanilla" not in arm and "256" not in arm and all(run["values"] for run in of)
    }
    if curves:
        training_curves(curves, BIN, out / "loss.png", title="Window 32, rows of 256", ylabel="Training loss (nats)")
        captions.append(("loss.png", "Training loss, window 32 and rows of 256, mean and range over the seeds"))
    return captions


def held_out_loss(model: Decoder, pieces: Sequence[Sequence[int]], length: int) -> float:
    """Mean loss in nats a token over the pieces, each cut into passes of `length`: the same tokens at every length."""
    size = len(pieces[0]) - 1
    passes = [perplexity(model, p, context=length, batch_size=max(1, size // length)) for p in pieces]
    return float(np.mean([one.token_nll.mean() for one in passes]))
