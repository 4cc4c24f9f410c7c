"""`python -m scripts.faults draw`: which slips there are, that they are found again, and the tests that they need."""

import ast
import json

from scripts.faults import draw, trials
from scripts.faults.__main__ import main
from scripts.faults.slips import slips

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


def test_every_slip_is_code():
    for file in draw.packages_files()[::16]:
        text = (draw.ROOT / file).read_text()
        for slip in slips(text)[::25]:
            assert text[slip.start : slip.start + len(slip.old)] == slip.old != slip.new
            ast.parse(text[: slip.start] + slip.new + text[slip.start + len(slip.old) :])


def test_a_list_belongs_to_its_seed_and_is_found_again_when_code_moves(monkeypatch, tmp_path):
    drawn = draw.draw(7, 12)
    assert [fault.name for fault in drawn] == [fault.name for fault in draw.draw(7, 12)]
    assert len({fault.file for fault in drawn}) == 12
    assert {fault.name for fault in drawn} != {fault.name for fault in draw.draw(8, 12)}
    fault = drawn[0]
    text = (draw.ROOT / fault.file).read_text()
    monkeypatch.setattr(draw, "ROOT", tmp_path)
    assert draw.found_again(draw.row_of(fault)) is None
    (tmp_path / fault.file).parent.mkdir(parents=True)
    (tmp_path / fault.file).write_text("# moved\n" + text)
    again = draw.found_again(json.loads(json.dumps(draw.row_of(fault))))
    assert (again.line, again.old, again.new) == (fault.line + 1, fault.old, fault.new)
    assert again.applied("# moved\n" + text) == "# moved\n" + fault.applied(text)


def test_the_tests_of_a_fault_are_those_of_its_room_and_those_that_name_its_module(monkeypatch, tmp_path):
    for name, text in {
        "swa_jax/base/number.py": "def double(x):\n    return 2 * x\n\n\ndef half(x):\n    return x / 2\n",
        "tests/base/test_number.py": "",
        "tests/base/test_others.py": "",
        "tests/test_other.py": "from swa_jax.base.number import double\n",
        "tests/test_third.py": "",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(draw, "ROOT", tmp_path)
    monkeypatch.setattr(trials, "ROOT", tmp_path)
    (slip,) = (s for s in slips((tmp_path / "swa_jax/base/number.py").read_text()) if s.new == "+")
    fault = draw.at("swa_jax/base/number.py", (tmp_path / "swa_jax/base/number.py").read_text(), slip)
    nearest = ["tests/base/test_number.py", "tests/test_other.py"]
    assert fault.stages == [nearest, ["tests/base/test_others.py"]]


def test_the_list_is_counted(capsys):
    assert main(["draw", "--list"]) == 0
    assert "185 caught, 2 NOT CAUGHT, 13 equivalent, 99% of what can be seen; 0 not tried" in capsys.readouterr().out
