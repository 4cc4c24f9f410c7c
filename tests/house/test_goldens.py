"""scripts/goldens: what cases.yaml declares is what the golden models were made of, and what the command asks for."""

import json
import sys

import pytest

from scripts.goldens import __main__ as command
from scripts.goldens.cases import GOLDEN, NAMES, golden_folders, rope_settings, seed_of, settings_of, some


@pytest.mark.parametrize("name", NAMES)
def test_a_golden_model_has_the_settings_of_its_case(name):
    declared, written = settings_of(name), json.loads((GOLDEN / name / "config.json").read_text())
    same = declared.keys() & written.keys() - {"rope_parameters"}  # transformers adds to these
    assert len(same) >= 9
    assert {key: declared[key] for key in same} == {key: written[key] for key in same}


def test_every_golden_model_is_declared():
    assert golden_folders() == sorted(NAMES)
    assert len({seed_of(name) for name in NAMES}) == len(NAMES)
    assert (seed_of("llama3-rope"), seed_of("qwen3-moe-full")) == (0, 100)


def test_rope_settings_are_those_of_the_file():
    written = json.loads((GOLDEN / "rope.json").read_text())
    assert {name: one["rope_parameters"] for name, one in written.items()} == rope_settings()


def test_only_names_what_there_is():
    assert some([], ["a", "b"]) == ["a", "b"]
    assert some(["b"], ["a", "b"]) == ["b"]
    with pytest.raises(SystemExit, match="--only: there is no 'c'; there are: a, b"):
        some(["b", "c"], ["a", "b"])


@pytest.mark.parametrize(("kind", "needed"), [("exports", "--oracle"), ("peft", "--oracle"), ("served", "--wheel")])
def test_what_a_kind_needs_is_asked_for(kind, needed, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["goldens", kind])
    with pytest.raises(SystemExit):
        command.main()
    assert f"{kind} needs {needed}" in capsys.readouterr().err
