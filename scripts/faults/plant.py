"""The faults of scripts/faults.toml, which known slips became."""

import argparse
import dataclasses
import fnmatch
import functools
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.faults.trials import CAUGHT, ROOT, SHARE, Copy, Fault, try_all
from swa_jax.errors import ConfigError
from swa_jax.files import read_json, sum_of_file, sum_of_json, write_json
from swa_jax.report.tables import Column, Table, table_console

SECONDS = 900  # for the tests of one fault


def read_faults() -> list[Fault]:
    rows = tomllib.loads((ROOT / "scripts" / "faults.toml").read_text())["fault"]
    return [Fault(**row | {"tests": tuple(row.get("tests", ()))}) for row in rows]


def problems(faults: Sequence[Fault]) -> list[str]:
    """A sentence for each fault that cannot be planted; empty where all is well. Nothing runs."""
    found = []
    names = [fault.name for fault in faults]
    for fault in faults:
        file = ROOT / fault.file
        count = file.read_text().count(fault.old) if file.is_file() else 0
        if count != 1:
            found.append(f"{fault.name}: {fault.file} has {count} places that read {fault.old!r}, not 1")
        if fault.old == fault.new:
            found.append(f"{fault.name}: 'new' is the same as 'old'")
        if names.count(fault.name) > 1:
            found.append(f"{fault.name}: the name is not unique")
        if not fault.tests + fault.room:
            found.append(f"{fault.name}: no tests own {fault.file}: name some in 'tests'")
        missing = [test for test in fault.tests if not (ROOT / test.partition("::")[0]).exists()]
        found += [f"{fault.name}: there is no {test}" for test in missing]
    return found


def key_of(fault: Fault) -> str:
    """What a result depends on: the fault, the file as it is, and the tests."""
    places = [ROOT / test.partition("::")[0] for test in (*fault.tests, *fault.room)]
    files = {file for place in places for file in (place.rglob("*.py") if place.is_dir() else [place])}
    files |= {ROOT / fault.file, *(ROOT / "tests").glob("*.py")}
    sums = {str(file.relative_to(ROOT)): sum_of_source(file) for file in files}
    return sum_of_json([dataclasses.asdict(fault), sums])


@functools.cache
def sum_of_source(file: Path) -> str:
    return sum_of_file(file)


def chosen(faults: Sequence[Fault], only: Sequence[str]) -> list[Fault]:
    """Those whose name or file matches one of the patterns; all without patterns."""

    def matches(fault: Fault) -> bool:
        return any(fnmatch.fnmatch(text, pattern) for text in (fault.name, fault.file) for pattern in only)

    found = [fault for fault in faults if not only or matches(fault)]
    if not found:
        raise ConfigError(f"no fault's name or file matches {', '.join(only)}: see --list")
    return found


def results_table(rows: Sequence[dict[str, Any]]) -> Table:
    columns = [Column(name, text=True) for name in ("Fault", "Kind", "File", "Result", "By")]
    caught = sum(row["result"] == CAUGHT for row in rows)
    table = Table(f"{caught} of {len(rows)} faults are caught", [*columns, Column("Time", "s")])
    for row in rows:
        cells = (row[name] for name in ("name", "kind", "file", "result", "by"))
        table.add_row(*cells, f"{row['seconds']:.0f}")
    return table


def main(given: argparse.Namespace) -> int:
    faults = read_faults()
    if wrong := problems(faults):
        print(*wrong, sep="\n", file=sys.stderr)
        return 2
    wanted = chosen(faults, given.only)
    if given.list:
        for fault in wanted:
            print(f"{fault.name} ({fault.kind}) in {fault.file}: {', '.join((*fault.tests, *fault.room))}")
        return 0
    out = given.out or ROOT / "runs" / "faults.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    keys = {fault.name: key_of(fault) for fault in faults}  # now, as the copy is made now
    before = read_json(out)["faults"] if out.exists() else []
    results = {row["name"]: row for row in before if keys.get(row["name"]) == row["key"]}
    to_try = [fault for fault in wanted if fault.name not in results]
    print(f"{len(wanted) - len(to_try)} of {len(wanted)} results are known; {len(to_try)} faults to try", flush=True)

    def keep(fault: Fault, result: dict[str, Any]) -> None:
        names = {"name": fault.name, "kind": fault.kind, "file": fault.file}
        results[fault.name] = names | result | {"key": keys[fault.name]}
        write_json(out, {"faults": list(results.values())})

    if to_try:
        with tempfile.TemporaryDirectory(prefix="faults-") as folder:
            try_all(to_try, Copy(Path(folder).resolve(), given.timeout or SECONDS).try_one, keep)
    rows = [results[fault.name] for fault in wanted]
    table_console().print(results_table(rows))
    return 0 if sum(row["result"] == CAUGHT for row in rows) >= SHARE * len(rows) else 1
