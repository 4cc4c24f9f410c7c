"""scripts/interrupt_evaluations.py: its commands are ones that the program has."""

from typer.testing import CliRunner

from swa_jax.cli.main import app

SCRIPT = "interrupt_evaluations"


def test_commands_lack_only_the_model(script, tmp_path):
    model, begin = tmp_path / "no-such-model", len(script.CLI)
    own = {name: words for name, (words, _) in script.COMMANDS.items() if words[:begin] == script.CLI}
    assert {"evaluate chains", "evaluate text", "select nll", "select bosch", "compare"} <= {*own}
    for name, words in own.items():
        given = [str(word).replace("MODEL", str(model)).replace("OUT", str(tmp_path)) for word in words[begin:]]
        result = CliRunner().invoke(app, given)
        assert result.exit_code == 2, name
        assert "no-such-model" in result.stderr, f"{name}: {result.stderr}"
