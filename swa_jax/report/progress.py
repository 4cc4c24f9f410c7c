"""How far something long has come: a bar on a terminal, and a plain line every 30 seconds where there is none."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

import rich.progress
from rich.console import Console

INTERVAL = 30.0  # seconds between two plain lines
LINES = 10  # by which the time that is left is told: what is found of an earlier run says nothing of it


class Progress:
    """A context manager; `update` says how much is done. It writes to standard error, or to `console`.

    Where the console is no terminal, the first update prints a line, so do those that come `interval` seconds after
    the line before, and the last one, of all there is to do, if any line before it left something to do:

        step 1200/60000  loss 2.714  412k tokens/s  MFU 41 %  ETA 3 h 12 min  last checkpoint 1000

    Args:
      label: what is counted, such as "step".
      transient: whether the bar disappears from the terminal at the end.
      quiet: shows nothing.
      at_once: whether the first update prints a line, and not only what takes longer than the interval.
      clock: gives seconds, from any origin.
    """

    def __init__(
        self,
        label: str,
        *,
        transient: bool = True,
        quiet: bool = False,
        at_once: bool = True,
        console: Console | None = None,
        interval: float = INTERVAL,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.label, self.interval, self.clock, self.quiet, self.at_once = label, interval, clock, quiet, at_once
        self.console = Console(stderr=True) if console is None else console
        self.plain = not quiet and not self.console.is_terminal
        self.known = deque[tuple[int, float]](maxlen=LINES)  # what was done, and when that was: first, and in lines
        self.printed = self.printed_at = 0.0
        self.bar = rich.progress.Progress(
            rich.progress.TextColumn("{task.description}", markup=False),
            rich.progress.BarColumn(),
            rich.progress.MofNCompleteColumn(),
            rich.progress.TextColumn("{task.fields[text]}", markup=False),
            rich.progress.TimeElapsedColumn(),
            rich.progress.TimeRemainingColumn(),
            console=self.console,
            transient=transient,
            disable=quiet or self.plain,
        )
        self.task = self.bar.add_task(label, total=None, text="")

    def update(self, done: int, total: int, text: str = "", note: str = "") -> None:
        """`text` stands between the count and the time that is left, `note` after it."""
        self.bar.update(self.task, completed=done, total=total, text="  ".join(filter(None, (text, note))))
        if not self.plain:
            return
        now = self.clock()
        if not self.known:
            if not self.at_once:
                self.known.append((done, now))
                self.printed, self.printed_at = total, now  # as if the end had been said
                return
        elif now - self.printed_at < self.interval and (done < total or self.printed == total):
            return
        self.printed, self.printed_at = done, now
        words = [f"{self.label} {done}/{total}", text, self._time_left(done, total, now), note]
        self.known.append((done, now))
        self.say("  ".join(filter(None, words)))

    def say(self, text: str) -> None:
        """Print a line of its own, above the bar if there is one."""
        if not self.quiet:
            self.console.print(text, markup=False, highlight=False, soft_wrap=True, emoji=False)

    def _time_left(self, done: int, total: int, now: float) -> str:
        start, began = self.known[0] if self.known else (done, now)
        if not start < done < total:  # nothing to go by, or nothing left
            return ""
        return f"ETA {duration((now - began) / (done - start) * (total - done))}"

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()


@contextmanager
def counted(
    label: str, total: int, console: Console | None = None, *, at_once: bool = True
) -> Iterator[Callable[[int], None]]:
    """Gives a function that is called with how many more of `total` are done; the options are those of `Progress`."""
    done = 0
    with Progress(label, console=console, at_once=at_once) as progress:

        def advance(more: int) -> None:
            nonlocal done
            done += more
            progress.update(done, max(total, done))

        yield advance


def duration(seconds: float) -> str:
    """In the two largest units of days, hours, minutes; seconds below one minute."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {minutes} min"
    days, hours = divmod(round(hours + minutes / 60), 24)
    return f"{days} d {hours} h"


def rate(count: float) -> str:
    """Three digits, with k, M or G: 950, 41.2k, 412k, 1.25M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= 0.9995 * size:
            return f"{count / size:.3g}{letter}"
    return f"{count:.3g}"
