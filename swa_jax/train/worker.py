"""A process that trains as one of several, on the side that trains: its line to the guard, and where all meet.

JAX is imported where it is used: signs of life begin before that, which takes seconds, or minutes from a slow disk.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from swa_jax.base.errors import sentence
from swa_jax.train.cluster import Member
from swa_jax.train.processes import AGAIN, CHANNEL, PULSES, LostProcess, lease

DAY = 24 * 3600  # seconds that processes wait for each other, where the guards say who is gone


def is_worker() -> bool:
    """Whether a guard started this process."""
    return CHANNEL in os.environ


@contextlib.contextmanager
def worker(member: Member, timeout: int) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Gives `join(settings)`, which starts `jax.distributed` once all processes have joined with equal settings.

    Enter it before anything that takes long: the guard waits no longer than `timeout` seconds for a sign of life. An
    exception is told to the guard, which ends this process: it does not come out of the block.
    """
    global _guard_line
    line = _guard_line = _GuardLine(int(os.environ.pop(CHANNEL)), timeout)

    def join(settings: dict[str, Any]) -> None:
        import jax

        line.say(settings=settings | {"version of jax": jax.__version__})
        jax.distributed.initialize(
            line.go.get(),
            member.processes,
            member.process,
            cluster_detection_method="deactivate",
            # JAX would end a healthy process without a word on which other one is gone: the guards watch, and say it.
            initialization_timeout=timeout,
            heartbeat_timeout_seconds=DAY,
            shutdown_timeout_seconds=DAY,  # process 0 may still be summing the last checkpoint
        )

    try:
        yield join
    except SystemExit:
        raise
    except BaseException as error:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        known = "it was interrupted" if isinstance(error, KeyboardInterrupt) else sentence(error)
        late = _says(error, "Gloo context initialization failed")
        if late:
            known = f"another process came over 30 s later, and gloo, which connects CPUs, waits no longer; {AGAIN}"
        brief = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"
        line.say(
            failed=known or brief,
            certain=known is not None and not _may_follow(error),
            lost=late,
            traceback=None if known else traceback.format_exc(),
        )
        sys.stdout.flush()
        while True:  # leaving would wait for the other processes; the guard ends this one
            time.sleep(1)


class _GuardLine:
    """A worker's line to its guard: two threads give signs of life and listen for them."""

    def __init__(self, descriptor: int, timeout: int):
        self.channel = socket.socket(fileno=descriptor)
        self.pause, self.lease = timeout / PULSES, lease(timeout)
        self.sending = threading.Lock()
        self.go: queue.SimpleQueue[str] = queue.SimpleQueue()  # the address of JAX's own service
        self.last = time.monotonic()  # when the guard was heard
        for run in (self._pulse, self._listen):
            threading.Thread(target=run, name="guard", daemon=True).start()

    def say(self, **message: Any) -> None:
        with self.sending:
            self.channel.sendall(json.dumps(message).encode() + b"\n")

    def check(self) -> None:
        """End this process, at once, if the guard has not been heard for longer than the lease."""
        if time.monotonic() - self.last > self.lease:
            os._exit(LostProcess.status)

    def _pulse(self) -> None:
        with contextlib.suppress(OSError):  # `_listen` notices as well
            while True:
                self.say(alive=1)
                time.sleep(self.pause)

    def _listen(self) -> None:
        text = b""
        with contextlib.suppress(OSError):
            while select.select([self.channel], [], [], self.lease)[0]:
                received = self.channel.recv(65536)
                self.check()  # before it counts: a process that was frozen finds old signs of life waiting
                if not received:
                    break
                self.last = time.monotonic()
                *lines, text = (text + received).split(b"\n")
                for message in map(json.loads, lines):
                    if "go" in message:
                        self.go.put(message["go"])
        os._exit(LostProcess.status)


_guard_line: _GuardLine | None = None  # of this process, if a guard started it


def check_lease() -> None:
    """To be called before anything is written into a run's folder.

    Ends this process with status 75 if the other processes may have counted it as lost, since the run may have been
    started again without it.
    """
    if _guard_line is not None:
        _guard_line.check()


def _says(error: BaseException | None, *signs: str) -> bool:
    """Whether one of `signs` stands in an error or in what caused it."""
    while error is not None:
        if any(sign in str(error) for sign in signs):
            return True
        error = error.__cause__ or error.__context__
    return False


def _may_follow(error: BaseException) -> bool:
    """Whether an error may be how JAX says that another process is gone."""
    return _says(error, "Gloo", "UNAVAILABLE", "DEADLINE_EXCEEDED", "ABORTED", "CANCELLED")


# ---- where all processes meet ----

_meetings = itertools.count()


def meet() -> None:
    """Wait until every process has come here; all must call it equally often.

    It goes before the first run of what sends between processes: gloo, which connects CPUs, opens a connection when it
    is first used, and gives up if the other side does not come within 30 seconds. This waits for as long as the other
    processes give signs of life.
    """
    import jax

    if jax.process_count() > 1:
        from jax._src.distributed import global_state  # no public name

        assert global_state.client is not None
        global_state.client.wait_at_barrier(f"swa_jax/{next(_meetings)}", DAY * 1000)


def compile_together(function: Any, *arguments: Any) -> None:
    """Compile a jitted function for `arguments` and meet, so that all processes run it for the first time together.

    JAX keeps what was compiled: the call that follows does not compile again.
    """
    import jax

    if jax.process_count() > 1:
        function.lower(*arguments).compile()
        meet()
