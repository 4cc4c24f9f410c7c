"""The example's settings, and the commands that a dry run prints."""

import shlex
from pathlib import Path

from launch import gke
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


def pod_of(*changes: str) -> dict:
    """The template of the pods in the manifest for GKE."""
    return gke.manifest(settings(*changes))["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]


def flag(command: list[str], name: str) -> str:
    return next(word.partition("=")[2] for word in command if word.startswith(f"--{name}="))
