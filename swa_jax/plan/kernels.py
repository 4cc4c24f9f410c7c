"""Seconds of attention kernels by type of layer: visible keys, at the share of the peak that the very calls reach.

What a call reaches follows from its static cycles (`swa_jax.plan.kernel_cycles`): by chip, pass, window, head_dim,
packing and heads of a group. A call that was not measured reaches the share that `swa_jax.base.chips` gives its chip;
`missing_calls` says which calls those are, so that they can be simulated first.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from pallas_kernels.tpu.tile.pairs import pairs_pay
from pallas_kernels.tpu.tile.rotation import rotates_queries
from swa_jax.base.chips import CHIPS, TARGETS
from swa_jax.model.config import ModelConfig
from swa_jax.model.flops import attention_flops_by_kind, visible_keys
from swa_jax.model.layer_stacks import layer_stacks
from swa_jax.model.layer_types import HYBRID, SWITCH
from swa_jax.model.pattern import AttentionPattern
from swa_jax.model.sequence_order import zigzag
from swa_jax.plan.kernel_cycles import ROTATING, MeasuredCall, MissingCall, Row, find_cost

BACKWARD = 2.5  # the backward pass has five matrix products of a tile where the forward pass has two


class ByPass(NamedTuple):
    """A number for the forward and one for the backward pass, of the query at each position [T]."""

    forward: np.ndarray
    backward: np.ndarray


class Kernels(NamedTuple):
    """What a query costs in all layers of a type, all heads together."""

    flops: dict[str, ByPass]  # by type of layer
    seconds: dict[str, ByPass]
    measured: dict[str, float]  # the share of the peak of each call whose cycles are in the table
    assumed: dict[str, float]  # and of the others
    missing: dict[str, MissingCall]  # those of the others that can be simulated


def missing_calls(
    chip: str, model: ModelConfig, pattern: AttentionPattern, ratio: float, step: str
) -> list[MissingCall]:
    """The calls of a step ("train" or "prefill") that the table of cycles lacks and that can be simulated.

    Args:
      ratio: share of the tokens that routed layers send to full attention.
    """
    far = np.array([2 * (pattern.sliding_window or 1)])  # sees keys outside the window too
    found = kernels(
        chip, model, pattern, far, forward_ratio=1 if step == "train" else ratio, backward_ratio=ratio
    ).missing
    return [one for one in found.values() if step == "train" or one.call.function.endswith("forward")]


def kernels(
    chip: str,
    model: ModelConfig,
    pattern: AttentionPattern,
    positions: np.ndarray,
    *,
    forward_ratio: float = 1.0,
    backward_ratio: float = 1.0,
    rows: Sequence[Row] | None = None,
) -> Kernels:
    """Operations and seconds of the queries at `positions` of one document, on a device that has all heads.

    Args:
      chip: of `CHIPS`, such as "v5e".
      forward_ratio, backward_ratio: share of the tokens that routed layers send to full attention. Where it is 1 in
        the forward pass, as in training, one kernel computes both branches.
      rows: the table of cycles; None: the one that is shipped.
    """
    found = []
    for stack in layer_stacks(model):  # whose heads have one shape
        part = pattern.of_layers(stack.layers)
        found.append(_of_alike(chip, stack.config, part, positions, (forward_ratio, backward_ratio), rows))
    return functools.reduce(_both, found)


def _both(one: Kernels, other: Kernels) -> Kernels:
    def added(a: dict[str, ByPass], b: dict[str, ByPass]) -> dict[str, ByPass]:
        sums = {kind: ByPass(*map(np.add, a[kind], b[kind])) for kind in a.keys() & b.keys()}
        return a | b | sums

    times = added(one.flops, other.flops), added(one.seconds, other.seconds)
    shares = one.measured | other.measured, one.assumed | other.assumed
    return Kernels(*times, *shares, one.missing | other.missing)


def _of_alike(
    chip: str,
    model: ModelConfig,
    pattern: AttentionPattern,
    positions: np.ndarray,
    ratios: tuple[float, float],
    rows: Sequence[Row] | None,
) -> Kernels:
    """`kernels` of layers that are alike."""
    forward_ratio, backward_ratio = ratios
    reached = _Reached(chip, model, pattern, rows)
    forwards = attention_flops_by_kind(model, pattern, positions, forward_ratio)
    backwards = attention_flops_by_kind(model, pattern, positions, backward_ratio)
    flops, seconds = dict[str, ByPass](), dict[str, ByPass]()
    for kind, forward in forwards.items():
        backward = backwards[kind]
        flops[kind] = ByPass(forward.window + forward.others, BACKWARD * (backward.window + backward.others))
        if kind == SWITCH and forward_ratio == 1:
            first = reached.seconds("routed", "forward", flops[kind].forward)
        else:
            first = reached.seconds("window", "forward", forward.window)
            first = first + reached.seconds("full", "forward", forward.others)
        second = reached.seconds("window", "backward", BACKWARD * backward.window)
        others = BACKWARD * backward.others
        # Routed rows are rotated as they are moved.
        second = second + reached.seconds("full", "backward", others, rotated=kind == SWITCH)
        if kind == SWITCH:
            layers = pattern.layer_types.count(SWITCH)
            second = second + layers * reached.moving(backward_ratio)
        seconds[kind] = ByPass(first, second)
    return Kernels(flops, seconds, reached.measured, reached.assumed, reached.missing)


class _Reached:
    """The share of the peak that each call reaches."""

    def __init__(self, chip: str, model: ModelConfig, pattern: AttentionPattern, rows: Sequence[Row] | None):
        self.chip, self.target, self.peak = chip, TARGETS[chip], CHIPS[chip].peak_flops
        self.model, self.pattern, self.rows = model, pattern, rows
        self.measured: dict[str, float] = {}
        self.assumed: dict[str, float] = {}
        self.missing: dict[str, MissingCall] = {}

    def seconds(self, what: str, which: str, flops: np.ndarray, *, rotated: bool = False) -> np.ndarray:
        """Of so many operations of "window", "full" or "routed" attention; what has none is not looked up.

        Args:
          rotated: the queries come rotated, so that the kernel has not to do it.
        """
        if not flops.any():
            return flops
        name, share = self._share(what, which, rotated)
        if share is None:
            share = self.assumed[name] = self.target.kernel_share[which == "backward"]
        else:
            self.measured[name] = share
        return flops / (self.peak * share)

    def moving(self, ratio: float) -> float:
        """Seconds a query in which the memory gives the routed rows to their kernel and takes them back, and by which
        rotating them takes longer."""
        target, model = self.target, self.model
        row = 2 * model.num_attention_heads * model.head_dim  # bytes of bfloat16
        cycles = self._rotating("rows") * model.num_attention_heads / 1024 / target.num_cores
        return (4 + 3 * ratio) * row / target.hbm_bytes + cycles / (target.gigahertz * 1e9)

    def _rotating(self, which: str, what: str = "") -> float:
        """Of `ROTATING`, what a kernel takes to rotate the queries; 0 where they come rotated."""
        model, layers = self.model, {*self.pattern.layer_types}
        sizes = model.num_attention_heads, model.num_key_value_heads, model.head_dim, self.pattern.sliding_window
        abreast = 2 if what == "window" and not layers & {HYBRID, SWITCH} and pairs_pay(*sizes) else 1
        return ROTATING[which] / abreast if model.uses_rope and rotates_queries(model.head_dim * abreast) else 0

    def _share(self, what: str, which: str, rotated: bool) -> tuple[str, float | None]:
        """The call in words, and the share of the peak that its static cycles come to; None: not measured."""
        target, D = self.target, self.model.head_dim
        sigmoid = self.model.attention_activation == "sigmoid"
        full = what == "full"
        sinks = 0 if full else self.pattern.num_sink_tokens
        window = None if full else self.pattern.sliding_window
        function = f"{'sigmoid' if sigmoid and what == 'window' else what}_{which}"
        words = [f"head_dim {D}"] + [f"window {window}"] * (not full) + [f"{sinks} sink tokens"] * (sinks > 0)
        name = f"{function} ({', '.join(words)})"
        if (sigmoid and what != "window") or (self.pattern.chunked and not full):
            return name, None
        group = self.model.num_attention_heads // self.model.num_key_value_heads
        # Rows of training have segment ids.
        call = MeasuredCall(self.chip, function, D, True, sinks, group)
        cost = find_cost(call, window, self.rows)
        if cost is None:
            self.missing[name] = MissingCall(call, window)
            return name, None
        seen = visible_keys(np.arange(cost.length), window if what == "window" else None, sinks).mean()
        flops = 4.0 * D * float(seen) * 1024 * (BACKWARD if which == "backward" else 1)
        rotation = 0 if rotated else self._rotating(which, what)
        cycles = (cost.cycles + rotation) / target.num_cores  # which share the heads
        return name, flops / (cycles * self.peak / (target.gigahertz * 1e9))


def busiest_device(by_position: np.ndarray, context: int, zigzagged: bool) -> float:
    """What the busiest of `context` devices has of a row [T] whose tokens they share, as a multiple of the mean."""
    if zigzagged:
        by_position = np.asarray(zigzag(jnp.asarray(by_position)[None], context))[0]
    return float(by_position.reshape(context, -1).mean(axis=1).max() / by_position.mean())
