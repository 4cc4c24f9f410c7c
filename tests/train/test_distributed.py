"""Training by several processes: runs that are killed, frozen, or slow to start."""

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import training_runs
import yaml
from process_groups import ends, free_port, running
from tiny_models import BYTES

from swa_jax.base.settings import to_dict

STEPS = 120


@pytest.fixture
def training(launch, tmp_path, byte_tokenizer):
    """`start(name, count)` trains on four devices, spread over `count` processes."""
    stage = {"steps": STEPS, "sequence_length": 16, "batch_size": 4, "data": training_runs.text_in(tmp_path)}
    settings = {"tokenizer": str(byte_tokenizer), "model": to_dict(BYTES), "stages": [stage], "checkpoint_every": 10}
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
            file.write_text(yaml.safe_dump(settings | {"output": str(tmp_path / name)} | (changes or {}).get(i, {})))
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
    found = training_runs.losses(run)
    assert len(found) == STEPS
    return found


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


@pytest.mark.long
@pytest.mark.parametrize("victim", [0, 1])
def test_a_training_process_that_is_frozen_ends_all_and_changes_nothing_when_it_goes_on(training, tmp_path, victim):
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


# Refuses what gathers an array of every process on every device.
_NO_COPIES = """
import jax.experimental.multihost_utils as utils

compare = utils.assert_equal

def small(x, *rest, **options):
    assert not getattr(x, "ndim", 0), f"an array of {x.shape} is gathered from all processes"
    return compare(x, *rest, **options)

utils.assert_equal = small
"""


@pytest.mark.long
def test_no_device_holds_the_copies_that_all_processes_read_of_a_model(training, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(_NO_COPIES)
    assert ends(training("first", 1), 240)[0][0] == 0
    start = {"model": None, "init_from": str(tmp_path / "first" / "model")}
    assert ends(training("run", 2, changes={0: start, 1: start}, python_path=tmp_path), 240) == [(0, "")] * 2
    assert losses(tmp_path / "run")[0] < losses(tmp_path / "first")[0] - 0.1
