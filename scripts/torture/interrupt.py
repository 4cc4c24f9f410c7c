"""A command that is interrupted, started again, and compared with itself undisturbed."""

import collections
import contextlib
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)


class Ended(NamedTuple):
    status: int
    signal: signal.Signals | None  # that was sent
    moment: str
    output: str

    @property
    def interrupted(self) -> bool:
        return self.signal is not None and self.status != 0


def some_time(out: Path, process: subprocess.Popen, seconds: float, rng: random.Random) -> str:
    """Wait for some of the seconds that the command takes, or until it ends."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(rng.uniform(0, seconds))
    return "any moment"


class Job(NamedTuple):
    """A command line, where OUT stands for the folder that it writes.

    `results`: what it has written, to be equal. `moment`: waits for a moment to interrupt it, and names it.
    `check(out, ended, last)`: raises AssertionError if an interruption has lost something; `last` is what it returned
    the time before, None at first.
    """

    words: Sequence[Any]
    results: Callable[[Path], Any]
    moment: Callable[[Path, subprocess.Popen, float, random.Random], str] = some_time
    check: Callable[[Path, Ended, Any], Any] = lambda *_: None
    signals: Sequence[signal.Signals] = SIGNALS


def run(job: Job, out: Path, rng: random.Random | None = None, seconds: float = 0.0) -> Ended:
    """Run a command to its end, or with `rng` send it a signal at a random moment."""
    out.parent.mkdir(parents=True, exist_ok=True)
    words = [str(word).replace("OUT", str(out)) for word in job.words]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    environment |= {"JAX_COMPILATION_CACHE_DIR": str(out.parent / "compiled")}
    with tempfile.TemporaryFile("w+") as printed:
        process = subprocess.Popen(words, stdout=printed, stderr=subprocess.STDOUT, env=environment, cwd=out.parent)
        sent, moment = None, ""
        if rng is not None:
            kind, moment = rng.choice(job.signals), job.moment(out, process, seconds, rng)
            if process.poll() is None:
                sent = kind
                process.send_signal(kind)
                if rng.random() < 0.3:  # somebody who cannot wait; this must not spoil what is being saved
                    time.sleep(rng.uniform(0, 0.02))
                    process.send_signal(kind)
        status = process.wait(None if rng is None else 600)
        printed.seek(0)
        return Ended(status, sent, moment, printed.read())


def undisturbed(name: str, job: Job, folder: Path) -> tuple[Any, float]:
    """The results of a command and the seconds it takes with compiled programs; it must agree with itself."""
    found: list[Any] = []
    for _ in range(2):
        out, began = folder / "whole", time.monotonic()
        shutil.rmtree(out, ignore_errors=True)
        ended = run(job, out)
        seconds = time.monotonic() - began
        assert ended.status == 0, f"{name} fails by itself:\n{ended.output[-3000:]}"
        found.append(job.results(out))
    assert found[0] == found[1], f"{name} gives other results when it runs again"
    return found[0], seconds


def interrupt(name: str, job: Job, times: int, folder: Path, rng: random.Random) -> collections.Counter[str]:
    """Interrupt a command so often, and finish it; what happened. Raises AssertionError if anything is lost."""
    counts: collections.Counter[str] = collections.Counter()
    expected, seconds = undisturbed(name, job, folder)
    out, last = folder / "stopped", None
    while True:
        ended = run(job, out, rng if times else None, seconds)
        if ended.interrupted:
            times -= 1
            counts[f"{ended.signal.name}, {name}, {ended.moment}"] += 1
            last = job.check(out, ended, last)
            continue
        assert ended.status == 0, f"{name}, started again, ends with status {ended.status}:\n{ended.output[-2000:]}"
        got = job.results(out)
        differing = [key for key in expected if got.get(key) != expected[key]] if isinstance(got, dict) else "results"
        assert got == expected, f"{name}, interrupted, gives others: {differing}"
        shutil.rmtree(out)
        counts["finished, all equal"] += 1
        last = None
        if not times:
            return counts
