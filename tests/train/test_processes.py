"""Guards, with workers that do not train: none is left waiting when another is missing, fails or dies."""

import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest
from command_line import run
from process_groups import ends, free_port, running

# A worker that joins as the real one does, without JAX, and then does as it is told.
_GUARD = """
import sys
from swa_jax.train.cluster import Member
from swa_jax.train.processes import ProcessError, guard
process, processes, coordinator, timeout, worker = sys.argv[1:]
try:
    sys.exit(guard(Member(int(process), int(processes), coordinator), [sys.executable, "-c", worker], int(timeout)))
except ProcessError as error:
    print(f"{type(error).__name__}: {error}", file=sys.stderr)
    sys.exit(getattr(error, "status", 1))
"""
_WORKER = """
import contextlib, json, os, signal, socket, sys, threading, time
channel = socket.socket(fileno=int(os.environ["SWA_JAX_GUARD"]))
say = lambda **message: channel.sendall(json.dumps(message).encode() + b"\\n")
def pulse():
    with contextlib.suppress(OSError):
        while True:
            say(alive=1)
            time.sleep(0.3)
threading.Thread(target=pulse, daemon=True).start()
say(settings={"seed": %s})
go = b""
while b'"go"' not in go:
    received = channel.recv(1000)
    if not received: sys.exit(9)
    go += received
print("going", os.getpid(), flush=True)
%s
"""
WAIT = "while channel.recv(1): pass"  # until the guard is gone


def worker(then="", seed=0):
    return _WORKER % (seed, then)


@pytest.fixture
def guards(launch):
    def start(workers, *, port=None, count=None, timeout=20):
        address = f"127.0.0.1:{port or free_port()}"
        places = workers.items() if isinstance(workers, dict) else enumerate(workers)
        command = [sys.executable, "-c", _GUARD]
        total = str(count or len(workers))
        return [launch([*command, str(i), total, address, str(timeout), text]) for i, text in places]

    return start


@pytest.mark.parametrize("status", [0, 143])
def test_all_end_as_their_workers_do(guards, status):
    assert ends(guards([worker(f"sys.exit({status})")] * 3)) == [(status, "")] * 3


@pytest.mark.slow
def test_missing_processes_are_named(guards):
    for status, error in ends(guards({0: worker(), 2: worker()}, count=4, timeout=8)):
        assert status == 1
        assert "2 of 4 processes did not come to 127.0.0.1:" in error
        assert "within 8 s (--process-id 1, 3)" in error


def test_process_0_is_missing(guards):
    ((status, error),) = ends(guards({1: worker()}, count=2, timeout=2))
    assert status == 1
    assert "process 0 of 2 could not be reached at 127.0.0.1:" in error


def test_other_settings_in_one_process(guards):
    results = ends(guards([worker(WAIT), worker(WAIT, seed=5)]))
    sentence = "process 1 was given another configuration than process 0: 'seed' is 5 there and 0 in process 0"
    assert all(status == 1 and sentence in error for status, error in results), results


def test_a_process_id_given_twice_and_another_number_of_processes(guards):
    port = free_port()
    first = guards({0: worker(WAIT)}, count=3, port=port)
    time.sleep(1)  # process 0 is to listen
    for place, count, sentence in ((0, 3, "cannot listen on port"), (1, 2, "was started with --processes 2")):
        ((status, error),) = ends(guards({place: worker(WAIT)}, count=count, port=port))
        assert status == 1
        assert sentence in error
    twice = guards({1: worker(WAIT)}, count=3, port=port)
    time.sleep(1)
    ((status, error),) = ends(guards({1: worker(WAIT)}, count=3, port=port))
    assert status == 1
    assert "--process-id 1 is taken" in error
    assert [process.poll() for process in first + twice] == [None, None]


@pytest.mark.parametrize(
    ("then", "sentence"),
    [
        ("say(failed='the disk is full', certain=True)\n" + WAIT, "process 1 of 3 failed: the disk is full"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "process 1 of 3 was killed (SIGKILL; out of memory"),
        ("os.abort()", "process 1 of 3 was ended by SIGABRT"),
        ("sys.exit(3)", "process 1 of 3 ended with status 3"),
    ],
)
def test_a_failure_is_told_to_all_and_comes_before_what_follows_from_it(guards, then, sentence):
    follows = "say(failed='connection closed', certain=False, traceback='...')\n" + WAIT
    late = "time.sleep(1); " if "abort" in then else ""  # two uncertain ones: the first is told
    results = ends(guards([worker(WAIT), worker(then), worker(late + follows)]))
    for i, (status, error) in enumerate(results):
        assert status == 1
        expected = "the disk is full" if i == 1 and "full" in then else sentence
        assert expected in error, results


@pytest.mark.slow
def test_a_peer_that_came_too_late_for_gloo_is_a_lost_process(guards):
    late = """
from swa_jax.train.cluster import Member
from swa_jax.train.worker import worker
with worker(Member(1, 2, "here:1"), 20) as join:
    raise RuntimeError("UNKNOWN: Gloo context initialization failed: DEADLINE_EXCEEDED: GetKeyValue() timed out")
"""
    results = ends(guards([worker(WAIT), late]))
    assert [status for status, _ in results] == [75, 75]
    assert results[0][1].startswith("LostProcess: process 1 of 2 failed: another process came over 30 s later")
    assert results[1][1].startswith("LostProcess: another process came over 30 s later")


def test_a_machine_that_is_taken_away_during_the_start_is_a_lost_process(guards):
    """A launcher is to start again: nothing has failed."""
    results = ends(guards([worker(WAIT), worker("os.kill(os.getpid(), signal.SIGTERM); time.sleep(9)")]))
    told = "LostProcess: process 1 of 2 was told to stop (SIGTERM) before it could begin; start all processes again"
    assert all(status == 75 and error.startswith(told) for status, error in results), results


def test_an_unexpected_error_is_a_traceback_in_its_process_and_a_sentence_in_the_others(guards):
    fails = "say(failed='KeyError: 7', certain=False, traceback='Traceback: KeyError: 7')\n" + WAIT
    results = ends(guards([worker(WAIT), worker(fails)]))
    assert results == [
        (1, "ProcessError: process 1 of 2 failed: KeyError: 7"),
        (1, "Traceback: Traceback: KeyError: 7"),
    ]


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_guard_that_is_killed(guards, victim):
    processes = guards([worker(WAIT)] * 3)
    workers = [int(process.stdout.readline().split()[1]) for process in processes]
    start = time.monotonic()
    os.kill(processes[victim].pid, signal.SIGKILL)
    results = ends(processes)
    assert time.monotonic() - start < 30
    for i, (status, error) in enumerate(results):
        assert status == (-9 if i == victim else 75)
        assert i == victim or f"process {victim} of 3" in error
        assert i == victim or "has ended without a word" in error
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < deadline, "a worker outlived its guard"
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_worker_that_is_frozen_is_named_and_ended(guards, victim):
    processes = guards([worker(WAIT)] * 3, timeout=4)
    workers = [int(process.stdout.readline().split()[1]) for process in processes]
    os.kill(workers[victim], signal.SIGSTOP)
    for status, error in ends(processes):
        assert status == 75
        assert f"process {victim} of 3 (127.0.0.1) has not answered for 4 s" in error
    assert not any(map(running, workers))


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_is_frozen_is_named_and_ends_when_it_goes_on(guards, victim):
    """Guard and worker, as a machine that stands still, or has lost its network."""
    processes = guards([worker(WAIT)] * 3, timeout=5)
    workers = [int(process.stdout.readline().split()[1]) for process in processes]
    os.killpg(processes[victim].pid, signal.SIGSTOP)
    frozen = processes.pop(victim)
    for status, error in ends(processes):
        assert status == 75
        assert f"process {victim} of 3 (127.0.0.1" in error
        assert "has not been heard of for 5 s" in error
    os.killpg(frozen.pid, signal.SIGCONT)
    ((status, error),) = ends([frozen])
    assert status == 75
    assert f"process {victim} of 3 stood still for" in error
    assert not any(map(running, workers))


@pytest.mark.slow
def test_a_process_that_is_frozen_for_a_moment_goes_on(guards):
    processes = guards([worker("time.sleep(5)")] * 2, timeout=6)
    for process in processes:
        process.stdout.readline()
    os.killpg(processes[1].pid, signal.SIGSTOP)
    time.sleep(2)
    os.killpg(processes[1].pid, signal.SIGCONT)
    assert ends(processes) == [(0, "")] * 2


@pytest.mark.slow
def test_a_worker_that_never_says_a_word(guards):
    """Frozen while it starts, before it has joined."""
    silent = "import time; time.sleep(60)"
    for status, error in ends(guards([worker(WAIT), silent], timeout=4)):
        assert status == 75
        assert "process 1 of 2 (127.0.0.1) has not answered for 4 s" in error


# The real worker's side, with this test as its guard.
_LEASE = """
import signal, sys, time
from swa_jax.train.cluster import Member
from swa_jax.train.worker import check_lease, worker
signal.signal(signal.SIGCONT, lambda *_: time.sleep(0.2))  # old signs of life are read before the next check
with worker(Member(1, 2, "here:1"), 2):
    print("ready", flush=True)
    while True:
        time.sleep(0.01)
        now = time.monotonic()  # before the check: a process frozen between the check and the write does write
        check_lease()
        with open(sys.argv[1], "a") as file:  # whole lines: the process may end at any moment
            file.write(f"{now}\\n")
"""


@pytest.mark.parametrize(
    "how", [*(pytest.param(f"{who} frozen", marks=pytest.mark.slow) for who in ("worker", "guard")), "guard gone"]
)
def test_a_worker_ends_when_its_lease_has_run_out(launch, tmp_path, how):
    ours, theirs = socket.socketpair()
    file = tmp_path / "written"
    process = launch(
        [sys.executable, "-c", _LEASE, str(file)],
        env=os.environ | {"SWA_JAX_GUARD": str(theirs.fileno())},
        pass_fds=[theirs.fileno()],
    )
    theirs.close()
    process.stdout.readline()
    for _ in range(8):  # well beyond the lease, in all
        ours.sendall(b'{"alive": 1}\n')
        time.sleep(0.3)
    assert process.poll() is None
    frozen = time.monotonic()
    if how == "worker frozen":
        process.send_signal(signal.SIGSTOP)
        for _ in range(8):
            ours.sendall(b'{"alive": 1}\n')
            time.sleep(0.3)
        process.send_signal(signal.SIGCONT)
    if how == "guard gone":
        ours.close()
    else:
        assert b'{"alive": 1}' in ours.recv(65536)
    assert process.wait(10) == 75
    ours.close()
    written = float(file.read_text().split()[-1]) - frozen
    assert written < {"worker frozen": 0.1, "guard frozen": 1.7, "guard gone": 0.5}[how]


_LATE = """
from swa_jax.train import worker
from swa_jax.train.cluster import Member
with worker.worker(Member(1, 2, "here:1"), 2):
    worker._guard_line.last -= 2  # awake again, and the first to look
    worker.check_lease()
    print("written")
"""


def test_the_lease_is_looked_at_before_a_write(launch):
    ours, theirs = socket.socketpair()
    environment = os.environ | {"SWA_JAX_GUARD": str(theirs.fileno())}
    process = launch([sys.executable, "-c", _LATE], env=environment, pass_fds=[theirs.fileno()])
    theirs.close()
    assert process.communicate()[0] == ""
    assert process.returncode == 75
    ours.close()


_JOIN = """
import jax
from swa_jax.train.cluster import Member
from swa_jax.train.worker import worker
say = lambda *_, **given: print(given["heartbeat_timeout_seconds"], given["shutdown_timeout_seconds"])
jax.distributed.initialize = say
with worker(Member(1, 2, "here:1"), 20) as join:
    join({})
"""


def test_jax_ends_no_process_that_leaves_later_than_the_others(launch):
    """Process 0 may still be summing up the last checkpoint."""
    ours, theirs = socket.socketpair()
    ours.sendall(b'{"go": "here:2"}\n')
    environment = os.environ | {"SWA_JAX_GUARD": str(theirs.fileno())}
    process = launch([sys.executable, "-c", _JOIN], env=environment, pass_fds=[theirs.fileno()])
    theirs.close()
    assert process.stdout.readline().split() == [str(24 * 3600)] * 2
    ours.close()


def test_signals_reach_the_worker(guards):
    # Short sleeps: a signal that comes just before a sleep begins is handled after it.
    waits = "print('ready', flush=True)\nwhile True: time.sleep(0.1)"
    catches = f"signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n{waits}"
    processes = guards([worker(catches)] * 2)
    for process in processes:
        process.stdout.readline()
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
    assert ends(processes) == [(143, "")] * 2


def test_what_jax_may_say_of_a_process_that_is_gone():
    from swa_jax.train.worker import _may_follow

    gone, own = RuntimeError("UNAVAILABLE: connection reset"), ValueError("the disk is full")
    while_saving = ValueError("cannot save")
    while_saving.__context__ = gone
    assert [_may_follow(error) for error in (gone, while_saving, own)] == [True, True, False]


def test_the_command_starts_a_guard_and_the_guard_the_command(monkeypatch, tmp_path):
    started = []
    monkeypatch.setattr("swa_jax.train.processes.guard", lambda *given: started.append(given) or 7)
    place = ("--processes", 2, "--process-id", 1, "--coordinator", "here:1", "--timeout", 20)
    run("train", tmp_path / "run.yaml", "seed=3", *place, status=7)
    ((found, command, timeout),) = started
    assert (found.process, found.processes, found.coordinator, timeout) == (1, 2, "here:1", 20)
    assert command[1:] == ["-m", "swa_jax.cli", "train", str(tmp_path / "run.yaml"), "seed=3", *map(str, place)]
