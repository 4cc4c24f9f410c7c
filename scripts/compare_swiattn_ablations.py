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

from swa_jax.adapt.tasks import HOPS
from swa_jax.data.tokenizer import Tokenizer
from swa_jax.model.decoder import Decoder
from swa_jax.report.style import GREY, HIGHLIGHTS, new_figure, percent_axis, save, styled
from swa_jax.train.loop import TrainConfig

CONFIG = compare_swiattn_chains.CONFIG
BASE = compare_swiattn_chains.BASE
TINY = compare_swiattn_chains.TINY


def _arm(base: float = 10.0, **changes: float | bool) -> tuple[str, ...]:
    settings = {"base": base, **changes}
    return (
        "method=swiattn",
        *(f"switch_loss.{name}={str(value).lower()}" for name, value in settings.items()),
    )


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
    **{f"right, {hops}": f"{hops} hop{'s' if hops > 1 else ''} right" for hops in HOPS},
    "answer loss": "answer loss",
    "full ratio": "full ratio, text",
    "full ratio, prompts": "full ratio, chains",
    "full ratio, far hops": "full ratio, hops, far",
}


def measure(model: Decoder, tokenizer: Tokenizer, config: TrainConfig, tiny: bool) -> dict[str, float]:
    return compare_swiattn_chains.measure(model, tokenizer, config, tiny)


def _claims() -> tuple[tuple[str, str, tuple[str, str], tuple[str, str]], ...]:
    """The paper's own comparison is of an average of three summaries; here it is of answers and of their loss."""
    of_paper = {
        "V1, gamma = base": "24.9", "V2, no NLL": "25.3", "V3, alpha 10": "25.2", "V4, alpha 1": "24.9",
        "V5, alpha 0": "24.7", "V6, eps 0.2": "25.8", "V7, eps 0.01": "25.1",
    }  # fmt: skip
    right = [
        (f"right, SwiAttn above {arm}", f"26.2, {figure}", ("swiattn", "right"), (arm, "right"))
        for arm, figure in of_paper.items()
    ]
    others = [arm for arm in ARMS if arm not in of_paper and arm != "swiattn"]
    return (
        *right,
        *((f"right, SwiAttn above {arm}", "-", ("swiattn", "right"), (arm, "right")) for arm in others),
    )


KEYS = "full ratio, prompts"
CLAIMS = _claims()


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
    return [
        (
            "ablations.png",
            "Right answers against the full-attention ratio, a point for each model and variant",
        )
    ]
