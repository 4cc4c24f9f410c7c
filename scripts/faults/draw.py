"""Faults that a program draws, and the tests that are near each."""

import argparse
import dataclasses
import functools
import json
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.faults.slips import Slip, slips
from scripts.faults.trials import CAUGHT, MARKS, MISSED, ROOT, SHARE, TIMEOUT, Fault, try_all
from swa_jax.base.errors import ConfigError
from swa_jax.base.files import read_json, sum_of_json, write_text

PACKAGES = ("swa_jax", "pallas_kernels", "launch")
LIST = ROOT / "scripts" / "drawn_faults.json"
QUICK = "--xla_backend_optimization_level=0"  # as in `make test`
SLOW = "slow and not long"  # as in `make test-slow`
SECONDS = 300  # for the tests of one fault
EQUIVALENT = "equivalent"


@dataclasses.dataclass(frozen=True)
class Drawn(Fault):
    """A slip at one place: `old`, at `start` in the file's text."""

    kind: str = ""  # of `slips`
    line: int = 0
    start: int = 0
    code: str = ""  # the lines that hold `old`

    def applied(self, text: str) -> str:
        return text[: self.start] + self.new + text[self.start + len(self.old) :]

    @property
    def stages(self) -> list[list[str]]:
        """The two files of tests that are nearest, then the others that are near."""
        return [stage for stage in (self.near[:2], self.near[2:]) if stage]


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
    return Drawn(name, file, slip.old, slip.new, kind=slip.kind, line=slip.line, start=slip.start, code=code)


def found_again(row: dict[str, Any]) -> Drawn | None:
    """The fault of a row, where its code stands today; None if it is gone."""
    text = (ROOT / row["file"]).read_text() if (ROOT / row["file"]).exists() else ""
    same = [
        fault
        for slip in slips_of(text)
        if (slip.kind, slip.old, slip.new) == (row["kind"], row["old"], row["new"])
        and (fault := at(row["file"], text, slip)).code == row["code"]
    ]
    return min(same, key=lambda fault: (abs(fault.line - row["line"]), fault.start), default=None)


@functools.cache
def slips_of(text: str) -> list[Slip]:
    return slips(text) if text else []


def row_of(fault: Drawn) -> dict[str, Any]:
    return {name: getattr(fault, name) for name in ("file", "line", "kind", "old", "new", "code")}


def save(file: Path, seed: int, rows: list[dict[str, Any]]) -> None:
    lines = ",\n".join(json.dumps(row) for row in rows)
    write_text(file, f'{{"seed": {seed}, "faults": [\n{lines}\n]}}\n')


def summary(rows: Sequence[dict[str, Any]]) -> str:
    count = {r: sum(row.get("result") == r for row in rows) for r in (CAUGHT, MISSED, TIMEOUT, EQUIVALENT)}
    tried = count[CAUGHT] + count[MISSED] + count[TIMEOUT]
    share = f", {count[CAUGHT] / tried:.0%} of what can be seen" if tried else ""
    left = len(rows) - tried - count[EQUIVALENT]
    return ", ".join(f"{n} {result}" for result, n in count.items() if n) + f"{share}; {left} not tried"


def main(given: argparse.Namespace) -> int:
    if not given.slow:
        os.environ["XLA_FLAGS"] = f"{QUICK} {os.environ.get('XLA_FLAGS', '')}"
    out = given.out or LIST
    if not out.exists():
        out.parent.mkdir(parents=True, exist_ok=True)
        save(out, given.seed, [row_of(fault) for fault in draw(given.seed, given.count)])
    kept = read_json(out)
    rows = kept["faults"]
    open_results = (None, MISSED, TIMEOUT) if given.again else (None,)
    found = ((found_again(row), row) for row in rows if row.get("result") in open_results)
    to_try = {fault: row for fault, row in found if fault}
    if given.list:
        for fault in to_try:
            print(fault.name, *(f"    {test}" for stage in fault.stages for test in stage[:5]), sep="\n")
    else:
        for fault, result in try_all(list(to_try), given.timeout or SECONDS, SLOW if given.slow else MARKS):
            to_try[fault].update(result)
            save(out, kept["seed"], rows)
    print(summary(rows))
    caught = sum(row.get("result") == CAUGHT for row in rows)
    seen = sum(row.get("result") != EQUIVALENT for row in rows)
    return 0 if given.list or caught >= SHARE * seen else 1
