"""Whether examples can tell patterns apart, which is asked before a search spends hours on them."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from swa_jax.base.estimates import paired_accuracy, paired_bootstrap

By = Literal["answers", "loss"]  # what is scored: answers that are right, or the answers' loss
LEAST_RIGHT = 0.5  # of the answers, with full attention: below, what windows cost is lost in what the model cannot do

_EASIER = (
    "take a task that the model can do: shorter prompts (--length), fewer keys (--keys), or its chat template (--chat)"
)
_LONGER = "take longer prompts or a smaller window, or more examples"


class Doubt(NamedTuple):
    """Why a choice by some examples would mean nothing, and what would; both go into sentences."""

    reason: str
    advice: str


def weakness(right: ArrayLike) -> Doubt | None:
    """The doubt about a model that, with full attention, gets less than half of the answers `right` [N]."""
    right = np.asarray(right, np.float64)
    if right.mean() >= LEAST_RIGHT:
        return None
    reason = f"with full attention the model itself gets {right.mean():.0%} of the {right.size} answers right"
    return Doubt(reason, _EASIER)


def indifference(full: ArrayLike, windowed: ArrayLike, by: By) -> Doubt | None:
    """The doubt about examples whose scores [N] do not differ beyond chance between full attention and windows.

    Args:
      full, windowed: 1 and 0 for right and wrong answers, or the answers' losses.
    """
    if by == "answers":
        gap = paired_accuracy(full, windowed)
        shares = [f"{np.asarray(scores, np.float64).mean():.0%}" for scores in (windowed, full)]
        found = f"windows in every layer get {shares[0]} of the answers right and full attention {shares[1]}"
    else:
        gap = paired_bootstrap(windowed, full)
        found = f"windows in every layer lose {gap.mean:.3f} nats a token against full attention"
    if gap.low is not None and gap.low > 0:
        return None
    return Doubt(f"{found}, no difference beyond chance on {np.size(full)} examples", _LONGER)


def doubt(full: ArrayLike, windowed: ArrayLike, by: By) -> Doubt | None:
    """Why a choice by these scores [N] would mean nothing; None where it means something. Arguments as above."""
    found = weakness(full) if by == "answers" else None
    found = found or indifference(full, windowed, by)
    if found is None or by == "loss":
        return found
    return found._replace(advice=f"{found.advice}, or choose by the answers' loss (--by loss, or a method by NLL)")
