"""Reads a compiled program (XLA's HLO text): how often each part runs, what it multiplies, what it sends.

XLA's own cost analysis counts the body of a loop once and does not say which collective runs how often; this does.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

ITEM_BYTES = {
    "pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8,
    "u64": 8, "f64": 8,
}  # fmt: skip
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all")
NO_ESTIMATE = 2**62  # cycles: what stands for "not known"
_ARRAY = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,]*)\]")
_CALLED = re.compile(r"\b(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')


class Instruction(NamedTuple):
    name: str
    type: str  # such as bf16[2,128]{1,0}, or a tuple of them in brackets
    opcode: str
    operands: tuple[str, ...]  # names
    attributes: str
    root: bool


class Computation(NamedTuple):
    name: str
    instructions: dict[str, Instruction]

    @property
    def root(self) -> Instruction:
        return next(i for i in reversed(self.instructions.values()) if i.root)


class Program(NamedTuple):
    computations: dict[str, Computation]
    entry: str


class Collective(NamedTuple):
    """One collective operation of a program, as each device takes part in it."""

    kind: str
    axes: tuple[str, ...]  # of the mesh, that it runs over; () where they could not be read
    group: int  # devices that take part
    sent_bytes: float  # by a device each time, as a ring sends them
    executions: float  # a run of the program
    op_name: str  # where in the model it comes from


# ---- reading ----


def parse(text: str) -> Program:
    """A program from `compiled.as_text()`."""
    computations: dict[str, Computation] = {}
    entry, current = "", None
    for line in text.splitlines():
        if line.startswith(("%", "ENTRY ")):
            name = line.removeprefix("ENTRY ").split(" ", 1)[0].lstrip("%")
            current = computations[name] = Computation(name, {})
            if line.startswith("ENTRY "):
                entry = name
        elif current is not None and line.startswith("  ") and " = " in line:
            instruction = _instruction(line)
            current.instructions[instruction.name] = instruction
    return Program(computations, entry)


def _instruction(line: str) -> Instruction:
    left, right = line.strip().split(" = ", 1)
    end = _closing(right, 0) if right.startswith("(") else right.index(" ") - 1
    type_, rest = right[: end + 1], right[end + 2 :]
    opening = rest.index("(")
    closing = _closing(rest, opening)
    operands = re.findall(r"%([\w.\-]+)", rest[opening : closing + 1])
    name = left.removeprefix("ROOT ").lstrip("%")
    attributes = rest[closing + 1 :] if operands else rest[opening:]  # of a constant: its value
    return Instruction(name, type_, rest[:opening], tuple(operands), attributes, left.startswith("ROOT "))


def _closing(text: str, opening: int) -> int:
    depth = 0
    for i in range(opening, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i
    raise ValueError(f"no bracket closes {text[opening : opening + 40]!r}")


def shapes(type_: str) -> list[tuple[str, tuple[int, ...]]]:
    """The arrays of a type: (dtype, sizes) each."""
    return [(t, tuple(map(int, d.split(","))) if d else ()) for t, d in _ARRAY.findall(type_)]


def type_bytes(type_: str) -> int:
    """The bytes of all arrays of a type, without padding; a dtype that is not known counts a byte an element."""
    return sum(ITEM_BYTES.get(dtype, 1) * math.prod(sizes) for dtype, sizes in shapes(type_))


# ---- how often ----


def executions(
    program: Program, branch_shares: Callable[[int], Sequence[float]] | None = None
) -> dict[str, float]:
    """Runs of each computation in a run of the program.

    Args:
      branch_shares: how often each of n branches is taken, as shares of 1; None: all alike.
    """
    counts = dict.fromkeys(program.computations, 0.0)

    def visit(name: str, times: float) -> None:
        counts[name] += times
        for instruction in program.computations[name].instructions.values():
            for called, share in _called(program, program.computations[name], instruction, branch_shares):
                if called in program.computations:
                    visit(called, times * share)

    visit(program.entry, 1.0)
    return counts


def _called(
    program: Program,
    computation: Computation,
    instruction: Instruction,
    branch_shares: Callable[[int], Sequence[float]] | None,
) -> Iterator[tuple[str, float]]:
    names = _CALLED.findall(instruction.attributes)
    if instruction.opcode == "while":
        trips = trip_count(program, computation, instruction)
        trips = 1 if trips is None else trips
        yield from ((name, trips) for name in names)
    elif instruction.opcode == "conditional":
        listed = _BRANCHES.search(instruction.attributes)
        # true_computation comes first in the text and is the later branch of two.
        branches = [b.strip().lstrip("%") for b in listed[1].split(",")] if listed else names[::-1]
        shares = branch_shares(len(branches)) if branch_shares else [1 / len(branches)] * len(branches)
        yield from zip(branches, shares, strict=True)
    elif instruction.opcode not in ("all-reduce", "all-reduce-start", "reduce-scatter", "reduce", "scatter"):
        yield from ((name, 1.0) for name in names)


def trip_count(program: Program, outside: Computation, loop: Instruction) -> int | None:
    """Times that a loop of the computation `outside` runs whose condition is `counter < limit` and whose body adds a
    constant to the counter; None for any other."""
    condition, body = (
        program.computations[re.findall(rf"\b{which}=%?([\w.\-]+)", loop.attributes)[0]]
        for which in ("condition", "body")
    )
    start = outside.instructions[loop.operands[0]]
    if start.opcode != "tuple":
        return None

    def value(inside: Computation, name: str) -> int | None:
        """An integer that is known: a constant, or what the loop carries unchanged from one."""
        found = inside.instructions[name]
        if found.opcode == "constant":
            number = re.match(r"\((\d+)\)", found.attributes)
            return int(number[1]) if number else None
        if found.opcode == "copy":
            return value(inside, found.operands[0])
        index = _carried(inside, name)
        return None if index is None or inside is outside else value(outside, start.operands[index])

    comparison = condition.root
    if comparison.opcode == "fusion":  # the same comparison, wrapped
        called = re.search(r"\bcalls=%?([\w.\-]+)", comparison.attributes)
        inner = program.computations[called[1]].root if called else comparison
        comparison = comparison._replace(opcode=inner.opcode, attributes=inner.attributes)
    if comparison.opcode != "compare" or "direction=LT" not in comparison.attributes:
        return None
    counter = _carried(condition, comparison.operands[0])
    limit = value(condition, comparison.operands[1])
    if counter is None or limit is None:
        return None
    first = value(outside, start.operands[counter])
    step = body.instructions[body.root.operands[counter]]
    if step.opcode != "add" or first is None:
        return None
    steps = [value(body, name) for name in step.operands if _carried(body, name) != counter]
    if len(steps) != 1 or not steps[0]:
        return None
    return max(-(-(limit - first) // steps[0]), 0)


def _carried(inside: Computation, name: str) -> int | None:
    """Which of the loop's values an instruction of its condition or body reads."""
    found = inside.instructions[name]
    if found.opcode == "copy":
        return _carried(inside, found.operands[0])
    if found.opcode != "get-tuple-element" or inside.instructions[found.operands[0]].opcode != "parameter":
        return None
    return int(re.findall(r"\bindex=(\d+)", found.attributes)[0])


def uncounted_loops(program: Program, counts: dict[str, float]) -> int:
    """Loops that run, whose `trip_count` is not known: what is in them is counted once."""
    return sum(
        loop.opcode == "while" and trip_count(program, computation, loop) is None
        for computation in program.computations.values()
        for loop in computation.instructions.values()
        if counts[computation.name]
    )


# ---- what it computes ----


def matmul_flops(program: Program, counts: dict[str, float]) -> float:
    """Operations of all matrix products of one device, those inside kernels left out: 2 m n k each.

    A product [m, k] by [k, n] has m k, k n and m n elements, whose product is (m n k) squared, whichever way a compiler
    spells it. (One with batch dimensions would be counted sqrt(batch) times too high; projections have none.)
    """
    total = 0.0
    for computation in program.computations.values():
        for instruction in computation.instructions.values():
            if instruction.opcode in ("convolution", "dot"):
                operands = [computation.instructions[name].type for name in instruction.operands[:2]]
                sizes = [math.prod(shapes(type_)[0][1]) for type_ in (*operands, instruction.type)]
                total += 2 * math.sqrt(math.prod(sizes)) * counts[computation.name]
    return total


def estimated_cycles(program: Program, counts: dict[str, float]) -> float:
    """What the TPU compiler's cost model expects of its own operations; kernels and collectives have no estimate."""
    total = 0.0
    for computation in program.computations.values():
        for instruction in computation.instructions.values():
            found = _CYCLES.search(instruction.attributes)
            if found and int(found[1]) < NO_ESTIMATE:
                total += int(found[1]) * counts[computation.name]
    return total


def stacked_outputs(program: Program, length: int) -> int:
    """Bytes of what loops of `length` runs in the forward pass write, a slice each run: activations kept for the
    backward pass. What merely passes through a loop is not counted."""
    total = 0
    for computation in program.computations.values():
        for loop in computation.instructions.values():
            if loop.opcode != "while" or "transpose(" in loop.attributes:
                continue
            body = program.computations.get(re.findall(r"\bbody=%?([\w.\-]+)", loop.attributes)[0])
            if body is None or trip_count(program, computation, loop) != length:
                continue
            for index, (part, result) in enumerate(zip(_parts(loop.type), body.root.operands, strict=True)):
                array = shapes(part)
                leads = bool(array) and array[0][1][:1] == (length,)
                source = body.instructions[result]
                same = source.opcode == "get-tuple-element" and f"index={index}" in source.attributes.split(
                    ", "
                )
                total += type_bytes(part) if leads and not same else 0
    return total


def _parts(type_: str) -> list[str]:
    """The members of a tuple type."""
    parts, depth, start = [], 0, 1
    for i, character in enumerate(type_):
        depth += (character in "([{") - (character in ")]}")
        if (character == "," and depth == 1) or (character == ")" and depth == 0):
            parts.append(type_[start:i])
            start = i + 1
    return parts


# ---- what it sends ----


def collectives(program: Program, counts: dict[str, float], mesh_shape: dict[str, int]) -> list[Collective]:
    """Every collective that runs, with the mesh axes that it runs over. Device i is the i-th of the mesh, row-major."""
    found = []
    for computation in program.computations.values():
        times = counts[computation.name]
        for instruction in computation.instructions.values():
            kind = instruction.opcode.removesuffix("-start")
            if kind not in COLLECTIVES or not times:
                continue
            groups = device_groups(instruction.attributes, math.prod(mesh_shape.values()))
            size = type_bytes(instruction.type)
            if instruction.opcode.endswith("-start"):
                # The type holds operands beside results.
                given = sum(type_bytes(computation.instructions[name].type) for name in instruction.operands)
                size = given if kind in ("collective-permute", "all-reduce") else size - given
            if kind == "all-reduce" and _scatters(computation, instruction):
                kind = "reduce-scatter"
                size /= max(groups.shape[1], 1)
            op_name = re.search(r'op_name="([^"]*)"', instruction.attributes)
            found.append(
                Collective(
                    kind,
                    _axes(groups, mesh_shape),
                    groups.shape[1],
                    _ring_bytes(kind, size, groups.shape[1]),
                    times,
                    op_name[1] if op_name else "",
                )
            )
    return found


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
