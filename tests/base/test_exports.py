"""Names are found where they are and nowhere else; nothing heavy is loaded before it is asked for."""

import importlib
import os
import subprocess
import sys

import pytest
from command_line import run
from python_process import python

import swa_jax

ROOMS = ("checkpoint", "evaluate", "model", "select", "train")


@pytest.mark.parametrize("package", ["swa_jax", *(f"swa_jax.{room}" for room in ROOMS)])
def test_a_package_has_the_names_that_it_lists(package):
    module = importlib.import_module(package)
    for name in module.__all__:
        assert getattr(module, name) is not None
    assert {*module.__all__, "__doc__"} <= {*dir(module)}


def test_dir_shows_what_is_public():
    public = {name for name in dir(swa_jax) if not name.startswith("__")}
    assert public == {*swa_jax.__all__, *ROOMS}
    assert f"swa-jax {swa_jax.__version__}" == run("--version").strip()


def test_a_name_that_is_nowhere():
    with pytest.raises(AttributeError, match="'swa_jax' has no attribute 'nothing'"):
        getattr(swa_jax, "nothing")  # noqa: B009
    with pytest.raises(ModuleNotFoundError, match=r"swa_jax\.nothing"):
        importlib.import_module("swa_jax.nothing")


def test_the_command_line_loads_nothing_heavy():
    heavy = {"jax", "flax", "matplotlib", "orbax", "grain", "tokenizers"}
    code = f"import sys, swa_jax.cli.main; print(sorted({heavy} & set(sys.modules)))"
    assert python("-c", code) == "[]\n"


def test_with_libtpu_and_no_tpu_nothing_is_looked_for():
    """Where libtpu is installed to compile only, JAX would fill the terminal with errors, also where it came first."""
    code = "import jax, swa_jax; print(jax.default_backend())"
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert (done.stdout, done.stderr) == ("cpu\n", "")
