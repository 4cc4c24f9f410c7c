"""Cycles of the TPU kernels without a TPU: libtpu compiles for a real chip on this host and simulates what it made.

Each function of `swa_jax.bench.tpu_kernels` is compiled in a process of its own (`compile_for_chip`). The simulator
covers instructions and transfers within each op, not the memory traffic of XLA's own ops nor what runs side by side.
Where it stops, or where a kernel's schedule is data that it cannot know, the op's cycles are counted from its code
instead: the bundles of each block (`bundles`) times how often `swa_jax.bench.tpu_kernels.executions` says that it runs.
"""

import contextlib
import dataclasses
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from swa_jax.base.chips import COMPILE_ONLY, TARGETS, check_libtpu
from swa_jax.base.errors import ConfigError
from swa_jax.base.settings import nearest
from swa_jax.bench import peer_calls, tpu_kernels
from swa_jax.bench.bundles import Code, read_code
from swa_jax.bench.tpu_kernels import Executions

SIMULATED, COUNTED = "simulated", "bundles x visits"
TIMEOUT = 300  # seconds for one compilation; a grid whose size is data can keep the simulator busy for longer
_ESTIMATE = re.compile(r'hlo_op_name:\s*"([^"]+)"\s+estimated_cycles:\s*(\d+)')


class Op(NamedTuple):
    name: str
    cycles: int | None
    source: str  # SIMULATED, COUNTED, or why there is no figure


@dataclasses.dataclass(frozen=True)
class CycleCount:
    function: str
    chip: str
    settings: dict[str, Any]
    queries: int  # query rows times heads
    ops: tuple[Op, ...]  # the most expensive first
    temp_bytes: int | None
    notes: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()  # names of the ops that are Pallas kernels

    @property
    def cycles(self) -> int | None:
        """Cycles of the whole program; None unless every op has a figure."""
        return _sum(self.ops)

    @property
    def cycles_per_1024(self) -> float | None:
        """Cycles per 1024 query rows and head; None where there are fewer rows than that."""
        return self._per_1024(self.cycles)

    @property
    def kernel_cycles_per_1024(self) -> float | None:
        """As `cycles_per_1024`, of the kernels alone, without what XLA does around them."""
        return self._per_1024(_sum([op for op in self.ops if op.name in self.kernels]))

    def _per_1024(self, cycles: int | None) -> float | None:
        return None if cycles is None or self.queries < 1024 else cycles * 1024 / self.queries

    @property
    def milliseconds(self) -> float | None:
        return None if self.cycles is None else self.cycles / TARGETS[self.chip].gigahertz / 1e6

    def to_dict(self) -> dict[str, Any]:
        return {
            "function": self.function,
            "chip": self.chip,
            "settings": self.settings,
            "cycles": self.cycles,
            "cycles_per_1024_rows_and_head": self.cycles_per_1024,
            "kernel_cycles_per_1024_rows_and_head": self.kernel_cycles_per_1024,
            "milliseconds": self.milliseconds,
            "temp_bytes": self.temp_bytes,
            "ops": [op._asdict() for op in self.ops],
            "notes": list(self.notes),
        }


def _sum(ops: Sequence[Op]) -> int | None:
    cycles = [op.cycles for op in ops if op.cycles is not None]
    return sum(cycles) if ops and len(cycles) == len(ops) else None


def read_settings(items: Sequence[str]) -> dict[str, Any]:
    """`["T=8192", "dtype=float32"]` as keyword arguments; a value is JSON where it can be read as such."""
    settings: dict[str, Any] = {}
    for item in items:
        name, equals, text = item.partition("=")
        if not equals or not name:
            raise ConfigError(f"--set is '{item}'; it must be NAME=VALUE, such as T=8192")
        try:
            settings[name] = json.loads(text)
        except json.JSONDecodeError:
            settings[name] = text
    return settings


def check(functions: Sequence[str], chips: Sequence[str], settings: dict[str, Any]) -> None:
    """Raises ConfigError for a name that is not known, before anything is compiled."""
    known = {**tpu_kernels.FUNCTIONS, **peer_calls.FUNCTIONS}
    for given, choices, what in ((functions, known, "function"), (chips, TARGETS, "chip")):
        for name in given:
            if name not in choices:
                raise ConfigError(f"unknown {what} '{name}'{nearest(name, list(choices))}")
    for function in functions:
        if function in peer_calls.FUNCTIONS:
            peer_calls.check_installed(function)
        allowed = (peer_calls if function in peer_calls.FUNCTIONS else tpu_kernels).settings(function)
        for name, value in settings.items():
            if name not in allowed:
                raise ConfigError(f"unknown setting of {function} '{name}'{nearest(name, allowed)}")
            if isinstance(value, str) and name != "dtype":
                raise ConfigError(f"--set {name} must be a number, true or false, got '{value}'")
    check_libtpu()


def measure(function: str, chip: str, settings: dict[str, Any]) -> CycleCount:
    """Compiles one function for one chip (once, or twice where the simulator does not do) and adds up its cycles."""
    code: dict[str, Code] = {}
    with tempfile.TemporaryDirectory(prefix="swa_jax_cycles_") as profile, _listings() as (listings, listed):
        flags, counted = f"--xla_jf_dump_static_llo_profile_to={profile}", function in peer_calls.FUNCTIONS
        first = _compile(function, chip, settings, f"{flags} {listed}" if counted else flags)
        simulated = _simulated(Path(profile))
        if counted and not first.failure:
            code = read_code(listings)
    program = first.program
    if program is None:
        raise ConfigError(f"{function} does not compile for {chip} with {settings}: {first.failure}")
    # For a kernel whose copies it does not know, such as one of several heads at once, the simulator says 0.
    unknown = {op for op, cycles in simulated.items() if cycles == 0 and _kernel_of(op, program["kernels"])}
    simulated = {op: cycles for op, cycles in simulated.items() if op not in unknown}
    second = first
    if not code and (first.failure or unknown or any(program["kernels"].values())):
        with _listings() as (listings, listed):
            second = _compile(function, chip, settings, listed)
            code = read_code(listings)
        if second.failure:
            raise ConfigError(f"{function} does not compile for {chip} with {settings}: {second.failure}")
    counts = {kernel: Executions(**count) for kernel, count in program["executions"].items()}
    ops = combine(simulated, code, program["kernels"], program["steps"], counts)
    notes = (f"the simulator stopped ({first.failure})",) if first.failure else ()
    kernels = tuple(op.name for op in ops if _kernel_of(op.name, program["kernels"]))
    queries = math.prod(program["queries"]) // settings.get("D", 128)  # heads may lie side by side
    return CycleCount(function, chip, settings, queries, ops, second.temp_bytes, notes, kernels)


@contextlib.contextmanager
def _listings() -> Iterator[tuple[Path, str]]:
    """A folder for the listings of a program, and the flags by which libtpu writes them there."""
    with tempfile.TemporaryDirectory(prefix="swa_jax_bundles_") as folder:
        regex = "final_bundles|final_hlo-static"
        yield (
            Path(folder),
            f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex={regex}",
        )


def combine(
    simulated: dict[str, int],
    code: dict[str, Code],
    kernels: dict[str, bool],
    steps: dict[str, tuple[int, int]],
    counts: dict[str, Executions],
) -> tuple[Op, ...]:
    """One figure an op: the simulator's where it can be right, else one from the code, else none with the reason.

    Args:
      simulated: cycles by op.
      code: listings by op; empty when the simulation was enough.
      kernels: for each Pallas kernel, whether its schedule is in scalar memory.
      steps: for each, the steps of its grid in known dimensions, and the number of dimensions that are data.
      counts: how often the code of a kernel runs, for those where the shape decides it.
    """
    ops = []
    for name in sorted(simulated | code):
        kernel = _kernel_of(name, kernels)
        if name in simulated and not (kernel and kernels[kernel]):
            ops.append(Op(name, simulated[name], SIMULATED))
        elif kernel is None:
            # TLP is the program that calls the ops, and names in angle brackets are what surrounds it.
            if not (name == "TLP" or name.startswith("<")):
                ops.append(Op(name, None, "not simulated"))
        elif kernel not in counts:
            ops.append(Op(name, None, f"the data decide its visits; bodies of {_listed(code.get(name))}"))
        elif name not in code:
            ops.append(Op(name, None, "no listing of its code"))
        else:
            known, from_data = steps[kernel]
            grid = known * counts[kernel].heads ** min(from_data, 1)
            ops.append(Op(name, count_cycles(code[name], counts[kernel], grid), COUNTED))
    return tuple(sorted(ops, key=lambda op: -(op.cycles if op.cycles is not None else math.inf)))


def count_cycles(code: Code, runs: Executions, steps: int) -> int:
    """Bundles times runs; bodies that the compiler merged or split are matched by length as far as they go."""
    bodies = sorted(code.bodies[:: 2 if runs.replays else 1], reverse=True)[: len(runs.bodies)]
    bodies += [bodies[-1]] * (len(runs.bodies) - len(bodies)) if bodies else []
    executed = sum(bundles * times for bundles, times in zip(bodies, runs.bodies, strict=False))
    return executed + code.other_vector * runs.rows + code.scalar * steps


def _listed(code: Code | None) -> str:
    return "unknown length" if code is None else f"{', '.join(map(str, sorted(code.bodies, reverse=True)))} bundles"


def _kernel_of(op: str, kernels: dict[str, bool]) -> str | None:
    """The Pallas kernel that an op runs: XLA adds to its name, as in `jvp_window_forward_.1`."""
    return max((kernel for kernel in kernels if kernel in op), key=len, default=None)


class _Compilation(NamedTuple):
    program: dict[str, Any] | None
    temp_bytes: int | None
    failure: str | None


def _compile(function: str, chip: str, settings: dict[str, Any], flags: str) -> _Compilation:
    target = TARGETS[chip]
    command = [sys.executable, "-m", "swa_jax.bench.compile_for_chip"]
    command += [function, target.topology, str(target.num_cores), json.dumps(settings)]
    sources = str(Path(__file__).parents[2])
    paths = os.pathsep.join(filter(None, [sources, os.environ.get("PYTHONPATH")]))
    own = {"JAX_PLATFORMS": "cpu", "LIBTPU_INIT_ARGS": flags, "PYTHONPATH": paths}
    environment = os.environ | COMPILE_ONLY | own
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, errors="replace", timeout=TIMEOUT
        )
        output, failure = done.stdout, _failure(done) if done.returncode else None
    except subprocess.TimeoutExpired as error:
        # What was written by then, which is bytes whatever was asked for.
        output = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else ""
        failure = f"no answer within {TIMEOUT} seconds"
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    program = lines[0] if lines else None
    return _Compilation(program, lines[1]["temp_bytes"] if len(lines) > 1 else None, failure)


def _failure(done: subprocess.CompletedProcess[str]) -> str:
    """One line for why the process ended: the exception's, or the signal that libtpu ended it with."""
    if done.returncode < 0:
        return f"libtpu ended the process with signal {-done.returncode}"
    lines = [line for line in done.stderr.splitlines() if re.match(r"^[\w.]*(Error|Exception)\b", line)]
    return lines[-1][:500] if lines else f"the process ended with status {done.returncode}"


def _simulated(folder: Path) -> dict[str, int]:
    cycles: dict[str, int] = {}
    for file in folder.iterdir():
        for name, count in _ESTIMATE.findall(file.read_text(errors="replace")):
            cycles[name] = cycles.get(name, 0) + int(count)
    return cycles
