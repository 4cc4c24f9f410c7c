"""vLLM's engine, with our plug-in and without it, that all tests of a worker share, and what it is asked about."""

import contextlib
import itertools
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from engine_process import ENVIRONMENT, PLUGIN, engine_process
from line_process import line_process
from sized_models import LENGTH, goldens, write_model

from swa_jax.checkpoint.hf_import import import_model

pytest.register_assert_rewrite("engine_answers")


@pytest.fixture(scope="session")
def engine(tmp_path_factory):
    """vLLM as it is."""
    with engine_process(tmp_path_factory.mktemp("engine") / "log") as ask:
        yield ask


@pytest.fixture(scope="session")
def plugin(tmp_path_factory):
    """A folder in which our plug-in is installed."""
    folder = tmp_path_factory.mktemp("plugin")
    source = shutil.copytree(PLUGIN, folder / "source")  # whose build leaves files
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*install, "--target", folder / "installed", source], check=True)
    return folder / "installed"


@pytest.fixture(scope="session")
def plugin_engine(plugin):
    """vLLM with our plug-in."""
    with engine_process(plugin.with_name("log"), plugin) as ask:
        yield ask


@pytest.fixture(scope="session")
def serve(tmp_path_factory):
    """A context manager: the URL of `vllm serve FOLDER` with options, while it runs. `packages`: a folder with more."""
    logs, numbers = tmp_path_factory.mktemp("servers"), itertools.count()
    sizes = ["--max-model-len", str(LENGTH), "--max-num-batched-tokens", "64"]
    with line_process("vllm_servers.py", logs / "log", **ENVIRONMENT) as ask:

        @contextlib.contextmanager
        def serving(folder, *options, packages=""):
            how = [*sizes, "--dtype", "float32", "--enforce-eager", *options]
            how += [] if (folder / "tokenizer.json").exists() else ["--skip-tokenizer-init"]
            log = str(logs / str(next(numbers)))
            server = ask(arguments=[str(folder), *how], packages=str(packages), log=log)
            assert "refused" not in server, server
            try:
                yield server["url"]
            finally:
                ask(stop=server["process"])

        yield serving


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """A checkpoint folder of each family, made when it is asked for."""
    made: dict[str, Path] = {}

    def of(family):
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            made[family] = import_model(write_model(goldens()[family], folder / "hf"), folder / "ours")
        return made[family]

    return of
