"""`--help` of every verb on a terminal of 80 columns: whole words, options in groups."""

import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from swa_jax.cli.main import app

UNGROUPED = 8  # options that need no panels
MOST_LINES = 80


def commands(command, path=()):
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        if not inner.hidden:
            yield from commands(inner, (*path, name))


COMMANDS = dict(commands(typer.main.get_command(app)))


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: " ".join(path) or "swa-jax")
def test_help_at_80_columns(path):
    options = [one for one in COMMANDS[path].params if one.param_type_name == "option" and not one.hidden]
    output = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": "80"}).output
    assert "…" not in output
    assert len(output.splitlines()) <= MOST_LINES
    words = set(output.replace("│", " ").split())
    for option in options:
        assert {*option.opts, *option.secondary_opts, *(option.help or "").split()} <= words
        assert option.help, f"{option.name} has no help"
        assert not option.help.startswith("Of "), option.help
        assert option.help.rstrip(")").endswith("."), option.help
    panels = {option.rich_help_panel for option in options}
    if len(options) > UNGROUPED:
        assert len(panels) > 1
        assert None not in panels, [option.name for option in options if option.rich_help_panel is None]


def test_every_command_with_a_table_has_json():
    """The others print a text, what they wrote, or a pattern that is a file of JSON already."""
    without = {
        " ".join(path)
        for path, command in COMMANDS.items()
        if path[:1] != ("select",) and not hasattr(command, "commands")
        if all("--json" not in one.opts for one in command.params)
    }
    assert without == {"import", "export", "demo", "train", "generate", "distill", "chat", "data tokenize"}


def test_completion_is_offered():
    assert "--install-completion" in CliRunner().invoke(app, ["--help"], env={"COLUMNS": "80"}).output


def test_a_method_that_goes_by_another_ones_measure_reads_as_a_sentence():
    said = CliRunner().invoke(app, ["select", "--help"], env={"COLUMNS": "200"}).output
    assert "Choose KV heads by this: as `fisher`, of all tokens" in said
    assert " at most (layers + 3) / 2 passes for each layer chosen." in said


@pytest.mark.parametrize(("command", "keeps"), [("generate m x", False), ("generate m x --out=r", True)])
def test_an_interruption_says_that_a_command_goes_on_only_where_it_does(monkeypatch, command, keeps):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("swa_jax.cli.generate.find_model", interrupted)
    monkeypatch.setattr("swa_jax.cli.generate.check_output", lambda *_: None)
    ended = CliRunner().invoke(app, command.split())
    assert (ended.exit_code, ended.output.strip()) == (
        130,
        "interrupted: it goes on when the same command is started again" if keeps else "interrupted",
    )


def test_help_on_a_full_disk_is_one_sentence():
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "swa_jax.cli", "--help"]
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
    assert ended.returncode == 2
    assert ended.stderr.startswith("the disk is full (No space left on device): make room")
    assert "Traceback" not in ended.stderr
