"""The command line inside the test process: what a verb prints and writes, and the one line of a user's mistake."""

import functools
import json
from pathlib import Path

import typer.testing
from typer.testing import CliRunner

from swa_jax.cli.main import app
from swa_jax.model.engine import Engine

# Typer would build the tree of all commands at each call.
typer.testing._get_command = functools.cache(typer.main.get_command)


def run(*arguments: object, status: int = 0, input: str | bytes | None = None) -> str:
    """What a verb printed, errors included."""
    result = CliRunner().invoke(app, [str(a) for a in arguments], input=input, env={"COLUMNS": "200"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == status, result.output
    return result.output


def fails(*arguments: object) -> str:
    output = run(*arguments, status=2)
    assert "Traceback" not in output
    assert len(output.splitlines()) == 1, output
    return output.strip()


def json_lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def interrupt(monkeypatch, after: int) -> None:
    """Ctrl-C when so many replies are complete."""
    stream, ended = Engine.stream, []

    def broken(*arguments, **options):
        for piece in stream(*arguments, **options):
            yield piece
            ended.extend([1] * piece.ended)
            if len(ended) == after:
                raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "stream", broken)
