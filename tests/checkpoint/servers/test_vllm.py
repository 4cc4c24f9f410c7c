"""vLLM's own engine on our exports: what it computes, which layers it gives windows, and what their caches take.

Every family that vLLM runs by our table, with every kind of pattern that the table says it runs, on the CPU: prompts in
chunks, and once more from the cache of prefixes.
"""

import json
import os
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_models import GOLDEN
from sized_models import LENGTH, write_model

from swa_jax import generate, load_model
from swa_jax.base.files import read_json
from swa_jax.checkpoint.folder import open_checkpoint
from swa_jax.checkpoint.hf_export import export_model
from swa_jax.checkpoint.hf_import import import_model
from swa_jax.checkpoint.served_cache import Memory, grouped_entries
from swa_jax.checkpoint.servers import SERVERS, find_served
from swa_jax.model.layer_types import FULL, WINDOW
from swa_jax.model.pattern import AttentionPattern

WINDOW_SIZE, BATCHED, NEW = 24, 64, 8
PATTERNS = {"windows first": "wF", "full first": "Fw", "1 in 4 full": "wwwF", "windows": "w", "full": "F"}
CLOSE = 1e-4
ROUNDED = {"apertus": 3e-2}  # vLLM computes the parameters of xIELU in bfloat16


def pattern_of(kind: str, layers: int) -> AttentionPattern:
    letters = (PATTERNS[kind] * layers)[:layers]
    types = tuple(FULL if letter == "F" else WINDOW for letter in letters)
    return AttentionPattern(types, WINDOW_SIZE if WINDOW in types else None)


def goldens() -> dict[str, str]:
    """A golden model of each family that vLLM runs."""
    found: dict[str, str] = {}
    for folder in sorted(GOLDEN.iterdir()):
        if (folder / "config.json").exists() and (folder / "model.safetensors").exists():
            found.setdefault(read_json(folder / "config.json").get("model_type"), folder.name)
    return {family: found[family] for family in sorted(SERVERS["vllm"].classes)}


def runs(golden: str, kind: str) -> bool:
    hf = read_json(GOLDEN / golden / "config.json")
    return find_served("vllm", hf, pattern_of(kind, hf["num_hidden_layers"])) is not None


CASES = [(family, kind) for family, golden in goldens().items() for kind in PATTERNS if runs(golden, kind)]


@pytest.fixture(scope="session")
def engine(tmp_path_factory):
    """A process with vLLM in it: a function from the arguments of `engine.run` to what that returns."""
    log = tmp_path_factory.mktemp("engine") / "log"
    command = [os.environ["SERVERS_PYTHON"], str(Path(__file__).with_name("engine.py"))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with log.open("w") as errors, subprocess.Popen(command, stderr=errors, env=environment, **pipes) as process:

        def ask(**job):
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
            assert line, log.read_text()[-3000:]
            return json.loads(line)

        yield ask
        process.stdin.close()


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


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_vllm_computes_what_we_do_in_the_memory_that_we_say(family, kind, engine, checkpoints, tmp_path):
    source = open_checkpoint(checkpoints(family))
    layers = source.config.num_hidden_layers
    pattern = pattern_of(kind, layers)
    folder = export_model(source.folder, tmp_path / "hf", pattern=pattern, server="vllm", canary=False)
    model = load_model(source.folder, pattern=pattern)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 130, length).tolist() for length in (400, 150)]
    said = engine(folder=str(folder), prompts=prompts, new_tokens=NEW, length=LENGTH, batched_tokens=BATCHED)
    assert "refused" not in said, said

    for prompt, theirs in zip(prompts, said["logprobs"], strict=True):
        ours = jax.nn.log_softmax(model(jnp.array([prompt]))[0].astype(jnp.float32))  # [T, V]
        ours = np.asarray(ours)[np.arange(len(prompt) - 1), prompt[1:]]
        assert np.abs(ours - theirs).max() <= ROUNDED.get(family, CLOSE)
    assert said["second"] == said["tokens"]
    assert said["tokens"] == generate(model, prompts, max_new_tokens=NEW)
    assert min(said["reused"]) > 0

    windows = {layer: group["window"] for group in said["groups"] for layer in group["layers"]}
    assert windows == {n: WINDOW_SIZE if kind == WINDOW else None for n, kind in enumerate(pattern.layer_types)}
    memory = Memory(source.config, source.hf_config, LENGTH, "vllm", BATCHED, "cpu")
    assert memory.blocks.tokens == said["block_tokens"]
    size = max(len(group["layers"]) for group in said["groups"])
    counts = (layers - pattern.layer_types.count(WINDOW), pattern.layer_types.count(WINDOW))
    for number, batches in enumerate((1, 2)):
        blocks = memory.blocks._replace(in_flight=batches * BATCHED)
        entries, _ = grouped_entries(*counts, WINDOW_SIZE, LENGTH, blocks)
        assert entries == size * blocks.tokens * sum(group["granted"][number] for group in said["groups"])
    for held in said["held"]:
        assert all(most <= group["granted"][0] for most, group in zip(held, said["groups"], strict=True))
