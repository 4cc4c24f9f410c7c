"""vLLM's engine, in a process of its own that all tests of a worker share, and what it is asked about."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from sized_models import goldens, write_model

from swa_jax.checkpoint.hf_import import import_model

PLUGIN = Path(__file__).parents[3] / "plugins" / "vllm"

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives in the process that asks it, where its tables can be read
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


@contextlib.contextmanager
def _engine(log, packages=""):
    """A function from the arguments of `run` in `engine.py` to what that returns. `packages`: a folder with more."""
    command = [os.environ["SERVERS_PYTHON"], str(Path(__file__).with_name("engine.py"))]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": str(packages)}
    with log.open("w") as errors, subprocess.Popen(command, stderr=errors, env=environment, **pipes) as process:

        def ask(folder, prompts, length, batched_tokens, new_tokens=8, turn=()):
            job = {"folder": str(folder), "prompts": prompts, "new_tokens": new_tokens}
            job |= {"length": length, "batched_tokens": batched_tokens, "turn": turn}
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
            assert line, log.read_text()[-3000:]
            return json.loads(line)

        yield ask
        process.stdin.close()


@pytest.fixture(scope="session")
def engine(tmp_path_factory):
    """vLLM as it is."""
    with _engine(tmp_path_factory.mktemp("engine") / "log") as ask:
        yield ask


@pytest.fixture(scope="session")
def plugin_engine(tmp_path_factory):
    """vLLM with our plug-in, as that is installed."""
    folder = tmp_path_factory.mktemp("plugin")
    source = shutil.copytree(PLUGIN, folder / "source")  # whose build leaves files
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*install, "--target", folder / "installed", source], check=True)
    with _engine(folder / "log", folder / "installed") as ask:
        yield ask


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
