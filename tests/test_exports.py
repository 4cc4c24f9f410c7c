"""Names are found where they are, where they were, and nowhere else; nothing heavy is loaded before it is asked for."""

import importlib
import subprocess
import sys

import pytest

import swa_jax
from swa_jax.exports import MOVED

ROOMS = ("checkpoint", "data", "evaluate", "model", "report", "select", "train")


@pytest.mark.parametrize("old", MOVED)
def test_earlier_paths_have_the_names_of_the_new_ones(old):
    module = importlib.import_module(f"swa_jax.{old}")
    for home in (importlib.import_module(f"swa_jax.{home}") for home in reversed(MOVED[old])):
        own = getattr(home, "__all__", None) or [
            name
            for name, value in vars(home).items()
            if name.isupper() or getattr(value, "__module__", None) == home.__name__
        ]
        assert own
        for name in own:
            assert getattr(module, name) is getattr(home, name)


@pytest.mark.parametrize("package", ["swa_jax", *(f"swa_jax.{room}" for room in ROOMS)])
def test_a_package_has_the_names_that_it_lists(package):
    module = importlib.import_module(package)
    for name in module.__all__:
        assert getattr(module, name) is not None


def test_what_users_wrote_before_the_rooms_still_works():
    from swa_jax.checkpoint import load_model
    from swa_jax.compare import compare_table, summary
    from swa_jax.config import ConfigError, ModelConfig, from_dict
    from swa_jax.evaluate.needle import Haystack, library_files, read_text
    from swa_jax.huggingface import export_model, import_model
    from swa_jax.model import Decoder
    from swa_jax.pattern import FULL, AttentionPattern, load_pattern
    from swa_jax.select import bosch
    from swa_jax.train import TrainConfig, train

    assert all(map(callable, (load_model, compare_table, summary, from_dict, library_files, read_text, bosch, train)))
    assert all(map(callable, (export_model, import_model, load_pattern, ConfigError, Haystack, Decoder, TrainConfig)))
    assert FULL == "full_attention"
    assert (swa_jax.ModelConfig, swa_jax.AttentionPattern) == (ModelConfig, AttentionPattern)
    assert swa_jax.load_model is load_model


def test_a_name_that_is_nowhere():
    with pytest.raises(AttributeError, match="'swa_jax' has no attribute 'nothing'"):
        getattr(swa_jax, "nothing")  # noqa: B009
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        from swa_jax.config import nothing  # noqa: F401
    with pytest.raises(ModuleNotFoundError, match=r"swa_jax\.nothing"):
        importlib.import_module("swa_jax.nothing")


def test_the_command_line_loads_nothing_heavy():
    heavy = {"jax", "flax", "matplotlib", "orbax", "grain", "tokenizers"}
    code = f"import sys, swa_jax.cli; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
