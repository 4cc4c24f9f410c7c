"""Greedy selection of single KV heads: what `select.nll` does with layers, led by a gradient in every round.

All heads windowed, one gradient says of every head how fast the answers' loss falls as it is opened (`select.gates`).
The heads of largest gain are scored one at a time, the best stay full, and the next round asks again beside them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from swa_jax.select.evaluator import MaskEvaluator
from swa_jax.select.nll import GRADIENT_PASSES, TRIED, shares
from swa_jax.select.task import Ranking

ROUNDS = 16  # at most: where more heads stay full, a round takes several


def greedy_heads(
    evaluate: MaskEvaluator,
    count: int,
    *,
    tried: int = TRIED,
    rounds: int = ROUNDS,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> Ranking:
    """The `count` heads that help the answers most, each beside those before it.

    Args:
      evaluate: scores a mask by the answers' likelihood.
      tried: how many heads a round scores, and one more for each further head that it takes.
      rounds: the most there may be.
      progress: called with (passes done, passes expected).
    """
    takes = shares(count, rounds)
    total = sum(GRADIENT_PASSES + tried + take - 1 for take in takes)
    done = 0

    def advance(passes: int) -> None:
        nonlocal done
        done += passes
        progress(done, total)

    found, gradients = Ranking([], evaluate.shape, {}), []
    full = np.zeros(evaluate.shape, bool)
    for take in takes:
        gradient = evaluate.gate_gradient(full)
        advance(GRADIENT_PASSES)
        order = np.argsort(np.where(full, np.inf, -gradient), axis=None, kind="stable")
        named = order[: min(tried + take - 1, int((~full).sum()))]
        gains = []
        for head in named:
            opened = full.copy()
            opened.flat[head] = True
            gains.append(evaluate(opened).log_likelihood)
            advance(1)
        for place in np.argsort(-np.array(gains), kind="stable")[:take]:
            layer, head = np.unravel_index(named[place], evaluate.shape)
            found.order.append((int(layer), int(head)))
            full[layer, head] = True
        gradients.append(gradient.tolist())
    return found._replace(provenance={"gradients": gradients})
