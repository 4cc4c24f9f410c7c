"""Faults that a program draws, and the tests that each needs."""

import argparse
import ast
import dataclasses
import functools
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.faults.slips import Slip, slips
from scripts.faults.trials import CAUGHT, MARKS, MISSED, ROOT, SHARE, TIMEOUT, Copy, Fault, try_all
from swa_jax.errors import ConfigError
from swa_jax.files import read_json, sum_of_json, write_text

PACKAGES = ("swa_jax", "pallas_kernels", "launch")
LIST = ROOT / "scripts" / "drawn_faults.json"
TRACES = ROOT / "runs" / "traces"
QUICK = "--xla_backend_optimization_level=0"  # as in `make test`
SLOW = "slow and not long"  # as in `make test-slow`
SECONDS = 300  # for the tests of one fault
AT_FIRST = 20.0  # seconds of the fastest tests, or two files that were not traced
EQUIVALENT = "equivalent"


@dataclasses.dataclass(frozen=True)
class Drawn(Fault):
    """A slip at one place: `old`, at `start` in the file's text."""

    line: int = 0
    start: int = 0
    code: str = ""  # the lines that hold `old`

    def applied(self, text: str) -> str:
        return text[: self.start] + self.new + text[self.start + len(self.old) :]

    @property
    def stages(self) -> list[list[str]]:
        return stages(self)


def packages_files() -> list[str]:
    return sorted(str(f.relative_to(ROOT)) for p in PACKAGES for f in (ROOT / p).rglob("*.py"))


def draw(seed: int, count: int) -> list[Drawn]:
    """`count` different slips; those of a file do not depend on the other files."""
    files = sorted(packages_files(), key=lambda file: sum_of_json([seed, file]))
    drawn: dict[str, Drawn] = {}
    for turn in range(100):
        for file in files:
            text = (ROOT / file).read_text()
            rng = random.Random(f"{seed} {turn} {file}")
            found = slips(text)
            if found:
                kind = rng.choice(sorted({slip.kind for slip in found}))
                fault = at(file, text, rng.choice([slip for slip in found if slip.kind == kind]))
                drawn.setdefault(fault.name, fault)
            if len(drawn) == count:
                return list(drawn.values())
    raise ConfigError(f"the files have no {count} slips that differ")


def at(file: str, text: str, slip: Slip) -> Drawn:
    begin = text.rfind("\n", 0, slip.start) + 1
    end = text.find("\n", slip.start + len(slip.old))
    code = text[begin : end if end >= 0 else len(text)]
    name = f"{file}:{slip.line} {slip.kind}: {slip.old!r} -> {slip.new!r}"
    return Drawn(name, slip.kind, file, slip.old, slip.new, line=slip.line, start=slip.start, code=code)


def found_again(row: dict[str, Any]) -> Drawn | None:
    """The fault of a row, where its code stands today; None if it is gone."""
    text = (ROOT / row["file"]).read_text() if (ROOT / row["file"]).exists() else ""
    slips_now = (Slip(*slip) for slip in slips_of(row["file"], text))
    same = [
        fault
        for slip in slips_now
        if (slip.kind, slip.old, slip.new) == (row["kind"], row["old"], row["new"])
        and (fault := at(row["file"], text, slip)).code == row["code"]
    ]
    return min(same, key=lambda fault: (abs(fault.line - row["line"]), fault.start), default=None)


@functools.cache
def slips_of(file: str, text: str) -> list[Slip]:
    return slips(text) if text else []


def row_of(fault: Drawn) -> dict[str, Any]:
    return {name: getattr(fault, name) for name in ("file", "line", "kind", "old", "new", "code")}


def save(file: Path, seed: int, rows: list[dict[str, Any]]) -> None:
    lines = ",\n".join(json.dumps(row) for row in rows)
    write_text(file, f'{{"seed": {seed}, "faults": [\n{lines}\n]}}\n')


# Which tests a fault needs


def test_files() -> list[Path]:
    return sorted((ROOT / "tests").rglob("test_*.py"))


def trace_of(tests: Path) -> Path:
    return TRACES / tests.relative_to(ROOT).with_suffix(".jsonl")


@functools.cache
def traced(tests: Path) -> list[dict[str, Any]] | None:
    """A row for each test of a file; None where the file has not been traced, or has changed since."""
    trace = trace_of(tests)
    if not trace.exists() or trace.stat().st_mtime < tests.stat().st_mtime:
        return None
    return [json.loads(line) for line in trace.read_text().splitlines()]


def trace(seconds: float) -> None:
    """Run each file of tests that has no trace; see trace.py."""
    for tests in test_files():
        if traced(tests) is None:
            out = trace_of(tests)
            partial = out.with_suffix(".partial")
            out.parent.mkdir(parents=True, exist_ok=True)
            partial.unlink(missing_ok=True)
            paths = {"PYTHONPATH": str(ROOT), "TRACE_TO": str(partial)}
            command = ["-m", "pytest", "-q", "-p", "scripts.faults.trace", "-m", MARKS, str(tests.relative_to(ROOT))]
            print(tests.relative_to(ROOT), flush=True)
            subprocess.run([sys.executable, *command], cwd=ROOT, env=os.environ | paths, timeout=seconds, check=False)
            partial.touch()
            partial.replace(out)


def stages(fault: Drawn) -> list[list[str]]:
    """Fast tests that run the line, then all others that may see the fault."""
    inside = function_around(fault)
    source = (ROOT / fault.file).stat().st_mtime
    of_line, whole = [], []
    for tests in test_files():
        rows = traced(tests)
        if rows is None:
            if points := closeness(fault, inside, tests):
                whole.append((-points, str(tests.relative_to(ROOT))))
            continue
        exact = inside and trace_of(tests).stat().st_mtime > source
        for row in rows:
            ran = int(row["lines"].get(fault.file, "0"), 16)
            if ran >> fault.line & 1 if exact else ran:
                of_line.append((row["seconds"], row["test"]))
    of_line.sort()
    whole.sort()
    until = list(itertools.accumulate(seconds for seconds, _ in of_line))
    fast = sum(total <= AT_FIRST for total in until) or min(1, len(of_line))
    first = [test for _, test in of_line[:fast]] or [test for _, test in whole[:2]]
    rest = [test for _, test in (*of_line, *whole) if test not in first]
    return [stage for stage in (first, rest) if stage]


def function_around(fault: Drawn) -> str:
    """The innermost function in whose body the fault stands; "" where the code runs at import."""
    tree = ast.parse((ROOT / fault.file).read_text())
    functions = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.body[0].lineno <= fault.line <= (node.end_lineno or 0)
    ]
    return max(functions, key=lambda node: node.lineno).name if functions else ""


def closeness(fault: Drawn, function: str, tests: Path) -> int:
    """How likely a file of tests sees a fault, by names; 0: not at all."""
    module = Path(fault.file).with_suffix("")
    text = text_of(tests)
    points = any(tests.is_relative_to(ROOT / room) for room in fault.room)
    points += 4 * (module.name in tests.stem)
    points += 3 * (".".join(module.parts) in text or f"import {module.name}\n" in text)
    return points + 2 * (len(function) > 3 and function in text)


@functools.cache
def text_of(file: Path) -> str:
    return file.read_text()


# The trials


def try_drawn(copy: Copy, fault: Drawn) -> tuple[str, str]:
    try:
        return copy.try_one(fault)
    except ConfigError:
        copy.failing(fault.stages[0])  # raises, if pytest cannot run anyway
        return CAUGHT, "pytest does not start"


def summary(rows: Sequence[dict[str, Any]]) -> str:
    count = {r: sum(row.get("result") == r for row in rows) for r in (CAUGHT, MISSED, TIMEOUT, EQUIVALENT)}
    tried = count[CAUGHT] + count[MISSED] + count[TIMEOUT]
    share = f", {count[CAUGHT] / tried:.0%} of what can be seen" if tried else ""
    left = len(rows) - tried - count[EQUIVALENT]
    return ", ".join(f"{n} {result}" for result, n in count.items() if n) + f"{share}; {left} not tried"


def main(given: argparse.Namespace) -> int:
    seconds, out = given.timeout or SECONDS, given.out or LIST
    if not given.slow:
        os.environ["XLA_FLAGS"] = f"{QUICK} {os.environ.get('XLA_FLAGS', '')}"
    if given.trace:
        trace(4 * seconds)
        return 0
    if out.exists():
        kept = read_json(out)
    else:
        kept = {"seed": given.seed, "faults": [row_of(fault) for fault in draw(given.seed, given.count)]}
        out.parent.mkdir(parents=True, exist_ok=True)
        save(out, kept["seed"], kept["faults"])
    rows = kept["faults"]
    open_results = (None, MISSED, TIMEOUT) if given.again else (None,)
    found = [(row, found_again(row)) for row in rows if row.get("result") in open_results]
    row_of_fault = {fault.name: row for row, fault in found if fault}
    to_try = [fault for _, fault in found if fault]
    if given.list:
        for fault in to_try:
            print(fault.name, *(f"    {test}" for stage in fault.stages for test in stage[:5]), sep="\n")
        print(summary(rows))
        return 0

    def keep(fault: Drawn, result: dict[str, Any]) -> None:
        row_of_fault[fault.name].update(result)
        save(out, kept["seed"], rows)

    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        copy = Copy(Path(folder).resolve(), seconds, SLOW if given.slow else MARKS)
        try_all(to_try, functools.partial(try_drawn, copy), keep)
    print(summary(rows))
    caught = sum(row.get("result") == CAUGHT for row in rows)
    return 0 if caught >= SHARE * sum(row.get("result") != EQUIVALENT for row in rows) else 1
