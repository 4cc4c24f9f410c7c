"""SwiAttn's ablations (its Table 4) on models of chains: arms, claims and a picture; what is measured is that of
compare_swiattn_chains.py.

A variant of Eq. 8 changes how strong the regulariser is on average, and its form: which tokens it presses most. With
the same base, as in the paper, the two are mixed up. So some variants have other bases too, and the picture shows the
answers against the full-attention ratio.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import compare_swiattn_chains
import numpy as np

from swa_jax.report.style import GREY, HIGHLIGHTS, new_figure, percent_axis, save, styled

CONFIG = compare_swiattn_chains.CONFIG
BASE = compare_swiattn_chains.BASE
TINY = compare_swiattn_chains.TINY
measure = compare_swiattn_chains.measure


def _arm(base: float = 10.0, **changes: float | bool) -> tuple[str, ...]:
    settings = {"base": base, **changes}
    return ("method=swiattn", *(f"switch_loss.{name}={str(value).lower()}" for name, value in settings.items()))


ARMS = {
    "swiattn": _arm(),
    "V1, gamma = base": _arm(adaptive=False),
    "V2, no NLL": _arm(nll=0.0),
    "V3, alpha 10": _arm(alpha=10.0),
    "V4, alpha 1": _arm(alpha=1.0),
    "V5, alpha 0": _arm(alpha=0.0),
    "V6, eps 0.2": _arm(eps=0.2),
    "V7, eps 0.01": _arm(eps=0.01),
    "swiattn, base 100": _arm(100.0),
    "V1, gamma = base = 1": _arm(1.0, adaptive=False),
    "V1, gamma = base = 0.1": _arm(0.1, adaptive=False),
    "V5, alpha 0, base 1": _arm(1.0, alpha=0.0),
    "V5, alpha 0, base 0.1": _arm(0.1, alpha=0.0),
}
COLUMNS = {
    "text loss": "held-out loss",
    "right": "chains right",
    **{key: title for key, title in compare_swiattn_chains.COLUMNS.items() if key.startswith("right, ")},
    "answer loss": "answer loss",
    "full ratio": "full ratio, text",
    "full ratio, prompts": "full ratio, chains",
    "full ratio, far hops": "full ratio, hops, far",
}


KEYS = "full ratio, prompts"
# The paper has an average of three summaries, of SwiAttn 26.2.
PAPER = {
    "V1, gamma = base": "24.9",
    "V2, no NLL": "25.3",
    "V3, alpha 10": "25.2",
    "V4, alpha 1": "24.9",
    "V5, alpha 0": "24.7",
    "V6, eps 0.2": "25.8",
    "V7, eps 0.01": "25.1",
}
CLAIMS = tuple(
    (
        f"right, SwiAttn above {arm}",
        f"26.2, {PAPER[arm]}" if arm in PAPER else "-",
        ("swiattn", "right"),
        (arm, "right"),
    )
    for arm in ARMS
    if arm != "swiattn"
)


@styled
def pictures(out: Path, runs: Mapping[str, list[dict]]) -> list[tuple[str, str]]:
    figure = new_figure(6.4, 4.2, "SwiAttn's regulariser: answers against the keys that are read")
    axes = figure.subplots()
    forms = ("swiattn", "V1", "V2", "V3", "V4", "V5", "V6", "V7")
    for form, color, marker in zip(forms, (*HIGHLIGHTS, GREY, GREY), "os^Dv<>P", strict=True):
        of = [run for arm, of in runs.items() if arm.split(",")[0] == form for run in of]
        points = [[run["values"][key] for run in of if key in run["values"]] for key in (KEYS, "right")]
        axes.scatter(*100 * np.array(points), color=color, marker=marker, label=form)
    percent_axis(axes)
    axes.set_xlabel("tokens of chains that take full attention (%), mean over layers")
    axes.set_ylabel("right answers (%)")
    axes.legend(ncols=2)
    save(figure, out / "ablations.png")
    return [("ablations.png", "Right answers against the full-attention ratio, a point for each model and variant")]
