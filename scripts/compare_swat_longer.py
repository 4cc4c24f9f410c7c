"""SWAT's main rows at four times the tokens of compare_swat.py, with Muon and with the paper's AdamW: which of its
statements change when a model is trained for longer, or as in the paper. What is measured is that of compare_swat.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import compare_swat

from swa_jax.report import training_curves

CONFIG = compare_swat.CONFIG
BASE = compare_swat.BASE
TINY = compare_swat.TINY
COLUMNS = {name: title for name, title in compare_swat.COLUMNS.items() if name.isdigit()}
measure = compare_swat.measure

LONGER = ("stages.0.steps=2000",)
# The best of 0.002, 0.005 and 0.012 after 200 steps of "sliding 32" on one seed: training loss 5.27, 5.00, 5.13.
ADAMW = ("optimizer.name=adamw", "optimizer.learning_rate=0.005")
BY_MUON = ("sliding 32", "sigmoid RoPE", "sigmoid ALiBi (-)", "sigmoid AliRope (-)", "sigmoid AliRope (-+)")
BY_ADAMW = ("sliding 32", "sigmoid RoPE", "sigmoid AliRope (-+)")
ARMS = {f"{arm}, Muon": (*compare_swat.ARMS[arm], *LONGER) for arm in BY_MUON} | {
    f"{arm}, AdamW": (*compare_swat.ARMS[arm], *LONGER, *ADAMW) for arm in BY_ADAMW
}
# (what is said, the paper's figures, higher, lower, the optimizers that both were trained with)
_BOTH = ("Muon", "AdamW")
_SAID = (
    ("sigmoid for softmax without ALiBi degrades", "-", "sigmoid RoPE", "sliding 32", _BOTH),
    ("ALiBi mends it: RoPE above AliRope (-+), both sigmoid", "-", "sigmoid RoPE", "sigmoid AliRope (-+)", _BOTH),
    ("softmax RoPE above sigmoid AliRope (-+)", "-", "sliding 32", "sigmoid AliRope (-+)", _BOTH),
    ("ALiBi mends it: RoPE above ALiBi (-), both sigmoid", "-", "sigmoid RoPE", "sigmoid ALiBi (-)", ("Muon",)),
    ("No. 3, 4: softmax RoPE above sigmoid ALiBi (-)", "3.014, 3.007", "sliding 32", "sigmoid ALiBi (-)", ("Muon",)),
    ("ALiBi mends it: RoPE above AliRope (-), both sigmoid", "-", "sigmoid RoPE", "sigmoid AliRope (-)", ("Muon",)),
    ("softmax RoPE above sigmoid AliRope (-)", "-", "sliding 32", "sigmoid AliRope (-)", ("Muon",)),
    (
        "AliRope (-+) above AliRope (-)",
        "average accuracy 45.85, 46.88",
        "sigmoid AliRope (-+)",
        "sigmoid AliRope (-)",
        ("Muon",),
    ),
)
CLAIMS = tuple(
    (f"{said}, {by}", figures, (f"{higher}, {by}", "4096"), (f"{lower}, {by}", "4096"))
    for said, figures, higher, lower, optimizers in _SAID
    for by in optimizers
)


def pictures(out: Path, runs: Mapping[str, list[dict]]) -> list[tuple[str, str]]:
    curves = {arm: [run["loss"] for run in of] for arm, of in runs.items() if all(run["values"] for run in of)}
    if not curves:
        return []
    title = "Window 32, rows of 256, 4.1M tokens"
    training_curves(curves, compare_swat.BIN, out / "loss.png", title=title, ylabel="Training loss (nats)")
    return [("loss.png", "Training loss with window 32 and rows of 256, mean and range over the seeds")]
