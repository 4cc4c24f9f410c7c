"""Several processes: who they are, how they meet, and that none is left waiting when one is missing, fails or dies."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import yaml

import swa_jax.train.cluster
from swa_jax.errors import ConfigError
from swa_jax.train.cluster import Place, find_place
from swa_jax.train.processes import _difference

ROOT = Path(__file__).resolve().parents[2]


# ---- which process this is ----


def test_the_arguments_say_which_process_this_is():
    assert find_place(None, None, None, detect=False, timeout=1) is None
    assert find_place(1, 0, "here:1", detect=False, timeout=1) is None  # alone
    place = find_place(2, 1, "[::1]:8476", detect=False, timeout=1)
    assert (str(place), place.address) == ("process 1 of 2", ("::1", 8476))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((2, None, None), "--processes without --process-id and --coordinator: give all three"),
        ((None, 1, "here:1"), "--process-id, --coordinator without --processes"),
        ((2, 2, "here:1"), "--process-id 2 is not one of 2 processes: it must be from 0 to 1"),
        ((2, 0, "here"), "--coordinator is 'here': it must be HOST:PORT"),
    ],
)
def test_wrong_arguments(arguments, sentence):
    with pytest.raises(ConfigError, match=sentence):
        find_place(*arguments, detect=False, timeout=1)


def test_slurm_is_detected_when_asked_for(monkeypatch):
    with pytest.raises(ConfigError, match="--distributed found no cluster"):
        find_place(None, None, None, detect=True, timeout=1)
    values = {"JOB_ID": "4096", "STEP_NODELIST": "node[7-9]", "NTASKS": "3", "PROCID": "2", "LOCALID": "0"}
    for name, value in values.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("JAX_LOCAL_DEVICE_IDS", "0")  # so that it is put back
    assert find_place(None, None, None, detect=False, timeout=1) is None
    assert find_place(None, None, None, detect=True, timeout=1) == Place(2, 3, "node7:61440")


def test_a_tpu_vm_that_is_one_of_several_workers_is_detected_without_being_asked(monkeypatch, tmp_path):
    def found():
        return find_place(None, None, None, detect=False, timeout=1)

    monkeypatch.setattr("jax._src.clusters.cloud_tpu_cluster.running_in_cloud_tpu_vm", True)
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "localhost,other")
    monkeypatch.setenv("TPU_WORKER_ID", "1")
    for name in ("COORDINATOR_ADDRESS", "NUM_SLICES", "SLICE_ID"):  # else the metadata server is asked
        monkeypatch.setenv(f"MEGASCALE_{name}", "")
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setattr(swa_jax.train.cluster, "_TPUS", (str(tmp_path / "accel*"),))
    assert found() is None
    (tmp_path / "accel0").touch()
    assert found() == Place(1, 2, "localhost:8482")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert found() is None
    monkeypatch.setenv("JAX_PLATFORMS", "tpu,cpu")
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "localhost")
    assert found() is None


def test_the_first_key_that_differs():
    first = {"a": {"b": 1, "c": [{"d": 2}, 3]}, "e": None}
    assert _difference(first, json.loads(json.dumps(first))) is None
    assert _difference(first, first | {"a": {"b": 1, "c": [{"d": 4}, 3]}}) == ("a.c.0.d", 2, 4)
    assert _difference(first, first | {"f": 5}) == ("f", None, 5)
    assert _difference({"c": [1]}, {"c": [1, 2]}) == ("c", [1], [1, 2])


# ---- guards, with workers that do not train ----

# A worker that joins as the real one does, without JAX, and then does as it is told.
_GUARD = """
import sys
from swa_jax.train.cluster import Place
from swa_jax.train.processes import ProcessError, guard
process, processes, coordinator, timeout, worker = sys.argv[1:]
try:
    sys.exit(guard(Place(int(process), int(processes), coordinator), [sys.executable, "-c", worker], int(timeout)))
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


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture
def launch():
    """Starts a process in a session of its own; what is left of all sessions is killed at the end."""
    started = []

    def start(command, **options):
        process = subprocess.Popen(
            command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True, **options,
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.fixture
def guards(launch):
    def start(workers, *, port=None, count=None, timeout=20):
        address = f"127.0.0.1:{port or free_port()}"
        places = workers.items() if isinstance(workers, dict) else enumerate(workers)
        command = [sys.executable, "-c", _GUARD]
        total = str(count or len(workers))
        return [launch([*command, str(i), total, address, str(timeout), text]) for i, text in places]

    return start


def ends(processes, seconds=60):
    """[(status, last line of stderr that is not of the progress)]"""
    deadline = time.monotonic() + seconds
    results = []
    for process in processes:
        _, error = process.communicate(timeout=max(1, deadline - time.monotonic()))
        assert "StreamReaderProtocol" not in error, error  # a traceback of a guard
        lines = [line for line in error.strip().splitlines() if not line.startswith("step ")]
        results.append((process.returncode, (lines or [""])[-1]))
    return results


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
    sentence = (
        "process 1 was given another configuration than process 0: 'seed' is 5 there and 0 in process 0"
    )
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
from swa_jax.train.cluster import Place
from swa_jax.train.worker import worker
with worker(Place(1, 2, "here:1"), 20) as join:
    raise RuntimeError("UNKNOWN: Gloo context initialization failed: DEADLINE_EXCEEDED: GetKeyValue() timed out")
"""
    results = ends(guards([worker(WAIT), late]))
    assert [status for status, _ in results] == [75, 75]
    assert results[0][1].startswith(
        "LostProcess: process 1 of 2 failed: another process came over 30 s later"
    )
    assert results[1][1].startswith("LostProcess: another process came over 30 s later")


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


def running(pid):
    """Whether a process exists and is not a zombie."""
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_worker_that_is_frozen_is_named_and_ended(guards, victim):
    processes = guards([worker(WAIT)] * 3, timeout=4)
    workers = [int(process.stdout.readline().split()[1]) for process in processes]
    os.kill(workers[victim], signal.SIGSTOP)
    for status, error in ends(processes):
        assert status == 75
        assert f"process {victim} of 3 (127.0.0.1) has not answered for 4 s" in error
    assert not any(map(running, workers))


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
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
import sys, time
from swa_jax.train.cluster import Place
from swa_jax.train.worker import check_lease, worker
with worker(Place(1, 2, "here:1"), 2):
    print("ready", flush=True)
    while True:
        time.sleep(0.01)
        check_lease()
        with open(sys.argv[1], "a") as file:  # whole lines: the process may end at any moment
            file.write(f"{time.monotonic()}\\n")
"""


@pytest.mark.parametrize("how", ["worker frozen", "guard frozen", "guard gone"])
def test_a_worker_ends_when_its_lease_has_run_out(launch, tmp_path, how):
    ours, theirs = socket.socketpair()
    file = tmp_path / "written"
    process = launch(
        [sys.executable, "-c", _LEASE, str(file)],
        env=os.environ | {"SWA_JAX_GUARD": str(theirs.fileno())}, pass_fds=[theirs.fileno()],
    )  # fmt: skip
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


# ---- training ----

STEPS = 120
MODEL = {
    "model_type": "qwen3", "vocab_size": 257, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "qk_norm": True,
}  # fmt: skip


@pytest.fixture
def training(launch, tmp_path, byte_tokenizer):
    """`start(name, count)` trains on four devices, spread over `count` processes."""
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over a lazy dog " * 40)
    stage = {"steps": STEPS, "sequence_length": 16, "batch_size": 4, "data": [{"files": [str(text)]}]}
    settings = {"tokenizer": str(byte_tokenizer), "model": MODEL, "stages": [stage], "checkpoint_every": 10}
    settings |= {"pattern": "window", "sliding_window": 4}

    def start(name, count, *, limit=None, changes=None, timeout=45, python_path=None):
        port = free_port()
        environment = os.environ | {
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={4 // count}",
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        if python_path is not None:
            environment["PYTHONPATH"] = f"{python_path}:{os.environ.get('PYTHONPATH', '')}"
        processes = []
        for i in range(count):
            file = tmp_path / f"{name}{i}.yaml"
            file.write_text(
                yaml.safe_dump(settings | {"output": str(tmp_path / name)} | (changes or {}).get(i, {}))
            )
            command = [sys.executable, "-m", "swa_jax.cli", "train", str(file)]
            if count > 1:
                command += ["--processes", str(count), "--process-id", str(i)]
                command += ["--coordinator", f"127.0.0.1:{port}", "--timeout", str(timeout)]
            if i == limit:  # this process can write no file longer than 4 KiB
                command = ["bash", "-c", 'ulimit -f 4; exec "$@"', "bash", *command]
            processes.append(launch(command, env=environment))
        return processes

    return start


def wait_for_step(run, step, processes):
    deadline = time.monotonic() + 240
    while not any(int(path.name) >= step for path in (run / "checkpoints").glob("[0-9]*[0-9]")):
        assert [process.poll() for process in processes] == [None] * len(processes), ends(processes)
        assert time.monotonic() < deadline
        time.sleep(0.01)


def losses(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    return [line["loss"] for line in lines]


@pytest.mark.long
def test_killed_and_terminated_runs_go_on(training, tmp_path):
    """Bit for bit with as many processes; with others, which add up in another order, within rounding."""
    assert ends(training("straight", 2), 240) == [(0, "")] * 2
    expected = losses(tmp_path / "straight")

    processes = training("killed", 2)
    wait_for_step(tmp_path / "killed", 20, processes)
    start = time.monotonic()
    os.killpg(processes[1].pid, signal.SIGKILL)  # guard and worker, as when a machine goes down
    (status, error), (killed, _) = ends(processes)
    assert time.monotonic() - start < 60
    assert (status, killed) == (75, -9)
    assert error.startswith("process 1 of 2 (127.0.0.1) has ended without a word"), error
    assert ends(training("killed", 2), 240) == [(0, "")] * 2
    assert losses(tmp_path / "killed") == expected

    run = tmp_path / "terminated"
    stops = []
    for count in (4, 2):
        processes = training("terminated", count)
        wait_for_step(run, 20 * len(stops) + 20, processes)
        processes[count - 1].send_signal(signal.SIGTERM)
        results = ends(processes)
        assert [status for status, _ in results] == [143] * count, results
        stops.append(max(int(path.name) for path in (run / "checkpoints").iterdir()))
    assert 20 <= stops[0] < stops[1] < STEPS
    assert ends(training("terminated", 1), 240)[0][0] == 0
    np.testing.assert_allclose(losses(run), expected, rtol=1e-6)


@pytest.mark.long
def test_a_process_that_cannot_write_ends_all(training, tmp_path):
    results = ends(training("run", 2, limit=1), 200)
    for status, error in results:
        assert status == 2
        assert "checkpoint of step 10 could not be written" in error, results
    assert results[0][1].startswith("process 1 of 2 failed: ")
    assert not list((tmp_path / "run" / "checkpoints").glob("[0-9]"))
    assert ends(training("run", 2), 200) == [(0, "")] * 2
    assert (tmp_path / "run" / "model" / "manifest.json").exists()


@pytest.mark.long
def test_configurations_that_differ(training, tmp_path):
    results = ends(training("run", 2, changes={1: {"seed": 7}}))
    assert all(status == 2 and "'seed' is 7 there and 0 in process 0" in error for status, error in results)
    assert not (tmp_path / "run").exists()


def worker_of(process):
    """The process that a guard has started."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return int(children.read_text().split()[0])


@pytest.mark.parametrize(
    "victim", [pytest.param(0, marks=pytest.mark.long), pytest.param(1, marks=pytest.mark.slow)]
)
def test_a_training_process_that_is_frozen_ends_all_and_changes_nothing_when_it_goes_on(
    training, tmp_path, victim
):
    run = tmp_path / "run"
    processes = training("run", 2, timeout=15)
    wait_for_step(run, 20, processes)
    pid = worker_of(processes[victim])
    os.killpg(processes[victim].pid, signal.SIGSTOP)
    frozen = processes.pop(victim)
    ((status, error),) = ends(processes)
    assert status == 75
    assert f"process {victim} of 2 (127.0.0.1" in error
    assert "has not been heard of for 15 s" in error
    assert ends(training("run", 2), 240) == [(0, "")] * 2  # as `up` does, while the other is still frozen

    def contents():
        files = (path for path in run.rglob("*") if path.is_file())
        return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in files}

    before = contents()
    os.killpg(frozen.pid, signal.SIGCONT)
    ((status, error),) = ends([frozen])
    assert status == 75
    assert f"process {victim} of 2 stood still" in error
    assert not running(pid)
    assert contents() == before
    losses(run)


# Delays process 1 when JAX's processes know each other and before the first message between their devices.
_SLOW_START = """
import time
import jax._src.distributed as distributed

initialize = distributed.State.initialize

def slow(self, *arguments, **options):
    import swa_jax.train.loop

    initialize(self, *arguments, **options)
    prepare = swa_jax.train.loop._prepare
    if self.process_id == 1:
        swa_jax.train.loop._prepare = lambda config: (prepare(config), time.sleep(SECONDS))[0]

distributed.State.initialize = slow
"""


@pytest.mark.long
def test_a_start_that_is_slower_than_gloo_waits(training, tmp_path):
    """By 33 s, where gloo gives up after 30, and where a silent process is lost after 15."""
    (tmp_path / "sitecustomize.py").write_text(_SLOW_START.replace("SECONDS", "33"))
    start = time.monotonic()
    assert ends(training("run", 2, timeout=15, python_path=tmp_path), 240) == [(0, "")] * 2
    assert time.monotonic() - start > 33
    losses(tmp_path / "run")
