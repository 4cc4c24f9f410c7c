"""Operations and time of a compiled step: XLA's cycles, attention kernels by layer type, collectives as scheduled."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np

from swa_jax.base.chips import CHIPS, TARGETS, Target
from swa_jax.model.attention import AROUND_ATTENTION
from swa_jax.model.config import ModelConfig
from swa_jax.model.flops import train_flops_per_token
from swa_jax.model.layer_types import SWITCH
from swa_jax.model.lora import LoraConfig
from swa_jax.model.pattern import AttentionPattern
from swa_jax.plan import hlo, timeline
from swa_jax.plan.collectives import Collective
from swa_jax.plan.kernels import busiest_device, kernels
from swa_jax.plan.timeline import Passes

Step = Literal["train", "prefill", "decode"]
ROUTED_SHARE = 0.13  # of the tokens, to full attention, after SwiAttn's training (paper, Figure 4)


TEACHER = "teacher"


class StepWork(NamedTuple):
    """What the operations and the time of a step depend on, beside its program."""

    step: Step
    chip: str  # of `CHIPS`, such as "v5e"
    model: ModelConfig
    pattern: AttentionPattern
    lora: LoraConfig | None
    remat: str
    rows: int  # of the batch, on all devices
    length: int
    mesh: dict[str, int]  # devices along each axis
    slices: int
    zigzag: bool  # whether rows lie in zig-zag order over `context`
    teacher: AttentionPattern | None = None  # of a forward pass beside the step's own

    @property
    def devices(self) -> int:
        return int(np.prod(list(self.mesh.values())))

    @property
    def target(self) -> Target:
        return TARGETS[self.chip]


class AttentionCost(NamedTuple):
    """Operations and seconds of one chip's attention in a step."""

    flops: Passes  # of all kernels
    seconds: dict[str, Passes]  # by type of layer, a teacher's as TEACHER, on the device that sees the most keys
    busiest: float  # how many times the mean that device's are
    measured: dict[str, float]  # as in `kernels.Kernels`
    assumed: dict[str, float]


def attention_of(work: StepWork) -> AttentionCost:
    """Operations and seconds of the attention kernels."""
    positions = np.arange(work.length)
    if work.step == "train":
        found = kernels(work.chip, work.model, work.pattern, positions, backward_ratio=ROUTED_SHARE)
        queries = work.rows * work.length / work.devices
        again = 2 if work.remat == "layer" else 1  # "layer" runs attention's forward kernels again
        times = Passes(queries * again / work.length, queries / work.length)
    else:
        seen = positions if work.step == "prefill" else positions[-1:]
        rows = () if work.step == "decode" else None  # its kernel is none of the table
        found = kernels(work.chip, work.model, work.pattern, seen, forward_ratio=ROUTED_SHARE, rows=rows)
        times = Passes(work.rows, 0)
    flops = Passes(
        *(factor * sum(float(one[i].sum()) for one in found.flops.values()) for i, factor in enumerate(times))
    )
    seconds = {
        kind: Passes(*(factor * float(one[i].sum()) for i, factor in enumerate(times)))
        for kind, one in found.seconds.items()
    }
    by_position = np.sum([one.forward for one in found.flops.values()], axis=0)
    measured, assumed = found.measured, found.assumed
    if work.teacher is not None:
        theirs = kernels(work.chip, work.model, work.teacher, positions)
        once = times.backward  # what remat does not run again
        by_position = by_position + (more := np.sum([one.forward for one in theirs.flops.values()], axis=0))
        flops = flops._replace(forward=flops.forward + once * float(more.sum()))
        lasting = sum(float(one.forward.sum()) for one in theirs.seconds.values())
        seconds[TEACHER] = Passes(once * lasting, 0.0)
        measured, assumed = measured | theirs.measured, assumed | theirs.assumed
    busiest = busiest_device(by_position, work.mesh["context"], work.zigzag) if work.step == "train" else 1.0
    seconds = {kind: Passes(*(busiest * one for one in passes)) for kind, passes in seconds.items()}
    return AttentionCost(flops, seconds, busiest, measured, assumed)


def step_flops(work: StepWork, attention: AttentionCost, matmuls: float) -> dict[str, float]:
    """Operations of one chip. `model` is what the mathematics asks for, the base of MFU; the others are done."""
    wanted = matmuls + attention.flops.forward
    if work.step == "train":
        tokens = work.rows * work.length / work.devices
        wanted = tokens * train_flops_per_token(
            work.model, work.pattern, work.length, ROUTED_SHARE, work.lora, work.teacher
        )
    return {
        "model": wanted,
        "matmuls": matmuls,
        "attention_forward": attention.flops.forward,
        "attention_backward": attention.flops.backward,
    }


def step_time(
    work: StepWork,
    attention: AttentionCost,
    wanted: float,
    program: hlo.HloProgram,
    counts: dict[str, float],
    sends: list[Collective],
    branch_shares: Any,
) -> dict[str, Any]:
    """Seconds of a step and of its parts, with the assumptions; `wanted`: the model's operations of one chip."""
    chip, peak = work.target, CHIPS[work.chip].peak_flops
    passes = Passes(*(sum(one[i] for one in attention.seconds.values()) for i in range(2)))
    clock = chip.gigahertz * 1e9
    bytes_a_cycle = chip.hbm_bytes / clock
    parts = hlo.cycles_by_part(program, counts, AROUND_ATTENTION, bytes_a_cycle)
    seconds_by_part = {name: cycles / clock for name, cycles in parts.items()}
    operations = sum(seconds_by_part.values())
    in_slice = work.devices // work.slices

    def transfer(send: Collective) -> float:
        if send.axes == ("slices",):
            return send.sent_bytes / chip.dcn_bytes
        if send.hops:
            return send.sent_bytes * abs(send.hops) / chip.link_bytes
        rings = send.rings or 2 * (chip.torus if send.group == in_slice else 1)
        return send.sent_bytes / (rings * chip.link_bytes)

    own = timeline.work_of(program, counts, clock, bytes_a_cycle, passes)
    elapsed = timeline.play(program, sends, own, transfer, branch_shares)
    network = sum(transfer(send) * send.executions for send in sends)
    hidden, shown = max(operations + sum(passes), network), operations + sum(passes) + network
    tokens = work.rows * (1 if work.step == "decode" else work.length)
    return {
        "seconds": elapsed.total,
        "seconds_hidden": hidden,
        "seconds_shown": shown,
        "xla_seconds": operations,
        "xla_seconds_by_part": seconds_by_part,
        "kernel_seconds": sum(passes),
        "kernel_seconds_by_layer_type": {kind: one._asdict() for kind, one in attention.seconds.items()},
        "collective_seconds": network,
        "collective_seconds_waited": elapsed.waiting,
        "tokens_per_second": [tokens / shown, tokens / hidden],
        "mfu": [wanted / (peak * shown), wanted / (peak * hidden)],
        "tokens_per_second_scheduled": tokens / elapsed.total,
        "mfu_scheduled": wanted / (peak * elapsed.total),
        "assumptions": _assumptions(work, attention),
    }


def _assumptions(work: StepWork, attention: AttentionCost) -> list[str]:
    chip, context = work.target, work.mesh["context"]
    lines = [
        "matrix products and other operations of XLA: the TPU compiler's own estimates of cycles, at "
        f"{chip.gigahertz} GHz"
    ]
    if attention.measured:
        lines.append(
            f"attention kernels by static cycles of the same calls, as shares of the bf16 peak on visible keys: "
            f"{_shares(attention.measured)}"
        )
    if attention.assumed:
        lines.append(
            "attention kernels whose time is ASSUMED, neither measured nor simulated, at the share of the peak that "
            f"the chip's kernels have at window 1024 and head_dim 128: {_shares(attention.assumed)}"
        )
    lines.append(
        "collectives: as many rings as the program names, otherwise rings in both directions, over one axis of the "
        f"torus, or over all {chip.torus} where every device takes part; shifts along an axis in one direction, link "
        f"by link; {chip.link_bytes / 1e9:.0f} GB/s a link and direction. What runs beside them is read from the "
        "compiled schedule; 'seconds_hidden' has them run wholly beside the rest, 'seconds_shown' not at all"
    )
    if work.slices > 1:
        lines.append(f"between slices: {8 * chip.dcn_bytes / 1e9:.0f} Gb/s a device")
    if attention.busiest > 1:
        lines.append(
            f"the step waits for the busiest of {context} devices along the context, whose attention is "
            f"{attention.busiest:.2f} times the mean"
        )
    if SWITCH in work.pattern.layer_types:
        lines.append(f"routed layers send {ROUTED_SHARE:.0%} of the tokens to full attention")
    if work.model.num_experts:
        lines.append(
            "tokens are spread evenly over the experts; of the experts' products the count is in it, the time is not"
        )
    if work.step == "decode":
        lines.append("the time that decode kernels take to read the caches is not in it")
    return lines


def _shares(calls: dict[str, float]) -> str:
    return ", ".join(f"{name} {share:.0%}" for name, share in calls.items())
