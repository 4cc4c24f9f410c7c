"""Reads a compiled program (XLA's HLO text): how often each part runs and what it multiplies.

XLA's own cost analysis counts the body of a loop once; this does not.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

ITEM_BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}
ITEM_BYTES |= {"s64": 8, "u64": 8, "f64": 8}
# What they call runs for every element, or on a SparseCore beside the rest.
_NO_TIME_OF_ITS_OWN = ("all-reduce", "all-reduce-start", "reduce-scatter", "reduce", "scatter", "call-start")
PRODUCTS = ("convolution", "dot")  # of matrices, as the TPU compiler spells them
NO_ESTIMATE = 2**62  # cycles: what stands for "not known"
_ARRAY = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,]*)\]")
_CALLED = re.compile(r"\b(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
# Of a kernel of ours that computes next to nothing: the bytes that it reads and writes.
_PASSED = re.compile(r'"cost_estimate":\{"flops":"0",[^}]*"bytes_accessed":"(\d+)"')


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


class HloProgram(NamedTuple):
    computations: dict[str, Computation]
    entry: str


# ---- reading ----


def parse(text: str) -> HloProgram:
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
    return HloProgram(computations, entry)


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


def executions(program: HloProgram, branch_shares: Callable[[int], Sequence[float]] | None = None) -> dict[str, float]:
    """Runs of each computation in a run of the program.

    Args:
      branch_shares: how often each of n branches is taken, as shares of 1; None: all alike.
    """
    counts = dict.fromkeys(program.computations, 0.0)

    def visit(name: str, times: float) -> None:
        counts[name] += times
        for instruction in program.computations[name].instructions.values():
            for called, share in calls(program, program.computations[name], instruction, branch_shares):
                if called in program.computations:
                    visit(called, times * share)

    visit(program.entry, 1.0)
    return counts


def called_computation(instruction: Instruction) -> str | None:
    """What a fusion or an asynchronous wrapper runs."""
    word = "to_apply" if instruction.opcode == "call-start" else "calls"
    found = re.search(rf"\b{word}=%?([\w.\-]+)", instruction.attributes)
    return found[1] if found else None


def calls(
    program: HloProgram,
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
    elif instruction.opcode not in _NO_TIME_OF_ITS_OWN:
        yield from ((name, 1.0) for name in names)


def trip_count(program: HloProgram, outside: Computation, loop: Instruction) -> int | None:
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
        called = called_computation(comparison)
        inner = program.computations[called].root if called else comparison
        comparison = comparison._replace(opcode=inner.opcode, attributes=inner.attributes)
    if comparison.opcode != "compare" or "direction=LT" not in comparison.attributes:
        return None
    counter = _carried(condition, comparison.operands[0])
    limit = value(condition, comparison.operands[1])
    if counter is None or limit is None:
        return None
    first = value(outside, start.operands[counter])
    step = body.instructions[body.root.operands[counter]]
    while step.opcode == "copy":
        step = body.instructions[step.operands[0]]
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


def uncounted_loops(program: HloProgram, counts: dict[str, float]) -> int:
    """Loops that run, whose `trip_count` is not known: what is in them is counted once."""
    return sum(
        loop.opcode == "while" and trip_count(program, computation, loop) is None
        for computation in program.computations.values()
        for loop in computation.instructions.values()
        if counts[computation.name]
    )


# ---- what it computes ----


def matmul_flops(program: HloProgram, counts: dict[str, float], expert_devices: int = 1) -> float:
    """Operations of all matrix products of one device, those inside attention's kernels left out: 2 m n k each.

    A product [m, k] by [k, n] has m k, k n and m n elements, whose product is (m n k) squared, whichever way a compiler
    spells it. (One with batch dimensions would be counted sqrt(batch) times too high; projections have none.) Those of
    experts have E matrices and a row for each choice, which `expert_devices` share evenly.
    """
    total = 0.0
    for computation in program.computations.values():
        for instruction in computation.instructions.values():
            experts = is_expert_product(instruction)
            if instruction.opcode in PRODUCTS or experts:
                names = instruction.operands[-2:] if experts else instruction.operands[:2]
                types = (*(computation.instructions[name].type for name in names), instruction.type)
                arrays = [shapes(type_)[0][1] for type_ in types]
                size = math.prod(math.prod(array) for array in arrays)
                share = 1.0
                if experts:
                    size, share = size // max(arrays, key=len)[0], 1 / expert_devices
                total += 2 * math.sqrt(size) * share * counts[computation.name]
    return total


def is_expert_product(instruction: Instruction) -> bool:
    """Whether it is `jax.lax.ragged_dot` as the TPU compiler has it: a kernel of its own."""
    return instruction.name.startswith("ragged-dot-none") and instruction.opcode == "custom-call"


def is_kernel(instruction: Instruction) -> bool:
    """Whether it is one of attention's kernels, of whose duration the compiler says nothing."""
    own = instruction.name.startswith("ragged-dot")  # the compiler's own, for experts
    ours = 'custom_call_target="tpu_custom_call"' in instruction.attributes and not own
    return ours and not _PASSED.search(instruction.attributes)


def own_cycles(instruction: Instruction, bytes_a_cycle: float) -> float:
    """What the TPU compiler's cost model expects of one of its operations; kernels and collectives have no estimate.

    Args:
      bytes_a_cycle: of the memory, for the kernels that do no more than pass over it.
    """
    if passed := _PASSED.search(instruction.attributes):
        return int(passed[1]) / bytes_a_cycle
    found = _CYCLES.search(instruction.attributes)
    return int(found[1]) if found and int(found[1]) < NO_ESTIMATE else 0


def cycles_by_part(program: HloProgram, counts: dict[str, float], scope: str, bytes_a_cycle: float) -> dict[str, float]:
    """`own_cycles` of all matrix products that run, of what was traced inside the named scope, and of the rest.

    An operation that the compiler has joined to a matrix product from outside the scope counts as a part of it. Of a
    fusion, constants say nothing: the compiler shares one among operations of all places.
    """
    parts = {"matmuls": 0.0, scope: 0.0, "other": 0.0}
    in_names = re.compile(rf"[/(]{scope}[/)]")  # also "jit(step)/transpose(jvp(scope))/mul"
    for computation in program.computations.values():
        for instruction in computation.instructions.values():
            if cycles := own_cycles(instruction, bytes_a_cycle) * counts[computation.name]:
                called = program.computations.get(called_computation(instruction) or "")
                inner = called.instructions.values() if called else ()
                members = [instruction, *(member for member in inner if member.opcode != "constant")]
                in_scope = [bool(in_names.search(_traced_as(member))) for member in members]
                products = [inside for one, inside in zip(members, in_scope, strict=True) if one.opcode in PRODUCTS]
                is_product = bool(products) and not all(products)
                parts["matmuls" if is_product else scope if any(in_scope) else "other"] += cycles
    return parts


def _traced_as(instruction: Instruction) -> str:
    """The operation of the traced program that it comes from, with its scopes."""
    found = _OP_NAME.search(instruction.attributes)
    return found[1] if found else ""


def stacked_outputs(program: HloProgram, length: int) -> int:
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
                same = source.opcode == "get-tuple-element" and f"index={index}" in source.attributes.split(", ")
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
