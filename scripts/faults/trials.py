"""A fault, a copy of the code in which it is planted, and the tests that are to notice it."""

import dataclasses
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from swa_jax.base.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
MARKS = "not slow and not long and not models"  # as in `make test`
SHARE = 0.95  # of the faults, that the tests must catch
CAUGHT, MISSED, TIMEOUT = "caught", "NOT CAUGHT", "timeout"


@dataclasses.dataclass(frozen=True)
class Fault:
    """A slip: in `file`, the one place that reads `old` reads `new`.

    `tests`, or else those that are nearest, run before those of the file's room. `may_hang`: tests that do not end
    within the time count as caught.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...] = ()
    may_hang: bool = False

    @property
    def room(self) -> tuple[str, ...]:
        """The tests that own the file: the deepest folder of tests that is named as the file's own."""
        top, *inner = Path(self.file).parent.parts
        if top != "swa_jax":
            return (f"tests/{top.removeprefix('pallas_')}",)
        folders = [Path("tests", *inner[:depth]).as_posix() for depth in range(len(inner), 0, -1)]
        return tuple(folder for folder in folders if (ROOT / folder).exists())[:1]

    @property
    def near(self) -> list[str]:
        """The files of tests that may see the fault, by names, the likeliest first."""
        near = {str(file.relative_to(ROOT)): self._closeness(file) for file in (ROOT / "tests").rglob("test_*.py")}
        return sorted((file for file, points in near.items() if points), key=lambda file: (-near[file], file))

    def _closeness(self, tests: Path) -> int:
        """How likely a file of tests sees the fault, by names; 0: not at all."""
        module = Path(self.file).with_suffix("")
        text = text_of(tests)
        imported = ".".join(module.parts) in text or f"import {module.name}\n" in text
        return (
            any(tests.is_relative_to(ROOT / room) for room in self.room)
            + 4 * (module.name in tests.stem)
            + 3 * imported
        )

    @property
    def stages(self) -> list[list[str]]:
        """The tests to run, a run of pytest each."""
        first = list(self.tests) or self.near[:2]
        return [stage for stage in (first, [t for t in self.room if t not in first]) if stage]

    def applied(self, text: str) -> str:
        return text.replace(self.old, self.new)


@functools.cache
def text_of(file: Path) -> str:
    return file.read_text()


class Copy:
    """A copy of the tracked files in a temporary folder, in which faults are planted and tests run."""

    def __init__(self, folder: Path, timeout: float, marks: str):
        self.folder, self.timeout, self.marks = folder, timeout, marks
        self.sound: set[str] = set()  # tests that pass where nothing is planted
        self.broken: list[str] = []  # tests that fail even there
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        tracked = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
        for name in filter(None, tracked):
            if (ROOT / name).is_file():  # not one that is deleted, but not yet for git
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
        cache = os.environ.get("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax"))
        self.environment = os.environ | {"PYTHONPATH": str(folder), "JAX_COMPILATION_CACHE_DIR": cache}
        self.environment.setdefault("JAX_PLATFORMS", "cpu")
        code = "import swa_jax, pallas_kernels; print(swa_jax.__file__, pallas_kernels.__file__)"
        shown = self._run("-c", code).stdout.split()
        if not all(Path(path).is_relative_to(folder) for path in shown):
            raise ConfigError(f"the tests would import {shown}, which is not the copy in {folder}")

    def _run(self, *arguments: str, timeout: float | None = None) -> subprocess.CompletedProcess[str]:
        told: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "errors": "replace"}
        command = [sys.executable, *arguments]
        return subprocess.run(command, cwd=self.folder, env=self.environment, timeout=timeout, text=True, **told)

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
        options = ["-m", "pytest", "-x", "-q", "-m", self.marks, "-o", f"cache_dir={cache}"]
        done = self._run(*options, *(f"--deselect={test}" for test in without), *tests, timeout=self.timeout)
        if done.returncode in (0, 5):  # 5: all of them are slow
            return ""
        if done.returncode == 4 and "not found:" in done.stdout:
            print(f"there is no such test (any more): {', '.join(tests)}", file=sys.stderr, flush=True)
            return ""
        failed = cache / "v" / "cache" / "lastfailed"
        if done.returncode not in (1, 2) or not failed.is_file():
            raise ConfigError(f"pytest ended with status {done.returncode}:\n{done.stdout[-3000:]}")
        return next(iter(json.loads(failed.read_text())))

    def try_one(self, fault: Fault) -> tuple[str, str]:
        """The result, and the test that caught the fault."""
        for tests in fault.stages:
            while True:
                try:
                    with self.planted(fault):
                        failed = self.failing(tests, without=self.broken)
                except subprocess.TimeoutExpired:
                    return (CAUGHT if fault.may_hang else TIMEOUT), ", ".join(tests)
                except ConfigError:
                    self.failing(tests)  # raises, if pytest cannot run them without the fault either
                    return CAUGHT, "pytest does not start"
                if not failed:
                    break
                if failed in self.sound or not self.failing([failed]):
                    self.sound.add(failed)
                    return CAUGHT, failed
                self.broken.append(failed)
                print(f"fails without any fault, and is left out: {failed}", file=sys.stderr, flush=True)
        return MISSED, ""


def try_all[F: Fault](faults: Sequence[F], timeout: float, marks: str = MARKS) -> Iterator[tuple[F, dict[str, Any]]]:
    """Each fault, once it has been tried, and what came of it."""
    if not faults:
        return
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        copy = Copy(Path(folder).resolve(), timeout, marks)
        for fault in faults:
            began = time.monotonic()
            result, by = copy.try_one(fault)
            seconds = round(time.monotonic() - began, 1)
            print(f"{result}: {fault.name} ({seconds:.0f} s)  {by}", flush=True)
            yield fault, {"result": result, "by": by, "seconds": seconds}
