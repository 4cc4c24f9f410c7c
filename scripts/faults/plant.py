"""The faults of scripts/faults.toml, which known slips became."""

import argparse
import dataclasses
import fnmatch
import functools
import itertools
import tomllib
from collections.abc import Sequence
from pathlib import Path

from scripts.faults.trials import CAUGHT, ROOT, SHARE, Fault, try_all
from swa_jax.base.errors import ConfigError
from swa_jax.base.files import Store, sum_of_file, sum_of_json

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
    places = [ROOT / test.partition("::")[0] for stage in fault.stages for test in stage]
    files = {file for place in places for file in (place.rglob("*.py") if place.is_dir() else [place])}
    files |= {ROOT / fault.file, *(ROOT / "tests").glob("*.py")}
    sums = {str(file.relative_to(ROOT)): sum_of_source(file) for file in files}
    return sum_of_json([dataclasses.asdict(fault), sums])


@functools.cache
def sum_of_source(file: Path) -> str:
    return sum_of_file(file)


def chosen(faults: Sequence[Fault], only: Sequence[str]) -> list[Fault]:
    """Those whose name or file matches one of the patterns; all without patterns."""
    patterns = only or ["*"]
    found = [f for f in faults if any(fnmatch.fnmatch(text, p) for text in (f.name, f.file) for p in patterns)]
    if not found:
        raise ConfigError(f"no fault's name or file matches {', '.join(only)}: see --list")
    return found


def main(given: argparse.Namespace) -> int:
    faults = read_faults()
    if wrong := problems(faults):
        raise ConfigError("\n".join(wrong))
    keys = {key_of(fault): fault for fault in chosen(faults, given.only)}  # now, as the copy is made now
    if given.list:
        for fault in keys.values():
            print(f"{fault.name} in {fault.file}: {', '.join(itertools.chain(*fault.stages))}")
        return 0
    store = Store(given.out or ROOT / "runs" / "faults.jsonl", "results of faults")
    to_try = {fault: key for key, fault in keys.items() if key not in store.records}
    print(f"{len(keys) - len(to_try)} of {len(keys)} results are known; {len(to_try)} faults to try", flush=True)
    for fault, result in try_all(list(to_try), given.timeout or SECONDS):
        store.add(to_try[fault], name=fault.name, **result)
    rows = [store.records[key] for key in keys]
    missed = [row["name"] for row in rows if row["result"] != CAUGHT]
    print(*missed, f"{len(rows) - len(missed)} of {len(rows)} faults are caught", sep="\n")
    return 0 if len(rows) - len(missed) >= SHARE * len(rows) else 1
