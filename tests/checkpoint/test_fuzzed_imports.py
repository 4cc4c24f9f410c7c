"""A sample of `python -m scripts.torture fuzz`, and proof that it sees what it looks for."""

import json

import pytest
from python_process import python

from scripts.torture.fuzz import fuzz


def test_damaged_models_are_refused_in_one_sentence_or_are_models():
    counts, bad = fuzz(100, seed=7, logits=False)
    assert bad == []
    assert sum(counts.values()) == 100
    assert sum(number for kind, number in counts.items() if kind.endswith("refused")) > 50
    assert sum(number for kind, number in counts.items() if kind.endswith("accepted")) > 10


def leaks(*_, **__):
    """Companions that are read wherever they lead."""
    return lambda folder, name: file if (file := folder / name).exists() else None


PLANTED = {
    "no sums of headers": ("swa_jax.checkpoint.safetensors_files._are_counts", lambda: lambda value: True),
    "no check of values": ("swa_jax.checkpoint.finite._are_finite", lambda: lambda array: True),
    "links followed": ("swa_jax.checkpoint.folder.companion", leaks),
    "no bounds": ("swa_jax.model.config._check_bounds", lambda: lambda *_: None),
}


@pytest.mark.parametrize(
    "fault", [pytest.param(x, marks=pytest.mark.slow if x == "no bounds" else pytest.mark.long) for x in PLANTED]
)
def test_a_fault_is_seen(monkeypatch, fault):
    name, make = PLANTED[fault]
    monkeypatch.setattr(name, make())
    _, bad = fuzz(400, seed=7, logits=False, stop=True)
    assert bad


@pytest.mark.long
def test_an_interrupted_command_goes_on(tmp_path):
    """`python -m scripts.torture import` with a small model and few signals."""
    options = ("--count", 3, "--megabytes", 80, "--json", tmp_path / "figures.json", "--folder", tmp_path)
    python("-m", "scripts.torture", "import", *options)
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert sum(n for name, n in figures.items() if name.startswith("SIG")) == 3
    assert figures["finished, all equal"] >= 1
