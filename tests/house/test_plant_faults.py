"""`python -m scripts.faults plant` and its list: every fault can be planted today, and what it says of tests is so."""

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.faults import plant, trials
from scripts.faults.__main__ import main
from scripts.faults.trials import Fault

ROOT = Path(__file__).parents[2]
SOUND = "def double(x):\n    return 2 * x\n"
TEST = "from swa_jax.base.number import double\n\n\ndef test_double():\n    assert double(3) == 6\n"


def test_every_fault_can_be_planted():
    faults = plant.read_faults()
    assert len(faults) >= 100
    assert plant.problems(faults) == []
    rooms = {Path(fault.file).parts[:2] for fault in faults}
    for package in ("pallas_kernels", "launch"):
        assert any(room[0] == package for room in rooms)
    rooms_of_library = ("base", "bench", "checkpoint", "cli", "data", "evaluate", "model", "plan", "report")
    for room in (*rooms_of_library, "select", "train"):
        assert ("swa_jax", room) in rooms, f"no fault is in {room}"


def test_a_fault_that_has_lost_its_place_is_named():
    fault = Fault("a", "swa_jax/base/files.py", "no such text", "x", ("tests/test_nothing.py",))
    twice = Fault("b", "swa_jax/chips.py", "Chip(", "Chip(", ())
    wrong = plant.problems([fault, twice, twice])
    assert any("a: swa_jax/base/files.py has 0 places" in line for line in wrong)
    assert "a: there is no tests/test_nothing.py" in wrong
    assert "b: 'new' is the same as 'old'" in wrong
    assert "b: the name is not unique" in wrong
    assert "b: no tests own swa_jax/chips.py: name some in 'tests'" in wrong


@pytest.mark.slow
def test_make_test_runs_the_tests_that_faults_name():
    named = sorted({test for fault in plant.read_faults() for test in fault.tests if "::" in test})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-m", trials.MARKS]
    done = subprocess.run([*command, *named], cwd=ROOT, capture_output=True, text=True)
    runs = done.stdout.splitlines()
    left_out = [test for test in named if not any(line == test or line.startswith(f"{test}[") for line in runs)]
    assert left_out == [], done.stdout[-2000:]


def test_the_room_of_a_file_is_the_folder_of_its_tests():
    def room(file):
        return Fault("a", file, "x", "y").room

    assert room("pallas_kernels/tpu/schedule/pair_schedule.py") == ("tests/kernels",)
    assert room("swa_jax/model/cache.py") == ("tests/model",)
    assert room("swa_jax/checkpoint/families/rope.py") == ("tests/checkpoint/families",)
    assert room("swa_jax/checkpoint/gguf/rope.py") == ("tests/checkpoint",)
    assert room("launch/gke.py") == ("tests/launch",)


@pytest.fixture
def small(tmp_path, monkeypatch):
    """The script at work on a repository of one function and one test."""
    for name, text in {
        "swa_jax/__init__.py": "",
        "pallas_kernels/__init__.py": "",
        "swa_jax/base/number.py": SOUND,
        "tests/base/test_number.py": TEST,
        "pyproject.toml": '[tool.pytest.ini_options]\nmarkers = ["slow", "long"]\n',
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    for module in (plant, trials):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    return tmp_path


def results_of(file):
    return {row["name"]: row for row in plant.Store(file, "results of faults").records.values()}


@pytest.mark.slow
def test_faults_are_caught_missed_and_not_tried_twice(small, capsys, monkeypatch):
    def fault(name, new):
        return Fault(name, "swa_jax/base/number.py", "2 * x", new)

    faults = [fault("wrong", "3 * x"), fault("harmless", "x * 2")]
    monkeypatch.setattr(plant, "read_faults", lambda: faults)
    out = small / "runs" / "faults.jsonl"
    assert main(["plant", "--out", str(out)]) == 1
    results = results_of(out)
    assert results["wrong"]["result"] == "caught"
    assert results["wrong"]["by"] == "tests/base/test_number.py::test_double"
    assert results["harmless"]["result"] == "NOT CAUGHT"
    assert (small / "swa_jax" / "base" / "number.py").read_text() == SOUND, "the working tree is left alone"
    assert main(["plant", "--out", str(out), "--only", "wro*"]) == 0
    assert "1 of 1 results are known" in capsys.readouterr().out
    (small / "tests" / "base" / "test_number.py").write_text(TEST.replace("== 6", "!= 6"))
    plant.sum_of_source.cache_clear()
    assert main(["plant", "--out", str(out), "--only", "harmless"]) == 1, "the tests have changed"
    assert results_of(out)["harmless"]["result"] == "NOT CAUGHT"
    assert "fails without any fault, and is left out: tests/base/test_number.py::test_double" in capsys.readouterr().err
