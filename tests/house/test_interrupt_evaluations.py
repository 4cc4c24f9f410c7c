"""scripts/interrupt_evaluations.py: its commands are ones that the program has."""

import sys

import pytest
from typer.testing import CliRunner

from swa_jax.cli.main import app

SCRIPT = "interrupt_evaluations"
NAMES = (
    *("evaluate chains", "evaluate text", "select nll", "select bosch", "compare"),
    *("compare_plants", "chains_card"),
)


def test_all_commands_are_known(script):
    assert tuple(script.COMMANDS) == NAMES


@pytest.mark.parametrize("name", NAMES[:5])
def test_a_command_lacks_only_the_model(script, name, tmp_path):
    words = [str(word).replace("OUT", str(tmp_path / "out")) for word in script.COMMANDS[name].words]
    assert words[: len(script.CLI)] == [sys.executable, "-m", "swa_jax.cli"]
    model = tmp_path / "no-such-model"
    result = CliRunner().invoke(app, [word.replace("MODEL", str(model)) for word in words[len(script.CLI) :]])
    assert result.exit_code == 2
    assert "no-such-model" in result.stderr, result.stderr
