"""Exports of sized golden models in vLLM's own engine: what it is asked, and how far its answers are from ours."""

import contextlib
import json
import os
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from golden_models import GOLDEN
from sized_models import LENGTH

from swa_jax.base.files import read_json
from swa_jax.checkpoint.servers import SERVERS

WINDOW_SIZE, BATCHED, NEW = 24, 64, 8
_RNG = np.random.default_rng(0)
PROMPTS = [_RNG.integers(3, 130, length).tolist() for length in (400, 150)]
TURN = _RNG.integers(3, 130, 40).tolist()
CLOSE = 1e-4  # in log-probability; of values below -10 that part of 10
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives in the process that asks it, where its tables can be read
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


def goldens() -> dict[str, str]:
    """A golden model of each family that vLLM runs."""
    found: dict[str, str] = {}
    for folder in sorted(GOLDEN.iterdir()):
        if (folder / "config.json").exists() and (folder / "model.safetensors").exists():
            found.setdefault(read_json(folder / "config.json").get("model_type"), folder.name)
    return {family: found[family] for family in sorted(SERVERS["vllm"].classes)}


@contextlib.contextmanager
def asked(log: Path, path: str = ""):
    """A process with vLLM in it, and a function from an export's folder to what `engine.run` returns of `PROMPTS`.

    `path`: where its Python finds more packages.
    """
    command = [os.environ["SERVERS_PYTHON"], str(Path(__file__).with_name("engine.py"))]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": path}
    with log.open("w") as errors, subprocess.Popen(command, stderr=errors, env=environment, **pipes) as process:

        def ask(folder):
            job = {"folder": str(folder), "prompts": PROMPTS, "new_tokens": NEW, "turn": TURN}
            job |= {"length": LENGTH, "batched_tokens": BATCHED}
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
            assert line, log.read_text()[-3000:]
            return json.loads(line)

        yield ask
        process.stdin.close()


def difference_of(model, said) -> tuple[float, float]:
    """The greatest between the log-probabilities of prompts, and the greatest of ours."""
    differences, largest = [], []
    for prompt, theirs in zip(PROMPTS, said["logprobs"], strict=True):
        ours = jax.nn.log_softmax(model(jnp.array([prompt]))[0].astype(jnp.float32))  # [T, V]
        ours = np.asarray(ours)[np.arange(len(prompt) - 1), prompt[1:]]
        differences.append(np.abs(ours - theirs).max())
        largest.append(np.abs(ours).max())
    return max(differences), max(largest)
