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
from swa_jax.base.files import read_json, write_json
from swa_jax.checkpoint.folder import open_checkpoint
from swa_jax.checkpoint.hf_export import export_model
from swa_jax.checkpoint.hf_import import import_model
from swa_jax.checkpoint.served_cache import Memory, grouped_entries
from swa_jax.checkpoint.servers import SERVERS, find_served
from swa_jax.model.layer_types import FULL, WINDOW
from swa_jax.model.pattern import AttentionPattern

WINDOW_SIZE, BATCHED, NEW = 24, 64, 8
PATTERNS = {"windows first": "wF", "full first": "Fw", "1 in 4 full": "wwwF", "windows": "w", "full": "F"}
_RNG = np.random.default_rng(0)
PROMPTS = [_RNG.integers(3, 130, length).tolist() for length in (400, 150)]
CLOSE = 1e-4  # in log-probability; of values below -10 that part of 10
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives in the process that asks it, where its tables can be read
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": "",
}
ROUNDED = {"apertus": 3e-2}  # vLLM computes the parameters of xIELU in bfloat16
WRONG = {  # in vLLM 0.32.0 itself
    "gpt_oss": "on a CPU it gives NaN, with full attention too",
    "mellum-full": "it adds num_nextn_predict_layers = None to a number; 0.33.0 does not",
}


def types_of(letters: str, layers: int) -> tuple[str, ...]:
    return tuple(FULL if letter == "F" else WINDOW for letter in (letters * layers)[:layers])


def pattern_of(kind: str, layers: int) -> AttentionPattern:
    types = types_of(PATTERNS[kind], layers)
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


def cases():
    for family, golden in goldens().items():
        for kind in filter(lambda kind: runs(golden, kind), PATTERNS):
            wrong = WRONG.get(family) or WRONG.get(f"{family}-{kind}")
            yield pytest.param(
                family, kind, marks=[pytest.mark.xfail(reason=wrong)] if wrong else [], id=f"{family}-{kind}"
            )


@pytest.fixture(scope="session")
def engine(tmp_path_factory):
    """A process with vLLM in it: a function from an export's folder to what `engine.run` returns of `PROMPTS`."""
    log = tmp_path_factory.mktemp("engine") / "log"
    command = [os.environ["SERVERS_PYTHON"], str(Path(__file__).with_name("engine.py"))]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with (
        log.open("w") as errors,
        subprocess.Popen(command, stderr=errors, env=os.environ | ENVIRONMENT, **pipes) as process,
    ):

        def ask(folder):
            job = {"folder": str(folder), "prompts": PROMPTS, "new_tokens": NEW}
            job |= {"length": LENGTH, "batched_tokens": BATCHED}
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


def difference_of(model, said) -> tuple[float, float]:
    """The greatest between the log-probabilities of prompts, and the greatest of ours."""
    differences, largest = [], []
    for prompt, theirs in zip(PROMPTS, said["logprobs"], strict=True):
        ours = jax.nn.log_softmax(model(jnp.array([prompt]))[0].astype(jnp.float32))  # [T, V]
        ours = np.asarray(ours)[np.arange(len(prompt) - 1), prompt[1:]]
        differences.append(np.abs(ours - theirs).max())
        largest.append(np.abs(ours).max())
    return max(differences), max(largest)


@pytest.mark.parametrize(
    "change",
    [
        {"sliding_window": WINDOW_SIZE + 1},
        {"sliding_window": WINDOW_SIZE - 1},
        {"layer_types": "w"},
        {"layer_types": "F"},
        {"layer_types": "Fw"},
    ],
    ids=str,
)
def test_another_window_or_layer_is_noticed(change, engine, checkpoints, tmp_path):
    source = open_checkpoint(checkpoints("llama"))
    pattern = pattern_of("windows first", source.config.num_hidden_layers)
    folder = export_model(source.folder, tmp_path / "hf", pattern=pattern, server="vllm", canary=False)
    assert change.keys() <= read_json(folder / "config.json").keys()
    if letters := change.get("layer_types"):
        change = {"layer_types": types_of(letters, source.config.num_hidden_layers)}
    write_json(folder / "config.json", read_json(folder / "config.json") | change)
    assert difference_of(load_model(source.folder, pattern=pattern), engine(folder))[0] > 10 * CLOSE


@pytest.mark.parametrize(("family", "kind"), list(cases()))
def test_vllm_computes_what_we_do_in_the_memory_that_we_say(family, kind, engine, checkpoints, tmp_path):
    source = open_checkpoint(checkpoints(family))
    layers = source.config.num_hidden_layers
    pattern = pattern_of(kind, layers)
    folder = export_model(source.folder, tmp_path / "hf", pattern=pattern, server="vllm", canary=False)
    model = load_model(source.folder, pattern=pattern)
    said = engine(folder)
    assert "refused" not in said, said

    difference, largest = difference_of(model, said)
    assert difference <= ROUNDED.get(family, CLOSE * max(1, largest / 10))
    assert said["second"] == said["tokens"]
    assert said["tokens"] == generate(model, PROMPTS, max_new_tokens=NEW)
    assert min(said["reused"]) > 0

    windows = {layer: group["window"] for group in said["groups"] for layer in group["layers"]}
    # A class whose layers all have windows is told one of the whole context.
    windows = {layer: window if window and window < LENGTH else None for layer, window in windows.items()}
    assert windows == {n: WINDOW_SIZE if kind == WINDOW else None for n, kind in enumerate(pattern.layer_types)}
    memory = Memory(source.config, source.hf_config, LENGTH, "vllm", BATCHED, "cpu")
    assert memory.blocks.tokens == said["block_tokens"]
    size = max(len(group["layers"]) for group in said["groups"])
    windowed = sum(group["window"] is not None for group in said["groups"] for _ in group["layers"])
    for number, batches in enumerate((1, 2)):
        blocks = memory.blocks._replace(in_flight=batches * BATCHED)
        entries, _ = grouped_entries(
            layers - windowed, windowed, max(filter(None, windows.values()), default=LENGTH), LENGTH, blocks
        )
        assert entries == size * blocks.tokens * sum(group["granted"][number] for group in said["groups"])
    for held in said["held"]:
        assert all(most <= group["granted"][0] for most, group in zip(held, said["groups"], strict=True))
