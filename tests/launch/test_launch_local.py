"""The launcher for this machine: what it prints, and what becomes of the others when one process ends."""

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from timing import wait_until

from launch.local import main
from swa_jax.base.settings import from_dict
from swa_jax.train.config import TrainConfig

ROOT = Path(__file__).parents[2]


def local(*arguments: object, stand_in: str | None = None) -> subprocess.Popen[str]:
    """The local launcher as a process of its own; with `stand_in`, Python code in place of the training."""
    code = "import signal, sys, launch.local as local\n"
    code += "for one in (signal.SIGINT, signal.SIGHUP): signal.signal(one, signal.SIG_DFL)\n"  # nohup ignores them
    if stand_in is not None:
        code += f"real, code = local.commands, {stand_in!r}\n"
        code += "local.commands = lambda *a: [(e, [sys.executable, '-c', code, *c[3:]]) for e, c in real(*a)]\n"
        code += "local.HOLD, local.GRACE = 0.3, 1.0\n"
    code += "sys.exit(local.main())\n"
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )


def dry_run(capsys, *arguments: object) -> list[list[str]]:
    assert main([*map(str, arguments), "--processes=2", "--dry-run"]) == 0
    return [shlex.split(line) for line in capsys.readouterr().out.splitlines()]


def test_local_dry_run(tmp_path, capsys, monkeypatch):
    file = tmp_path / "a b.yaml"
    file.write_text((ROOT / "configs" / "swat-tiny.yaml").read_text())
    lines = dry_run(capsys, file, "output=runs/a b", "--cpu-devices=4")
    assert len(lines) == 2
    for number, line in enumerate(lines):
        assert line[:2] == ["env", "JAX_PLATFORMS=cpu"]
        assert line[2].endswith("--xla_force_host_platform_device_count=4")
        assert line[4:9] == ["-m", "swa_jax.cli", "train", str(file), "output=runs/a b"]
        assert line[10:] == ["--processes=2", f"--process-id={number}"]
    assert lines[0][9] == lines[1][9]
    assert lines[0][9].startswith("--coordinator=127.0.0.1:")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    devices = [line[1] for line in dry_run(capsys, file, "--gpus=2")]
    assert devices == ["CUDA_VISIBLE_DEVICES=0,1", "CUDA_VISIBLE_DEVICES=2,3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7,GPU-a")  # the others are somebody else's
    assert [line[1] for line in dry_run(capsys, file, "--gpus=1")] == [
        "CUDA_VISIBLE_DEVICES=4",
        "CUDA_VISIBLE_DEVICES=7",
    ]
    assert main([str(file), "--processes=2", "--gpus=2", "--dry-run"]) == 2
    assert capsys.readouterr().err == "CUDA_VISIBLE_DEVICES names 3 GPUs, 2 processes take 2 each\n"


def test_local_refuses(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    for words, sentence in (
        ("no.yaml --processes=1 --dry-run", "configuration file no.yaml does not exist"),
        ("configs/swat-tiny.yaml stages.0.stps=5 --processes=1 --dry-run", "unknown key 'stages.0.stps'; did you mean"),
        ("c.yaml", "Missing option '--processes'; --help says more"),
        ("c.yaml --processes=0", "Invalid value for '--processes': Input should be greater than or equal to 1;"),
        ("c.yaml --processes=1 --gpus=1 --cpu-devices=1", "--cpu-devices and --gpus are both given: processes have"),
    ):
        assert main(words.split()) == 2
        out, error = capsys.readouterr()
        assert out == ""
        assert error.startswith(sentence)
        assert error.count("\n") == 1


_ME = "import os, signal, sys, time\nme = int(sys.argv[-1].partition('=')[2])\n"


def test_local_prefixes_the_logs_of_processes_with_sessions_of_their_own():
    """So that Ctrl-C reaches the launcher alone, which sends it on once."""
    said = "print('one' if os.getsid(0) == os.getpid() else 'shared'); print('two', file=sys.stderr)"
    process = local("c.yaml", "--processes", 3, stand_in=_ME + said)
    out, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (0, "")
    assert sorted(out.splitlines()) == sorted(f"[{i}] {word}" for i in range(3) for word in ("one", "two"))


@pytest.mark.parametrize(("failure", "status"), [("sys.exit(7)", 7), ("os.kill(os.getpid(), signal.SIGKILL)", 137)])
def test_local_ends_all_when_one_fails(failure, status):
    """The others hear SIGTERM first; one of them does not care and is killed."""
    code = _ME + (
        f"if me == 1:\n    {failure}\n"
        "def told(*_): print('told', flush=True) or me == 0 and sys.exit(143)\n"
        "signal.signal(signal.SIGTERM, told)\nwhile True: time.sleep(0.05)\n"
    )
    process = local("c.yaml", "--processes", 3, stand_in=code)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == status
    assert set(out.splitlines()) <= {"[0] told", "[2] told"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_local_hands_on_the_signal_and_says_that_the_run_has_saved(number):
    code = _ME + (
        "signal.signal(signal.SIGTERM, lambda *_: print('saved', flush=True) or sys.exit(143))\n"
        "print('ready', flush=True)\nwhile True: time.sleep(0.05)\n"
    )
    process = local("c.yaml", "--processes", 2, stand_in=code)
    assert {process.stdout.readline(), process.stdout.readline()} == {"[0] ready\n", "[1] ready\n"}
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 143
    assert sorted(out.splitlines()) == ["[0] saved", "[1] saved"]


def test_local_starts_again_what_was_stopped_by_someone_else(tmp_path):
    code = _ME + (
        f"from pathlib import Path\nmark = Path({str(tmp_path)!r}) / str(me)\n"
        "if mark.exists(): sys.exit(0)\nmark.touch(); sys.exit(143)\n"
    )
    process = local("c.yaml", "--processes", 2, stand_in=code)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert out == "the run was told to stop and has saved: it is started again\n"


@pytest.mark.long
def test_local_trains_and_goes_on_after_a_signal(tmp_path, byte_tokenizer):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over a lazy dog " * 200)
    model = {"model_type": "qwen3", "vocab_size": 257, "hidden_size": 16, "intermediate_size": 16}
    model |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    stage = {"steps": 200, "sequence_length": 16, "batch_size": 4, "data": [{"files": [str(text)]}]}
    config = {"output": str(tmp_path / "run"), "tokenizer": str(byte_tokenizer), "model": model}
    config |= {"stages": [stage], "checkpoint_every": 50, "mesh": {"fsdp": 2, "context": 2}}
    from_dict(TrainConfig, config)
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(config))
    metrics = tmp_path / "run" / "metrics.jsonl"
    process = local(file, "--processes", 2, "--cpu-devices", 2)
    wait_until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 5, 240)
    process.send_signal(signal.SIGTERM)
    out, error = process.communicate(timeout=240)
    assert process.returncode == 143, out + error
    stopped = len(metrics.read_text().splitlines())
    assert 5 < stopped < 200
    process = local(file, "--processes", 2, "--cpu-devices", 2)
    out, error = process.communicate(timeout=400)
    assert process.returncode == 0, out + error
    assert f"[0] {tmp_path / 'run' / 'model'}" in out.splitlines()
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == list(range(1, 201))
    process = local(file, "--processes", 2, "--cpu-devices", 3)
    out, error = process.communicate(timeout=240)
    assert process.returncode == 2
    assert "asks for" in out
