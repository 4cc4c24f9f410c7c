"""Seconds of a step's attention kernels by type of layer: visible keys, at what the very calls reach of the peak.

What a call reaches follows from its static cycles (`pallas_kernels.kernel_cycles`): by chip, pass, window, head_dim and
packing. Calls that were not measured have the share of the peak that `swa_jax.chips` gives their chip.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pallas_kernels.kernel_cycles import Call, find_cost
from swa_jax.chips import CHIPS
from swa_jax.model.config import ModelConfig
from swa_jax.model.flops import attention_flops_by_kind, visible_keys
from swa_jax.model.layer_types import SWITCH
from swa_jax.model.pattern import AttentionPattern
from swa_jax.plan.timeline import Passes

BACKWARD = 2.5  # the backward pass has five matrix products of a tile where the forward pass has two


class Kernels(NamedTuple):
    """Of a token at each position of a row: [T] each, in the order of the row."""

    flops: dict[str, Passes]  # by type of layer
    seconds: dict[str, Passes]
    measured: dict[str, float]  # calls by the table, and the share of the peak that they reach
    assumed: dict[str, float]  # calls that it lacks


def kernels(
    chip: str,
    model: ModelConfig,
    pattern: AttentionPattern,
    positions: np.ndarray,
    *,
    forward_ratio: float = 1.0,
    backward_ratio: float = 1.0,
    packed: bool = True,
) -> Kernels:
    """Operations and seconds of the queries at `positions` of one document, on a device that has all heads.

    Args:
      chip: of `CHIPS`, such as "v5e".
      forward_ratio, backward_ratio: share of the tokens that routed layers send to full attention.
    """
    reached = _Reached(chip, model, pattern, packed)
    passes = {
        "forward": attention_flops_by_kind(model, pattern, positions, forward_ratio),
        "backward": attention_flops_by_kind(model, pattern, positions, backward_ratio),
    }
    flops: dict[str, Passes] = {}
    seconds: dict[str, Passes] = {}
    for kind, forward in passes["forward"].items():
        backward = passes["backward"][kind]
        flops[kind] = Passes(sum(forward), BACKWARD * sum(backward))
        both = kind == SWITCH and forward_ratio == 1  # one kernel computes both branches
        seconds[kind] = Passes(
            sum(forward) * reached.seconds("routed", "forward")
            if both
            else forward.window * reached.seconds("window", "forward", forward.window)
            + forward.others * reached.seconds("full", "forward", forward.others),
            BACKWARD
            * (
                backward.window * reached.seconds("window", "backward", backward.window)
                + backward.others * reached.seconds("full", "backward", backward.others)
            ),
        )
    return Kernels(flops, seconds, reached.measured, reached.assumed)


class _Reached:
    """Seconds of an operation by call, and which calls were measured."""

    def __init__(self, chip: str, model: ModelConfig, pattern: AttentionPattern, packed: bool):
        self.chip, self.model, self.pattern, self.packed = chip, model, pattern, packed
        self.measured: dict[str, float] = {}
        self.assumed: dict[str, float] = {}

    def seconds(self, what: str, which: str, flops: np.ndarray | None = None) -> float:
        """Of one operation of "window", "full" or "routed" attention; none is looked up where there are none."""
        if flops is not None and not flops.any():
            return 0.0
        chip = CHIPS[self.chip]
        assert chip.target is not None
        name, share = self._share(what, which)
        if share is None:
            share = self.assumed[name] = chip.target.kernel_share[which == "backward"]
        else:
            self.measured[name] = share
        return 1 / (chip.peak_flops * share)

    def _share(self, what: str, which: str) -> tuple[str, float | None]:
        """What the call is called, and the share of the peak that its static cycles come to; None: not measured."""
        chip, pattern, D = CHIPS[self.chip], self.pattern, self.model.head_dim
        assert chip.target is not None
        sigmoid = self.model.attention_activation == "sigmoid"
        # The measured functions of sigmoid attention have no segment ids, full attention no sink tokens.
        function = f"{'sigmoid' if sigmoid and what == 'window' else what}_{which}"
        packed = self.packed and not function.startswith("sigmoid")
        sinks = 0 if what == "full" else pattern.num_sink_tokens
        window = None if what == "full" else pattern.sliding_window
        words = [f"head_dim {D}"] + [f"window {window}"] * (window is not None) + ["packed"] * packed
        name = f"{function} ({', '.join(words + [f'{sinks} sink tokens'] * (sinks > 0))})"
        cost = None
        if not (sigmoid and what != "window"):
            cost = find_cost(Call(self.chip, function, D, packed, sinks), window)
        if cost is None:
            return name, None
        seen = visible_keys(np.arange(cost.length), window if what == "window" else None, sinks)
        flops = 4.0 * D * float(seen.mean()) * 1024 * (BACKWARD if which == "backward" else 1)
        cycles = cost.cycles / chip.target.num_cores  # which share the heads
        return name, flops / (cycles * chip.peak_flops / (chip.target.gigahertz * 1e9))
