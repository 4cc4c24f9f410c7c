"""The example's settings, and the commands that a dry run prints."""

import shlex
from pathlib import Path

from launch.settings import Settings, main
from swa_jax.base.settings import load_config

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "launch" / "example.yaml"
HOSTILE = 'output=/shared/it\'s $HOME; `no` "shell"'


def settings(*changes: str) -> Settings:
    return load_config(Settings, EXAMPLE, changes)


def dry(capsys, verbs, verb: str, *changes: str) -> list[list[str]]:
    """The commands that a dry run prints, as the shell would split them; comments are left out."""
    assert main(verbs, "", [verb, str(EXAMPLE), *changes, "--dry-run"]) == 0
    return [shlex.split(line) for line in capsys.readouterr().out.splitlines() if not line.startswith("# ")]


def flag(command: list[str], name: str) -> str:
    return next(word.partition("=")[2] for word in command if word.startswith(f"--{name}="))
