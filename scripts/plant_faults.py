"""Plant known faults, one at a time, and see that the tests notice each of them.

    python scripts/plant_faults.py --list
    python scripts/plant_faults.py --only 'swa_jax/data/*' --only 'tpu-*'
    python scripts/plant_faults.py --out runs/faults.json

The list is scripts/faults.toml. Each fault is planted in a temporary copy of the tracked files. Then the tests run that
own the changed file: first those that the list names, and if these pass, those of the file's room (`tests/model` for
`swa_jax/model/`), always without the slow ones, as `make test` does. A fault counts as caught if a test fails with it
that passes without it. Results go to a JSON file after each fault; a fault whose text, file and tests are the same as
in that file is not tried again. The exit status is 0 if at least 95 % of the faults are caught.
"""

import argparse
import concurrent.futures
import dataclasses
import fnmatch
import functools
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from swa_jax.errors import ConfigError
from swa_jax.files import read_json, sum_of_file, sum_of_json, write_json
from swa_jax.report.tables import Column, Table, table_console

ROOT = Path(__file__).resolve().parents[1]
FAULTS = ROOT / "scripts" / "faults.toml"
MARKS = "not slow and not long and not models"  # as in `make test`
SHARE = 0.95  # of the faults, that the tests must catch
SECONDS = 900  # for the tests of one fault, unless --timeout says otherwise
CAUGHT, MISSED, TIMEOUT = "caught", "NOT CAUGHT", "timeout"


@dataclasses.dataclass(frozen=True)
class Fault:
    """A slip: in `file`, the one place that reads `old` reads `new`.

    `tests` run before those of the file's room. `may_hang`: tests that do not end within the time count as caught.
    """

    name: str
    kind: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...] = ()
    may_hang: bool = False

    @property
    def room(self) -> tuple[str, ...]:
        """The tests that own the file: the folder, or the file, of the same name."""
        top, *inner = Path(self.file).with_suffix("").parts
        if top == "pallas_kernels":
            return ("tests/kernels",)
        if top == "launch":
            return ("tests/launch",)
        places = (f"tests/{inner[0]}", f"tests/test_{inner[0]}.py")
        return tuple(place for place in places if (ROOT / place).exists())

    @property
    def stages(self) -> list[list[str]]:
        """The tests to run, a run of pytest each."""
        return [stage for stage in (list(self.tests), [t for t in self.room if t not in self.tests]) if stage]

    def applied(self, text: str) -> str:
        return text.replace(self.old, self.new)


def read_faults(file: Path = FAULTS) -> list[Fault]:
    rows = tomllib.loads(file.read_text())["fault"]
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


class Copy:
    """A copy of the tracked files in a temporary folder, in which faults are planted and tests run."""

    def __init__(self, folder: Path, timeout: float, marks: str = MARKS):
        self.folder, self.timeout, self.marks = folder, timeout, marks
        tracked = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split("\0")
        for name in filter(None, tracked):
            if (ROOT / name).is_file():  # not one that is deleted, but not yet for git
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
        cache = os.environ.get("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax"))
        self.environment = os.environ | {
            "PYTHONPATH": str(folder),
            "JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "cpu"),
            "JAX_COMPILATION_CACHE_DIR": cache,
        }
        code = "import swa_jax, pallas_kernels; print(swa_jax.__file__, pallas_kernels.__file__)"
        shown = self._run("-c", code).stdout.split()
        if not all(Path(path).is_relative_to(folder) for path in shown):
            raise ConfigError(f"the tests would import {shown}, which is not the copy in {folder}")

    def _run(self, *arguments: str, timeout: float | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments], cwd=self.folder, env=self.environment, timeout=timeout,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", check=False,
        )  # fmt: skip

    @contextmanager
    def planted(self, fault: Fault) -> Iterator[None]:
        file = self.folder / fault.file
        sound = file.read_text()
        self._write(file, fault.applied(sound))
        try:
            yield
        finally:
            self._write(file, sound)

    def _write(self, file: Path, text: str) -> None:
        file.write_text(text)
        # Python takes compiled code for current by time and size, which a quick change of equal length does not alter.
        for compiled in file.parent.glob(f"__pycache__/{file.stem}.*"):
            compiled.unlink()

    def failing(self, tests: Sequence[str], without: Sequence[str] = ()) -> str:
        """The first test that fails, by its node id; "" if all pass.

        Raises:
          subprocess.TimeoutExpired: they do not end in time.
          ConfigError: pytest cannot run them.
        """
        cache = self.folder / ".pytest_cache"
        shutil.rmtree(cache, ignore_errors=True)
        done = self._run(
            "-m", "pytest", "-x", "-q", "-m", self.marks, "-o", f"cache_dir={cache}",
            *(f"--deselect={test}" for test in without), *tests, timeout=self.timeout,
        )  # fmt: skip
        if done.returncode in (0, 5):  # 5: all of them are slow
            return ""
        if done.returncode == 4 and "not found:" in done.stdout:
            print(f"there is no such test (any more): {', '.join(tests)}", file=sys.stderr, flush=True)
            return ""
        failed = cache / "v" / "cache" / "lastfailed"
        if done.returncode not in (1, 2) or not failed.is_file():
            raise ConfigError(f"pytest ended with status {done.returncode}:\n{done.stdout[-3000:]}")
        return next(iter(json.loads(failed.read_text())))


class Trials:
    """Faults tried in copies, each thread in one of its own; results are written as they come."""

    def __init__(self, copies: Sequence[Copy], file: Path, known: dict[str, dict[str, Any]], keys: dict[str, str]):
        self.copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        for copy in copies:
            self.copies.put(copy)
        self.file, self.results, self.keys = file, known, keys
        self.sound: set[str] = set()  # tests that pass where nothing is planted
        self.broken: list[str] = []  # tests that fail even there
        self.lock = threading.Lock()

    def __call__(self, fault: Fault) -> None:
        copy = self.copies.get()
        began = time.monotonic()
        try:
            result, by = self._try(copy, fault)
        finally:
            self.copies.put(copy)
        seconds = round(time.monotonic() - began, 1)
        with self.lock:
            self.write(fault, {"result": result, "by": by, "seconds": seconds})
        print(f"{result}: {fault.name} ({seconds:.0f} s)  {by}", flush=True)

    def write(self, fault: Fault, result: dict[str, Any]) -> None:
        names = {"name": fault.name, "kind": fault.kind, "file": fault.file}
        self.results[fault.name] = names | result | {"key": self.keys[fault.name]}
        write_json(self.file, {"faults": list(self.results.values())})

    def _try(self, copy: Copy, fault: Fault) -> tuple[str, str]:
        for tests in fault.stages:
            while True:
                try:
                    with copy.planted(fault):
                        failed = copy.failing(tests, without=self.broken)
                except subprocess.TimeoutExpired:
                    return (CAUGHT if fault.may_hang else TIMEOUT), ", ".join(tests)
                if not failed:
                    break
                if failed in self.sound or not copy.failing([failed]):
                    self.sound.add(failed)
                    return CAUGHT, failed
                self.broken.append(failed)
                print(f"fails without any fault, and is left out: {failed}", file=sys.stderr, flush=True)
        return MISSED, ""


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


def known_results(file: Path, keys: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Results of `file` that still hold, by name; of faults that are not in the list any more, none."""
    rows = read_json(file)["faults"] if file.exists() else []
    return {row["name"]: row for row in rows if keys.get(row["name"]) == row["key"]}


def results_table(rows: Sequence[dict[str, Any]]) -> Table:
    columns = [Column("Fault", text=True), Column("Kind", text=True), Column("File", text=True)]
    columns += [Column("Result", text=True), Column("By", text=True), Column("Time", "s")]
    caught = sum(row["result"] == CAUGHT for row in rows)
    table = Table(f"{caught} of {len(rows)} faults are caught", columns)
    for row in rows:
        cells = (row[name] for name in ("name", "kind", "file", "result", "by"))
        table.add_row(*cells, f"{row['seconds']:.0f}")
    return table


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], metavar="PATTERN", help="names or files; repeatable")
    parser.add_argument("--list", action="store_true", help="print the faults and their tests, run nothing")
    parser.add_argument("--jobs", type=int, default=1, help="faults tried at one time (default: 1)")
    parser.add_argument("--timeout", type=float, default=SECONDS, help=f"seconds a run of tests (default: {SECONDS})")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "faults.json", help="results, read and written")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    given = parse(arguments)
    faults = read_faults()
    if wrong := problems(faults):
        print(*wrong, sep="\n", file=sys.stderr)
        return 2
    wanted = chosen(faults, given.only)
    if given.list:
        for fault in wanted:
            print(f"{fault.name} ({fault.kind}) in {fault.file}: {', '.join((*fault.tests, *fault.room))}")
        return 0
    given.out.parent.mkdir(parents=True, exist_ok=True)
    keys = {fault.name: key_of(fault) for fault in faults}  # now, as the copies are made now
    known = known_results(given.out, keys)
    to_try = [fault for fault in wanted if fault.name not in known]
    print(f"{len(wanted) - len(to_try)} of {len(wanted)} results are known; {len(to_try)} faults to try", flush=True)
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        places = [Path(folder).resolve() / str(i) for i in range(min(given.jobs, len(to_try)))]
        trials = Trials([Copy(place, given.timeout) for place in places], given.out, known, keys)
        with concurrent.futures.ThreadPoolExecutor(max(1, len(places))) as pool:
            list(pool.map(trials, to_try))
    rows = [trials.results[fault.name] for fault in wanted]
    table_console().print(results_table(rows))
    return 0 if sum(row["result"] == CAUGHT for row in rows) >= SHARE * len(rows) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
