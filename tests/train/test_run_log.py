"""The log of a run: lines kept and dropped on a resume, a full disk, and metrics that wait for the next step."""

import errno
import sys
import types

import jax.numpy as jnp
import pytest
from training_runs import read_metrics

from swa_jax.base.errors import CheckpointError, ConfigError
from swa_jax.train.config import LogConfig
from swa_jax.train.run_log import RunLog, keep_lines


def open_log(run, config=None, resume_at=0):
    return RunLog(run, config or LogConfig(), resume_at=resume_at, peak_flops=1e12, settings={})


def test_lines_wait_for_the_next_step_and_are_written_once(tmp_path):
    with open_log(tmp_path, LogConfig(every=2)) as log:
        assert log.write(1, {"loss": jnp.float32(2.5)}, 64, 1e6) == []
        (first,) = log.write(2, {"loss": jnp.float32(2.0), "by_layer": jnp.arange(2.0)}, 64, 1e6)
        assert (first["step"], first["loss"]) == (1, 2.5)
        assert 0 <= first["mfu"] < 1
        (second,) = log.flush()
        assert log.flush() == []
        log.add(2, {"validation_loss": 1.5})
    assert read_metrics(tmp_path) == [second, {"step": 2, "validation_loss": 1.5}]  # step 1 is not a multiple of two
    assert second["by_layer"] == [0.0, 1.0]


def test_a_resume_drops_later_lines_and_one_that_was_cut_short(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 4, "lo')
    keep_lines(file, 2)
    assert file.read_text() == '{"step": 1}\n{"step": 2}\n'
    file.write_text('{"step": 1}\n{"step": 2')
    with open_log(tmp_path, resume_at=2) as log:
        log.add(2, {"validation_loss": 1.0})
    assert file.read_text() == '{"step": 1}\n{"step": 2, "validation_loss": 1.0}\n'


@pytest.mark.parametrize("damage", [b"\x00\xff{", b'{"loss": 2.0}', b"[1]", b"", b'{"step": "6"}', b"7"])
def test_a_damaged_line_is_named_and_the_good_ones_after_it_stay(tmp_path, caplog, damage):
    file = tmp_path / "metrics.jsonl"
    lines = [b'{"step": %d, "loss": NaN}' % step for step in range(1, 56)]
    lines[5] = damage
    file.write_bytes(b"\n".join(lines) + b'\n{"step": 56')
    keep_lines(file, 53)
    assert file.read_bytes() == b"\n".join(lines[:5] + lines[6:53]) + b"\n"
    (sentence,) = caplog.messages
    assert sentence.startswith(f"{file}, line 6 is damaged")


def test_a_full_disk_is_one_sentence(tmp_path):
    class Full:
        def __init__(self, file):
            self.file = file

        def write(self, text):
            self.file.write(text[:3])
            return 3

        def close(self):
            self.file.close()

    with open_log(tmp_path) as log:
        log.file = Full(log.file)
        with pytest.raises(CheckpointError, match="jsonl could not be written: No space left") as caught:
            log.add(1, {"loss": 1.0})
    assert caught.value.__cause__.errno == errno.ENOSPC


def test_a_sink_that_is_not_installed_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ConfigError, match=r"'log.tensorboard' needs the package tensorboardX"):
        open_log(tmp_path, LogConfig(tensorboard=True))


def test_runs_in_folders_of_one_name_are_two_of_wandbs_and_each_goes_on(tmp_path, monkeypatch):
    asked = []
    run = types.SimpleNamespace(log=None, finish=lambda exit_code: None)
    module = types.SimpleNamespace(init=lambda **options: asked.append((options["name"], options["id"])) or run)
    monkeypatch.setitem(sys.modules, "wandb", module)
    for parent in ("a", "b", "a"):
        (tmp_path / parent / "run").mkdir(parents=True, exist_ok=True)
        with open_log(tmp_path / parent / "run", LogConfig(wandb_project="mine")):
            pass
    assert [name for name, _ in asked] == ["run"] * 3
    first, second, again = (number for _, number in asked)
    assert first == again != second
