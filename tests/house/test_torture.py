"""scripts/torture: its commands are ones that the program has, and the harness sees what is lost."""

import random
import sys

import pytest
from typer.testing import CliRunner

from scripts.torture import interrupt, jobs
from swa_jax.cli.main import app

COUNT = """
import pathlib, sys, time
file = pathlib.Path(sys.argv[1], "numbers")
file.parent.mkdir(exist_ok=True)
done = int(file.read_text()) if file.exists() else 0
for number in range(done + 1, 31):
    time.sleep(0.01)
    (file.parent / "partial").write_text(str(number))
    (file.parent / "partial").rename(file)
"""


def test_commands_lack_only_the_model(tmp_path):
    model = tmp_path / "no-such-model"
    own = [name for name, (line, _) in jobs.COMMANDS.items() if line.startswith("swa-jax")]
    assert {"evaluate chains", "evaluate text", "select nll", "select bosch", "compare"} <= {*own}
    for name in own:
        words = jobs.command(name, model).words[len(jobs.CLI) :]
        result = CliRunner().invoke(app, [str(word).replace("OUT", str(tmp_path)) for word in words])
        assert result.exit_code == 2, name
        assert "no-such-model" in result.stderr, f"{name}: {result.stderr}"


@pytest.mark.slow
def test_an_interrupted_program_is_compared_with_itself(tmp_path):
    job = interrupt.Job((sys.executable, "-c", COUNT, "OUT"), lambda out: {"numbers": (out / "numbers").read_text()})
    counts = interrupt.interrupt("count", job, 3, tmp_path, random.Random(0))
    assert sum(n for name, n in counts.items() if name.startswith("SIG")) == 3
    assert counts["finished, all equal"] >= 1


@pytest.mark.slow
def test_what_is_lost_is_said(tmp_path):
    begins_anew = COUNT.replace("if file.exists() else 0", "if file.exists() else 0; print(done, file=sys.stderr)")
    begins_anew += '\n(file.parent / "first").write_text(str(done))\n'
    job = interrupt.Job((sys.executable, "-c", begins_anew, "OUT"), lambda out: {"first": (out / "first").read_text()})
    with pytest.raises(AssertionError, match=r"count, interrupted, gives others: \['first'\]"):
        interrupt.interrupt("count", job, 3, tmp_path, random.Random(0))
