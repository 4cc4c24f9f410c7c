"""`python -m scripts.faults draw`: which slips there are, that they are found again, and the tests that they need."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.faults import trials
from scripts.faults.slips import slips

SCRIPT = "faults.draw"
CODE = '''"""Says 1 < 2."""
def f(a, b=3, *, name="x"):
    if not a and b:
        raise ValueError("a < 1", a + 1)
    return g(a, b, c=b < 1, name=name)
'''
SLIPS = ["if a and b:", "if not a or b:", "if (b):", "if (not a):", "if True:", "if False:", "def f(a, b=4"]
SLIPS += ["def f(a, b=2", "g(b, a, c", "g(a, 3, c", "g(a, b, name", "c=b <= 1", "c=b < 2", "c=b < 0"]


def test_one_slip_at_a_time_and_none_in_what_is_only_said():
    changed = [CODE[: s.start] + s.new + CODE[s.start + len(s.old) :] for s in slips(CODE)]
    assert len(changed) == len(SLIPS)
    for text in SLIPS:
        assert sum(text in code for code in changed) == 1, text
    assert all(CODE.splitlines()[s.line - 1].find(s.old.splitlines()[0]) >= 0 for s in slips(CODE) if s.old)


def test_every_slip_is_code(script):
    for file in script.packages_files()[::16]:
        text = (script.ROOT / file).read_text()
        for slip in slips(text)[::25]:
            assert text[slip.start : slip.start + len(slip.old)] == slip.old != slip.new
            ast.parse(text[: slip.start] + slip.new + text[slip.start + len(slip.old) :])


def test_a_list_belongs_to_its_seed_and_is_found_again_when_code_moves(script, monkeypatch, tmp_path):
    drawn = script.draw(7, 12)
    assert [fault.name for fault in drawn] == [fault.name for fault in script.draw(7, 12)]
    assert len({fault.file for fault in drawn}) == 12
    assert {fault.name for fault in drawn} != {fault.name for fault in script.draw(8, 12)}
    fault = drawn[0]
    text = (script.ROOT / fault.file).read_text()
    monkeypatch.setattr(script, "ROOT", tmp_path)
    assert script.found_again(script.row_of(fault)) is None
    (tmp_path / fault.file).parent.mkdir(parents=True)
    (tmp_path / fault.file).write_text("# moved\n" + text)
    again = script.found_again(json.loads(json.dumps(script.row_of(fault))))
    assert (again.line, again.old, again.new) == (fault.line + 1, fault.old, fault.new)
    assert again.applied("# moved\n" + text) == "# moved\n" + fault.applied(text)


def test_the_tests_of_a_fault_run_its_line_or_name_its_module(script, monkeypatch, tmp_path):
    for name, text in {
        "swa_jax/number.py": "def double(x):\n    return 2 * x\n\n\ndef half(x):\n    return x / 2\n",
        "tests/number/test_number.py": "",
        "tests/test_other.py": "from swa_jax.number import double\n",
        "tests/test_third.py": "",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        os.utime(tmp_path / name, (0, 0))
    monkeypatch.setattr(script, "ROOT", tmp_path)
    monkeypatch.setattr(trials, "ROOT", tmp_path)
    monkeypatch.setattr(script, "TRACES", tmp_path / "traces")
    (slip,) = (s for s in slips((tmp_path / "swa_jax/number.py").read_text()) if s.new == "+")
    fault = script.at("swa_jax/number.py", (tmp_path / "swa_jax/number.py").read_text(), slip)
    assert fault.stages == [["tests/number/test_number.py", "tests/test_other.py"]]
    trace = script.trace_of(Path(tmp_path / "tests/number/test_number.py"))
    trace.parent.mkdir(parents=True)
    lines = {"slow": (25.0, 1 << 2), "fast": (1.0, 1 << 2), "other": (0.1, 1 << 6)}
    trace.write_text(
        "\n".join(
            json.dumps({"test": name, "seconds": seconds, "lines": {"swa_jax/number.py": f"{ran:x}"}})
            for name, (seconds, ran) in lines.items()
        )
    )
    script.traced.cache_clear()
    assert fault.stages == [["fast"], ["slow", "tests/test_other.py"]]
    script.traced.cache_clear()


@pytest.mark.slow
def test_a_trace_has_the_lines_that_a_test_ran_in_its_process_and_in_others(script, tmp_path):
    test = tmp_path / "test_traced.py"
    test.write_text(
        "import subprocess, sys\nimport swa_jax.files\n\n\ndef test_here():\n    swa_jax.files.sum_of('a')\n\n\n"
        "def test_elsewhere():\n    code = 'import swa_jax.files as f; f.sum_of(str(1))'\n"
        "    subprocess.run([sys.executable, '-c', code], check=True)\n"
    )
    paths = {"PYTHONPATH": str(script.ROOT), "TRACE_TO": str(tmp_path / "out")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "scripts.faults.trace", "-c", os.devnull, str(test)]
    subprocess.run(command, cwd=script.ROOT, env=os.environ | paths, check=True, capture_output=True)
    rows = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert [row["test"].partition("::")[2] for row in rows] == ["test_here", "test_elsewhere"]
    source = (script.ROOT / "swa_jax/files.py").read_text().splitlines()
    inside = next(i for i, line in enumerate(source, 1) if line.startswith("def sum_of(")) + 1
    lines = [int(row["lines"]["swa_jax/files.py"], 16) for row in rows]
    assert all(ran >> inside & 1 for ran in lines)
