"""What a compiled program sends between devices: each collective once, with the work that is scheduled beside it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from swa_jax.plan.hlo import Computation, HloProgram, Instruction, called_computation, type_bytes

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all")
# The TPU compiler runs a collective in pieces: fusions of these names begin and end it, and those between carry it on.
_BEGINS, _ENDS = "async-collective-start", "async-collective-done"
_BETWEEN_SLICES = re.compile(r'megascale_transfer_type="(ALL_REDUCE|ALL_GATHER|REDUCE_SCATTER|ALL_TO_ALL)"')


class Collective(NamedTuple):
    """One collective operation of a program, as each device takes part in it."""

    kind: str  # such as "all-gather"
    axes: tuple[str, ...]  # of the mesh; ("slices",) between slices; () where they could not be read
    group: int  # devices that take part
    sent_bytes: float  # by a device each time, as a ring sends them
    executions: float  # in a run of the program
    computation: str  # in which it is scheduled
    start: str  # the instruction that begins it
    done: str  # the one that waits for its end; the same where nothing runs beside it
    hops: int = 0  # how far, and in which direction, where all devices send equally far along one axis
    rings: int = 0  # in one direction each, on links of their own, that share it; 0 where the program does not say

    @property
    def asynchronous(self) -> bool:
        return self.start != self.done


def collectives(
    program: HloProgram, counts: dict[str, float], mesh_shape: dict[str, int], slices: int = 1
) -> list[Collective]:
    """Every collective that runs, in the order of the schedule. Device i is the i-th of the mesh, row-major."""
    inner = _inner_computations(program)
    begun = {  # by the channel: those that fusions begin, and others, also in the body of a loop, carry on
        _channel(operation)
        for computation in program.computations.values()
        for one in computation.instructions.values()
        if one.name.startswith(_BEGINS)
        for _, operation in _operations(program, computation, one)
    }
    found = []
    for computation in program.computations.values():
        if counts[computation.name] and computation.name not in inner:
            for start, done, inside, operation in _begun(program, computation, begun):
                kind, axes, group, size = _measured(inside, operation, mesh_shape, slices)
                sent, hops = _ring_bytes(kind, size, group), _hops(kind, axes, operation, mesh_shape)
                times, where = counts[computation.name], (computation.name, start.name, done.name)
                rings = operation.attributes.count('"phase_rings"')
                found.append(Collective(kind, axes, group, sent, times, *where, hops, rings))
    return found


def _inner_computations(program: HloProgram) -> set[str]:
    """Of fusions and asynchronous wrappers: what they do counts where they are called."""
    return {
        name
        for computation in program.computations.values()
        for instruction in computation.instructions.values()
        if instruction.opcode in ("fusion", "async-start", "async-update", "async-done")
        and (name := called_computation(instruction)) is not None
    }


def _begun(
    program: HloProgram, computation: Computation, begun: set[str]
) -> Iterator[tuple[Instruction, Instruction, Computation, Instruction]]:
    """(first instruction, last instruction, the computation that holds the operation, the operation)."""
    held = [(one, list(_operations(program, computation, one))) for one in computation.instructions.values()]
    # A SparseCore is called before what it shall send is there: it begins where that is given to it.
    sent = {one.operands[0]: one for one, _ in held if one.opcode == "call-update"}
    ends: dict[str, Instruction] = {}  # by what they wait for: the instruction that began it, or its channel
    for instruction, operations in held:
        channels = [_channel(operation) for _, operation in operations]
        if instruction.name.startswith(_ENDS):
            ends |= dict.fromkeys(channels, instruction)
        elif instruction.opcode == "recv-done" and (meeting := _meeting(computation, instruction)):
            ends[meeting] = instruction
        elif instruction.opcode.endswith("-done"):
            ends[instruction.operands[0]] = instruction
    for instruction, operations in held:
        if instruction.name.startswith(_ENDS) or instruction.opcode.endswith("-done"):
            continue
        if instruction.opcode == "send" and (meeting := _meeting(computation, instruction)):
            yield instruction, ends.get(meeting, instruction), computation, instruction
        for inside, operation in operations:
            channel = _channel(operation)
            if instruction.name.startswith(_BEGINS):
                yield instruction, ends.get(channel, instruction), inside, operation
            elif inside is computation or channel not in begun:
                first = sent.get(instruction.name, instruction)
                yield first, ends.get(first.name, first), inside, operation


def _meeting(computation: Computation, instruction: Instruction) -> str | None:
    """Between slices a collective is a `send` and a `recv`: the name under which these two meet."""
    source = computation.instructions[instruction.operands[0]] if instruction.opcode == "recv-done" else instruction
    if _BETWEEN_SLICES.search(source.attributes) is None:
        return None
    found = re.search(r'host_transfer_rendezvous="([^"]*)"', source.attributes)
    return f"meeting {found[1]}" if found else None


def _operations(
    program: HloProgram, computation: Computation, instruction: Instruction
) -> Iterator[tuple[Computation, Instruction]]:
    """The collectives that an instruction is or calls, with the computations that hold them."""
    if instruction.opcode.removesuffix("-start") in KINDS:
        yield computation, instruction
    elif instruction.opcode in ("fusion", "async-start", "async-done", "call-start"):
        inside = program.computations.get(called_computation(instruction) or "")
        if inside is not None:
            for one in inside.instructions.values():
                yield from _operations(program, inside, one)


def _channel(operation: Instruction) -> str:
    found = re.search(r"\bchannel_id=(\d+)", operation.attributes)
    return f"channel {found[1]}" if found else operation.name


def _measured(
    inside: Computation, operation: Instruction, mesh_shape: dict[str, int], slices: int
) -> tuple[str, tuple[str, ...], int, float]:
    """Kind, axes, devices that take part, and the bytes of the result that each ends up with."""
    operands = [type_bytes(inside.instructions[name].type) for name in operation.operands]
    if between := _BETWEEN_SLICES.search(operation.attributes):
        return between[1].lower().replace("_", "-"), ("slices",), slices, operands[0]
    kind = operation.opcode.removesuffix("-start")
    groups = device_groups(operation.attributes, math.prod(mesh_shape.values()))
    size: float = type_bytes(operation.type)
    if operation.opcode.endswith("-start"):  # the type holds operands beside results
        size = sum(operands) if kind in ("collective-permute", "all-reduce") else size - sum(operands)
    if kind == "all-reduce" and _scatters(inside, operation):
        kind = "reduce-scatter"
        size /= max(groups.shape[1], 1)
    return kind, _axes(groups, mesh_shape), groups.shape[1], size


def _scatters(computation: Computation, instruction: Instruction) -> bool:
    """Whether an all-reduce is the TPU compiler's reduce-scatter: a fusion of it with a slice of its result."""
    return "all-reduce-scatter" in computation.name or (
        instruction.opcode == "all-reduce"
        and computation.root.opcode == "dynamic-slice"
        and instruction.name in computation.root.operands
    )


def _ring_bytes(kind: str, result_bytes: float, group: int) -> float:
    """Bytes that a device sends, by the size of the result it ends up with."""
    return {
        "all-gather": result_bytes * (group - 1) / group,
        "reduce-scatter": result_bytes * (group - 1),
        "all-reduce": 2 * result_bytes * (group - 1) / group,
        "all-to-all": result_bytes * (group - 1) / group,
        "collective-permute": result_bytes,
    }[kind]


def device_groups(attributes: str, num_devices: int) -> np.ndarray:
    """The devices of each group [groups, devices] of a collective; of a permutation [pairs, (source, target)]."""
    if pairs := re.search(r"source_target_pairs=\{\{(.*?)\}\}", attributes):
        return _listed(pairs[1])
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}", attributes):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh[1])}
        grid = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
        return _along(grid, list(sizes), re.findall(r"'(\w+)'(?::\((\d+)\)(\d+))?", mesh[2]))
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes)
    if iota:
        shape, dims = (tuple(map(int, iota[i].split(","))) for i in (1, 2))
        devices = np.arange(math.prod(dims)).reshape(dims)
        return (devices.transpose(tuple(map(int, iota[3].split(",")))) if iota[3] else devices).reshape(shape)
    if listed := re.search(r"replica_groups=\{\{(.*?)\}\}", attributes):
        return _listed(listed[1])
    return np.arange(num_devices)[None]  # no groups: all together


def _hops(kind: str, axes: tuple[str, ...], operation: Instruction, mesh_shape: dict[str, int]) -> int:
    if kind != "collective-permute" or len(axes) != 1 or axes[0] not in mesh_shape:
        return 0
    pairs = device_groups(operation.attributes, math.prod(mesh_shape.values()))
    places = np.unravel_index(pairs, tuple(mesh_shape.values()))[list(mesh_shape).index(axes[0])]  # [pairs, 2]
    devices = mesh_shape[axes[0]]
    shifts = set(((places[:, 1] - places[:, 0]) % devices).tolist())
    shift = shifts.pop()
    return 0 if shifts else shift if shift <= devices / 2 else shift - devices


def _listed(text: str) -> np.ndarray:
    return np.array([list(map(int, group.split(","))) for group in re.split(r"\}\s*,\s*\{", text)])


def _along(grid: np.ndarray, names: list[str], wanted: list[tuple[str, str, str]]) -> np.ndarray:
    """Groups along axes of a grid, or along the part (before, size) of one that `'axis':(before)size` names."""
    split: list[int] = []
    chosen: list[int] = []
    for name, size in zip(names, grid.shape, strict=True):
        parts = [(int(before), int(part)) for axis, before, part in wanted if axis == name and before]
        if any(axis == name and not before for axis, before, _ in wanted):
            chosen.append(len(split))
            split.append(size)
            continue
        done = 1
        for before, part in sorted(parts):
            if before > done:
                split.append(before // done)
            chosen.append(len(split))
            split.append(part)
            done = before * part
        split.append(size // done)
    kept = [i for i in range(len(split)) if i not in chosen]
    moved = grid.reshape(split).transpose(*kept, *chosen)
    return moved.reshape(-1, math.prod(split[i] for i in chosen))


def _axes(groups: np.ndarray, mesh_shape: dict[str, int]) -> tuple[str, ...]:
    """The mesh axes along which the devices of a group differ."""
    if groups.size == 0 or groups.max() >= math.prod(mesh_shape.values()):
        return ()
    places = np.stack(np.unravel_index(groups, tuple(mesh_shape.values())))  # [axes, groups, devices]
    varies = (places != places[:, :, :1]).any(axis=(1, 2))
    return tuple(name for name, differs in zip(mesh_shape, varies, strict=True) if differs)
