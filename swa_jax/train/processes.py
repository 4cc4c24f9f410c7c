"""Several processes that train together: how they find each other, and how all of them end when one does.

When a process of a JAX run dies, the others wait in a collective, or are aborted from C++ with a page of log and no
word on what happened. Each process is therefore two: a guard, which touches no device, and the worker that it starts,
which trains. The guards keep connections to a hub in the guard of process 0. The hub knows who is missing at the
start, compares the configurations, and when a worker fails, is silent, or a connection ends, it tells all the others
why: they end their workers and say it in one sentence.

Messages are lines of JSON. Worker to guard: settings, failed, alive. Guard to hub: hello, settings, failed, silent,
finished, alive. Hub to guard: go, end, done, alive. Guard to worker: go, alive (handed on from the hub).

A guard whose hub is silent or gone ends, and so does a worker whose guard is. A process that was frozen (SIGSTOP, a
machine that stood still) must not write into a run that others have started again in the meantime. Signs of life are
therefore also a lease: a process that has seen none for `lease(timeout)` seconds ends, whatever arrives then, and
writes nothing more (`check_lease`). The lease is shorter than the time after which the others count it as lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import time
from typing import Any

from swa_jax.base.errors import UserError
from swa_jax.train.cluster import Member

CHANNEL = "SWA_JAX_GUARD"  # environment variable of a worker: the descriptor of its socket to the guard
TIMEOUT = 45  # seconds in which all processes must have come, and after which a silent one counts as lost
GOOD_ENDS = (0, 128 + signal.SIGTERM)  # finished, and stopped by a notice after saving (preemption.EXIT_STATUS)

PULSES = 5  # signs of life in the time after which a silent process counts as lost
_HOLD = 3.0  # seconds that an error which may follow from another process's end waits for word of that
_LINE = 2**24  # bytes of a message
AGAIN = "start all processes again to go on from the last checkpoint"


class ProcessError(UserError):
    """A process of the run is missing, has failed or is gone; the sentence says which, and what to do."""


class LostProcess(ProcessError):
    """A process, its machine or the network went away while all was well: the same run, started again, may go on."""

    status = os.EX_TEMPFAIL  # of the command line, so that a launcher knows to start again


class Traceback(ProcessError):
    """This process failed by an error that nobody expected; the text is its traceback."""


def lease(timeout: float) -> float:
    """Seconds without a sign of life after which a process must end by itself.

    The others count it as lost `timeout` seconds after its last sign of life, which it gave up to a pulse before it
    was frozen: this is never later than that.
    """
    return timeout * (PULSES - 1) / PULSES


# ---- the guard ----


def guard(member: Member, command: list[str], timeout: int = TIMEOUT) -> int:
    """Run a worker, `command`, as one of several; returns the status that all of them ended with.

    Raises `ProcessError` when this worker, or any other, fails or is missing; `LostProcess` when one is gone.
    """
    return asyncio.run(_guard(member, command, timeout))


async def _guard(member: Member, command: list[str], timeout: int) -> int:
    async with contextlib.AsyncExitStack() as stack:
        if member.process == 0:
            await stack.enter_async_context(_Hub(member, timeout))
        reader, writer = await _connect(member, timeout)
        stack.callback(writer.close)
        _send(writer, hello=member.process, processes=member.processes)
        ours, theirs = socket.socketpair()
        with theirs:
            worker = await asyncio.create_subprocess_exec(
                *command, env=os.environ | {CHANNEL: str(theirs.fileno())}, pass_fds=[theirs.fileno()]
            )
        stack.push_async_callback(_kill, worker)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            loop.add_signal_handler(number, _forward, worker, number)
        from_worker, to_worker = await asyncio.open_connection(sock=ours, limit=_LINE)
        stack.callback(to_worker.close)
        own: dict[str, Any] = {}  # the worker's failure, as it told it
        pulse = _Pulse(writer, timeout)
        hub = asyncio.create_task(_listen_to_hub(member, reader, to_worker, own, worker, timeout))
        ends = {hub, asyncio.create_task(pulse.run())}
        tasks = ends | {asyncio.create_task(_listen_to_worker(member, worker, from_worker, writer, own, timeout))}
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            # A guard that stood still hears the others' end first, and would take it for the cause.
            if pulse.stood_still() and not (hub.done() and hub.exception() is None):
                raise LostProcess(
                    f"{member} stood still for {pulse.longest:.0f} s, because it or its machine was stopped, and the "
                    f"others do not wait that long; {AGAIN}"
                )
            return await hub
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _connect(member: Member, timeout: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    deadline = time.monotonic() + timeout
    while True:
        try:
            attempt = asyncio.open_connection(*member.address, limit=_LINE)
            return await asyncio.wait_for(attempt, max(1.0, deadline - time.monotonic()))
        except OSError as error:  # TimeoutError is one
            if time.monotonic() > deadline:
                raise ProcessError(
                    f"process 0 of {member.processes} could not be reached at {member.coordinator} within {timeout} s "
                    f"({error.strerror or 'no answer'}): start it there with --process-id 0, correct --coordinator, or "
                    "give all processes a longer --timeout"
                ) from None
        await asyncio.sleep(0.5)


async def _listen_to_worker(
    member: Member,
    worker: asyncio.subprocess.Process,
    reader: asyncio.StreamReader,
    hub: asyncio.StreamWriter,
    own: dict[str, Any],
    timeout: int,
) -> None:
    """Hand on what the worker says, that it says nothing, or how it ended."""
    while True:
        try:
            line = await asyncio.wait_for(reader.readline(), timeout)
        except TimeoutError:
            _send(hub, silent=1)
            return
        except OSError:  # it has ended without having read all that it was sent
            line = b""
        if not line:
            break
        message = json.loads(line)
        if "alive" in message:  # the guard gives its own signs of life
            continue
        if "failed" in message:
            own |= message
            failed = f"{member} failed: {message['failed']}"
            _send(hub, failed=failed, certain=message["certain"], lost=message.get("lost", False))
            return  # it waits for its end
        _send(hub, **message)
    status = await worker.wait()
    if status in GOOD_ENDS:
        _send(hub, finished=status)
        return
    if status == LostProcess.status:
        how = f"had no sign of life from its guard for {lease(timeout):.0f} s, and ended"
    elif -status == signal.SIGTERM:  # later ones are caught
        how = "was told to stop (SIGTERM) before it could begin"
    elif status >= 0:
        how = f"ended with status {status}"
    elif -status == signal.SIGKILL:
        how = "was killed (SIGKILL; out of memory, if nobody sent it)"
    else:
        how = f"was ended by {signal.Signals(-status).name}; what it said last is in its log"
    # Such signals may be JAX's answer to the end of another process.
    certain = -status not in (signal.SIGABRT, signal.SIGSEGV)
    lost = status in (LostProcess.status, -signal.SIGTERM)
    _send(hub, failed=f"{member} {how}; {AGAIN}", certain=certain, lost=lost)


async def _listen_to_hub(
    member: Member,
    reader: asyncio.StreamReader,
    worker: asyncio.StreamWriter,
    own: dict[str, Any],
    process: asyncio.subprocess.Process,
    timeout: int,
) -> int:
    gone = "has ended without a word: it was killed, or its machine is gone"
    while True:
        try:
            line = await asyncio.wait_for(reader.readline(), timeout)
        except TimeoutError:
            line, gone = b"", f"has not been heard of for {timeout} s: its machine or the network is gone"
        except OSError:
            line = b""
        if not line:
            if own.get("certain"):
                raise ProcessError(own["failed"])
            raise LostProcess(f"process 0 of {member.processes} ({member.coordinator}) {gone}; {AGAIN}")
        message = json.loads(line)
        if "go" in message or "alive" in message:
            _send(worker, **message)
        elif "end" in message:
            error = LostProcess if message["lost"] else ProcessError
            if message["process"] == member.process and own:  # it is this one's own failure
                raise Traceback(own["traceback"]) if own.get("traceback") else error(own["failed"])
            raise error(message["end"])
        elif "done" in message:
            return await process.wait()


class _Pulse:
    """A guard's signs of life; `run` returns when they have paused for so long that the lease has run out."""

    def __init__(self, writer: asyncio.StreamWriter, timeout: int):
        self.writer, self.timeout = writer, timeout
        self.last, self.longest = time.monotonic(), 0.0  # seconds

    async def run(self) -> None:
        while not self.stood_still():
            self.last = time.monotonic()
            _send(self.writer, alive=1)
            await asyncio.sleep(self.timeout / PULSES)

    def stood_still(self) -> bool:
        self.longest = max(self.longest, time.monotonic() - self.last)
        return self.longest > lease(self.timeout)


def _forward(worker: asyncio.subprocess.Process, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        worker.send_signal(number)


async def _kill(worker: asyncio.subprocess.Process) -> None:
    if worker.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            worker.kill()
        await worker.wait()


def _send(writer: asyncio.StreamWriter, **message: Any) -> None:
    """Without waiting: a peer that is gone is noticed where it is read from."""
    if not writer.is_closing():
        writer.write(json.dumps(message).encode() + b"\n")


# ---- the hub, in the guard of process 0 ----


class _Hub:
    """An asynchronous context manager; leaving it waits a moment for the other guards to have heard the last word."""

    def __init__(self, member: Member, timeout: int):
        self.member, self.timeout = member, timeout
        self.members: dict[int, asyncio.StreamWriter] = {}
        self.settings: dict[int, dict[str, Any]] = {}
        self.finished: set[int] = set()
        self.over = False  # the last word has been said
        self.tasks: set[asyncio.Task] = set()

    async def __aenter__(self) -> _Hub:
        try:
            self.server = await asyncio.start_server(self._serve, port=self.member.address[1], limit=_LINE)
        except OSError as error:
            raise ProcessError(
                f"process 0 cannot listen on port {self.member.address[1]} of --coordinator {self.member.coordinator}: "
                f"{os.strerror(error.errno) if error.errno else error}; take another port, or end what holds it"
            ) from None
        self._start(self._missing())
        self._start(self._pulse())
        return self

    async def __aexit__(self, *_: Any) -> None:
        deadline = time.monotonic() + _HOLD
        while set(self.members) - {0} and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        for task in self.tasks:
            task.cancel()
        self.server.close()
        for writer in self.members.values():
            writer.close()

    def _start(self, coroutine: Any) -> None:
        task = asyncio.create_task(coroutine)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _missing(self) -> None:
        await asyncio.sleep(self.timeout)
        missing = sorted(set(range(self.member.processes)) - set(self.members))
        if missing and not self.over:
            names = ", ".join(map(str, missing[:8])) + (" and more" if missing[8:] else "")
            self._end(
                f"{len(missing)} of {self.member.processes} processes did not come to {self.member.coordinator} within "
                f"{self.timeout} s (--process-id {names}): start all of them with the same --coordinator, or give "
                "them a longer --timeout"
            )

    async def _pulse(self) -> None:
        while True:
            await asyncio.sleep(self.timeout / PULSES)
            for writer in self.members.values():
                _send(writer, alive=1)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            number = await self._admit(reader, writer)
            if number is not None:
                await self._attend(number, reader, writer.get_extra_info("peername")[0])
        except asyncio.CancelledError:
            pass  # this guard ends; asyncio of Python 3.12 would print a traceback
        finally:
            writer.close()

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int | None:
        try:
            hello = json.loads(await asyncio.wait_for(reader.readline(), self.timeout))
            number, count = int(hello["hello"]), int(hello["processes"])
        except (OSError, ValueError, KeyError, TypeError):
            return None  # not one of ours
        if count != self.member.processes:
            problem = f"process {number} was started with --processes {count}, process 0 with {self.member.processes}"
        elif number in self.members or self.over:
            problem = f"--process-id {number} is taken: give each process of the run its own"
        else:
            self.members[number] = writer
            return number
        _send(writer, end=problem, process=None, lost=False)
        await writer.drain()
        return None

    async def _attend(self, number: int, reader: asyncio.StreamReader, host: str) -> None:
        """Read what a guard says until its connection ends."""
        gone = "has ended without a word: it was killed, or its machine is gone"
        try:
            while line := await asyncio.wait_for(reader.readline(), self.timeout):
                message = json.loads(line)
                if "silent" in message:
                    gone = f"has not answered for {self.timeout} s, though its guard does: it was stopped, or hangs"
                    break
                self._heard(number, message)
        except TimeoutError:
            gone = f"has not been heard of for {self.timeout} s: its machine or the network is gone"
        except OSError:
            pass
        if number not in self.finished:
            self._end(f"process {number} of {self.member.processes} ({host}) {gone}; {AGAIN}", lost=True)
        del self.members[number]  # after the last word, which a process that is only frozen reads one day

    def _heard(self, number: int, message: dict[str, Any]) -> None:
        if "settings" in message:
            self.settings[number] = message["settings"]
            if len(self.settings) == self.member.processes:
                self._go()
        elif "failed" in message:
            if message["certain"]:
                self._end(message["failed"], number, lost=message["lost"])
            else:
                self._start(self._end_later(message["failed"], number, lost=message["lost"]))
        elif "finished" in message:
            self.finished.add(number)
            if len(self.finished) == self.member.processes and not self.over:
                self._tell_all(done=1)

    def _go(self) -> None:
        for number in range(1, self.member.processes):
            difference = _difference(self.settings[0], self.settings[number])
            if difference:
                key, first, other = difference
                self._end(
                    f"process {number} was given another configuration than process 0: '{key}' is {other} there and "
                    f"{first} in process 0; give every process the same file and the same settings"
                )
                return
        address = f"{self.member.coordinator.rpartition(':')[0]}:{_free_port()}"  # of JAX's own service
        for writer in self.members.values():
            _send(writer, go=address)

    async def _end_later(self, sentence: str, number: int, *, lost: bool) -> None:
        await asyncio.sleep(_HOLD)
        self._end(sentence, number, lost=lost)

    def _end(self, sentence: str, number: int | None = None, *, lost: bool = False) -> None:
        if not self.over:
            self._tell_all(end=sentence, process=number, lost=lost)

    def _tell_all(self, **message: Any) -> None:
        self.over = True
        for writer in self.members.values():
            _send(writer, **message)


def _difference(first: Any, other: Any, key: str = "") -> tuple[str, Any, Any] | None:
    """(dotted key, value in `first`, value in `other`) of the first thing that differs."""
    if isinstance(first, dict) and isinstance(other, dict):
        for name in [*first, *(name for name in other if name not in first)]:
            found = _difference(first.get(name), other.get(name), f"{key}.{name}" if key else name)
            if found:
                return found
        return None
    if isinstance(first, list) and isinstance(other, list) and len(first) == len(other):
        pairs = enumerate(zip(first, other, strict=True))
        return next(filter(None, (_difference(a, b, f"{key}.{i}") for i, (a, b) in pairs)), None)
    return None if first == other else (key, first, other)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("", 0))
        return free.getsockname()[1]
