"""Notices of preemption: SIGTERM, the metadata server, several processes; and training runs that are interrupted."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from python_process import python
from timing import wait_until
from tiny_models import BYTES
from training_runs import losses, text_in
from web_server import Requests, web_server

import swa_jax.train.loop
import swa_jax.train.preemption
from swa_jax.base.settings import from_dict, to_dict
from swa_jax.train.loop import TrainConfig, train
from swa_jax.train.preemption import EXIT_STATUS, Preempted, preemption_notices

ROOT = Path(__file__).resolve().parents[2]


def test_sigterm_is_noticed_at_the_next_step_and_the_old_handler_comes_back():
    before = signal.getsignal(signal.SIGTERM)
    with preemption_notices() as preempted:
        assert not preempted(1)
        for _ in range(2):  # a second one changes nothing
            os.kill(os.getpid(), signal.SIGTERM)
        assert preempted(2)
        assert preempted(3)
    assert signal.getsignal(signal.SIGTERM) is before
    with preemption_notices() as preempted:
        assert not preempted(1)


def test_outside_the_main_thread_there_is_no_notice():
    answers = []

    def run():
        with preemption_notices() as preempted:
            answers.append(preempted(1))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert answers == [False]


def test_the_status_is_that_of_a_terminated_process():
    assert EXIT_STATUS == 143
    code = "from swa_jax.train.preemption import Preempted; raise Preempted"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 143


@pytest.fixture
def metadata_server():
    values = {"preempted": "FALSE", "maintenance-event": "NONE"}

    class Metadata(Requests):
        def do_GET(self):
            assert self.headers["Metadata-Flavor"] == "Google"
            asked.append(self.path)
            self.say(values[self.path.rsplit("/", 1)[1]].encode())

    asked = []
    with web_server(Metadata) as url:
        yield f"{url}/instance", values, asked


@pytest.mark.parametrize("notice", [("preempted", "TRUE"), ("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE")])
def test_a_notice_of_the_metadata_server(metadata_server, monkeypatch, notice):
    url, values, asked = metadata_server
    monkeypatch.setattr(swa_jax.train.preemption, "_INTERVAL", 0.05)
    with preemption_notices(url) as preempted:
        wait_until(lambda: len(asked) > 3)
        assert not preempted(1)
        values["maintenance-event"] = "MIGRATE_ON_HOST_MAINTENANCE"  # not a reason to stop
        count = len(asked)
        wait_until(lambda: len(asked) > count + 3)
        assert not preempted(2)
        values[notice[0]] = notice[1]
        wait_until(lambda: preempted(3))


def test_no_metadata_server_is_no_notice(monkeypatch):
    monkeypatch.setattr(swa_jax.train.preemption, "_INTERVAL", 0.02)
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        with preemption_notices(f"http://127.0.0.1:{reserved.getsockname()[1]}") as preempted:
            time.sleep(0.2)
            assert not preempted(1)


@pytest.mark.slow
def test_a_terminated_run_goes_on_from_its_last_step_and_past_a_damaged_checkpoint(
    byte_tokenizer, tmp_path, monkeypatch, caplog
):
    stage = {"steps": 10, "sequence_length": 16, "batch_size": 2, "data": text_in(tmp_path)}
    settings = {"tokenizer": str(byte_tokenizer), "model": to_dict(BYTES), "stages": [stage], "checkpoint_every": 4}

    def run(name):
        config = from_dict(TrainConfig, settings | {"output": str(tmp_path / name)})
        train(config, quiet=True)
        return losses(tmp_path / name)

    expected = run("straight")
    real, calls = swa_jax.train.loop.place_batch, []

    def terminated_in_the_sixth(*arguments):
        calls.append(arguments)
        if len(calls) == 6:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*arguments)

    monkeypatch.setattr(swa_jax.train.loop, "place_batch", terminated_in_the_sixth)
    with pytest.raises(Preempted) as stop:
        run("again")
    assert stop.value.code == 143
    checkpoints = tmp_path / "again" / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["4", "6"]
    manifest = checkpoints / "6" / "manifest.json"
    manifest.write_text(manifest.read_text()[:-1])
    assert run("again") == expected
    assert len(calls) == 6 + 6  # from step 4
    assert f"{manifest} is damaged" in caplog.text
    assert sorted(path.name for path in checkpoints.iterdir()) == ["10", "6.damaged", "8"]


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [["training", "--count", "6", "--steps", "150"], ["checkpoints", "--count", "12"]],
    ids=lambda one: one[0],
)
def test_a_sample_of_the_torture(tmp_path, options):
    figures = tmp_path / "figures.json"
    python("-m", "scripts.torture", *options, "--json", figures, timeout=600)
    written = json.loads(figures.read_text())
    if options[0] == "training":
        assert sum(n for name, n in written.items() if name.startswith("SIG")) == 6
        assert written["finished, all equal"] >= 1
    else:
        assert written["found and named"] == 12
