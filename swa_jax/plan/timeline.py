"""Plays the schedule of a compiled program: which collectives run beside other work, and which the step waits for."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import NamedTuple

from swa_jax.plan.collectives import Collective
from swa_jax.plan.hlo import HloProgram, Instruction, calls, is_kernel, own_cycles


class Passes(NamedTuple):
    """Seconds of all attention kernels in a run of the program."""

    forward: float
    backward: float


class Elapsed(NamedTuple):
    """Seconds of a part of the program, once."""

    work: float = 0.0  # operations and kernels
    waiting: float = 0.0  # for collectives, with nothing else to do

    @property
    def total(self) -> float:
        return self.work + self.waiting

    def plus(self, other: Elapsed, times: float = 1.0) -> Elapsed:
        return Elapsed(self.work + times * other.work, self.waiting + times * other.waiting)


def work_of(
    program: HloProgram, counts: dict[str, float], clock: float, bytes_a_cycle: float, kernels: Passes
) -> Callable[[Instruction], float]:
    """Seconds of an instruction: `own_cycles` at `clock` Hz; attention's kernels of a pass share its time alike."""
    runs = [0.0, 0.0]
    for computation in program.computations.values():
        for instruction in computation.instructions.values():
            if is_kernel(instruction):
                runs[is_backward(instruction)] += counts[computation.name]

    def work(instruction: Instruction) -> float:
        if is_kernel(instruction):
            backward = is_backward(instruction)
            return kernels[backward] / runs[backward] if runs[backward] else 0.0
        return own_cycles(instruction, bytes_a_cycle) / clock

    return work


def is_backward(instruction: Instruction) -> bool:
    """Whether a kernel computes gradients, and not again what the forward pass has not kept."""
    return "transpose(" in instruction.attributes and "rematted_computation" not in instruction.attributes


def play(
    program: HloProgram,
    sends: list[Collective],
    work: Callable[[Instruction], float],
    transfer: Callable[[Collective], float],
    branch_shares: Callable[[int], Sequence[float]] | None = None,
) -> Elapsed:
    """A run of the program, instruction after instruction as it is scheduled.

    A collective takes the links of its mesh axes, one collective at a time, and a shift along an axis those in its
    direction; between the instruction that begins it and the one that needs it the device works on. Loops begin with
    idle links.

    Args:
      work: seconds of an instruction itself, without what it calls.
      transfer: seconds of a collective on free links.
    """
    begins, ends = collections.defaultdict(list), collections.defaultdict(list)
    for send in sends:
        begins[send.computation, send.start].append(send)
        ends[send.computation, send.done].append(send)
    known: dict[str, Elapsed] = {}

    def run(name: str) -> Elapsed:
        if name not in known:
            known[name] = once(name)
        return known[name]

    def once(name: str) -> Elapsed:
        computation = program.computations[name]
        elapsed = Elapsed()
        free: dict[tuple[str, int], float] = collections.defaultdict(float)  # when links are
        finished: dict[Collective, float] = {}
        for instruction in computation.instructions.values():
            for send in begins[name, instruction.name]:
                begin = max([elapsed.total, *(free[link] for link in _links(send))])
                finished[send] = begin + transfer(send)
                free |= dict.fromkeys(_links(send), finished[send])
            for send in ends[name, instruction.name]:
                wait = finished.get(send, 0.0) - elapsed.total
                elapsed = elapsed.plus(Elapsed(waiting=max(wait, 0.0)))
            elapsed = elapsed.plus(Elapsed(work(instruction)))
            for called, times in calls(program, computation, instruction, branch_shares):
                if called in program.computations:
                    elapsed = elapsed.plus(run(called), times)
        return elapsed

    return run(program.entry)


def _links(send: Collective) -> list[tuple[str, int]]:
    """By axis and direction."""
    directions = (1, -1) if send.hops == 0 else (1 if send.hops > 0 else -1,)
    return [(axis, direction) for axis in send.axes for direction in directions]
