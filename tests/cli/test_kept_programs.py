"""What a command compiled, the next start of it finds."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import byte_checkpoint

from swa_jax.cli import kept_programs
from swa_jax.model.pattern import AttentionPattern

ROOT = Path(__file__).parents[2]
COUNT = """
import jax, sys
from swa_jax.cli.__main__ import main
found = {"hits": 0, "misses": 0}
def count(event, **_):
    for name in found:
        found[name] += event.endswith(f"cache_{name}")
jax.monitoring.register_event_listener(count)
try:
    main()
finally:
    print(found["misses"], found["hits"], file=sys.stderr)
"""


def start(home: Path, *words: object) -> tuple[int, int]:
    """How many programs a command compiled, and how many it found."""
    environment = {name: value for name, value in os.environ.items() if "CACHE" not in name}
    environment |= {"SWA_JAX_CACHE": str(home), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", COUNT, *map(str, words)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    misses, hits = done.stderr.split()[-2:]
    return int(misses), int(hits)


@pytest.mark.slow
def test_the_second_start_compiles_nothing(tmp_path, byte_tokenizer):
    model = byte_checkpoint(tmp_path, byte_tokenizer, AttentionPattern.from_recipe("window", 2, sliding_window=6))
    words = ["generate", model, "abc", "--max-new-tokens", 2]
    misses, hits = start(tmp_path / "home", *words)
    assert misses > 5
    assert hits == 0
    assert start(tmp_path / "home", *words) == (0, misses)
    assert start(tmp_path / "home", "--compile-anew", *words)[1] == 0


def test_a_folder_that_the_user_named_stays(monkeypatch, tmp_path):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "mine")
    monkeypatch.setenv("SWA_JAX_CACHE", str(tmp_path))
    kept_programs.keep_programs()
    assert os.environ["JAX_COMPILATION_CACHE_DIR"] == "mine"
    assert not list(tmp_path.iterdir())


def test_a_home_that_cannot_be_written_costs_time_alone(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setenv("SWA_JAX_CACHE", str(tmp_path / "file"))
    kept_programs.keep_programs()
    assert "JAX_COMPILATION_CACHE_DIR" not in os.environ


def test_what_lay_unused_for_longest_goes_first(monkeypatch, tmp_path):
    monkeypatch.setattr(kept_programs, "MOST_BYTES", 100)
    for age in range(5):
        (tmp_path / str(age)).write_bytes(bytes(20))
        os.utime(tmp_path / str(age), (1000 - age, 1))
    kept_programs._make_room(tmp_path)
    assert len(list(tmp_path.iterdir())) == 5  # as many bytes as may be kept
    (tmp_path / "new").write_bytes(b"1")
    kept_programs._make_room(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1", "new"}
