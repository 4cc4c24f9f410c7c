"""vLLM's own engine on our exports: what it computes, which layers it gives windows, and what their caches take.

Every family that vLLM runs by our table, with every kind of pattern that the table says it runs, on the CPU: prompts in
chunks, and once more from the cache of prefixes.
"""

import numpy as np
import pytest
from engine_answers import (
    CLOSE,
    check_answers,
    counted_entries,
    difference_of,
    granted_entries,
    held_as_granted,
    logprobs_of,
)
from golden_models import GOLDEN
from layer_letters import types_of
from sized_models import LENGTH, goldens

from swa_jax import load_model
from swa_jax.base.files import read_json, write_json
from swa_jax.checkpoint.families import hf_pattern
from swa_jax.checkpoint.folder import open_checkpoint
from swa_jax.checkpoint.hf_export import export_model
from swa_jax.checkpoint.served_cache import Memory
from swa_jax.checkpoint.servers import find_served
from swa_jax.model.layer_types import WINDOW
from swa_jax.model.pattern import AttentionPattern

WINDOW_SIZE, BATCHED = 24, 64
PATTERNS = {"windows first": "wF", "full first": "Fw", "1 in 4 full": "wwwF", "windows": "w", "full": "F"}
OWN = "its own"  # the layers that the golden model windows
_RNG = np.random.default_rng(0)
PROMPTS = [_RNG.integers(3, 130, length).tolist() for length in (400, 150)]
ROUNDED = {"apertus": 3e-2}  # vLLM computes the parameters of xIELU in bfloat16
WRONG = {  # in vLLM 0.32.0 itself
    "laguna": "on a CPU it routes by softmax alone",
    "gpt_oss": "on a CPU it gives NaN, with full attention too",
    "mellum": "it adds num_nextn_predict_layers = None to a number; 0.33.0 does not",
}


def pattern_of(kind: str, hf: dict) -> AttentionPattern:
    types = hf_pattern(hf).layer_types if kind == OWN else types_of(PATTERNS[kind], hf["num_hidden_layers"])
    return AttentionPattern(types, WINDOW_SIZE if WINDOW in types else None)


def runs(golden: str, kind: str) -> bool:
    hf = read_json(GOLDEN / golden / "config.json")
    pattern = pattern_of(kind, hf)
    if kind == OWN and pattern in [pattern_of(other, hf) for other in PATTERNS]:
        return False  # which is tried by its name
    return find_served("vllm", hf, pattern) is not None


def cases():
    for family, golden in goldens().items():
        for kind in filter(lambda kind: runs(golden, kind), (*PATTERNS, OWN)):
            wrong = WRONG.get(family) or WRONG.get(f"{family}-{kind}")
            yield pytest.param(
                family, kind, marks=[pytest.mark.xfail(reason=wrong)] if wrong else [], id=f"{family}-{kind}"
            )


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
    pattern = pattern_of("windows first", source.hf_config)
    folder = export_model(source.folder, tmp_path / "hf", pattern=pattern, server="vllm", canary=False)
    assert change.keys() <= read_json(folder / "config.json").keys()
    if letters := change.get("layer_types"):
        change = {"layer_types": types_of(letters, source.config.num_hidden_layers)}
    write_json(folder / "config.json", read_json(folder / "config.json") | change)
    said = engine(folder, PROMPTS, LENGTH, BATCHED)
    ours = logprobs_of(load_model(source.folder, pattern=pattern), PROMPTS, said["tokens"])
    assert difference_of(ours, PROMPTS, said)[0] > 10 * CLOSE


@pytest.mark.parametrize(("family", "kind"), list(cases()))
def test_vllm_computes_what_we_do_in_the_memory_that_we_say(family, kind, engine, checkpoints, tmp_path):
    source = open_checkpoint(checkpoints(family))
    layers = source.config.num_hidden_layers
    pattern = pattern_of(kind, source.hf_config)
    folder = export_model(source.folder, tmp_path / "hf", pattern=pattern, server="vllm", canary=False)
    said = engine(folder, PROMPTS, LENGTH, BATCHED)
    check_answers(load_model(source.folder, pattern=pattern), PROMPTS, said, close=ROUNDED.get(family))

    windows = {layer: group["window"] for group in said["groups"] for layer in group["layers"]}
    # A class whose layers all have windows is told one of the whole context.
    windows = {layer: window if window and window < LENGTH else None for layer, window in windows.items()}
    assert windows == {n: WINDOW_SIZE if kind == WINDOW else None for n, kind in enumerate(pattern.layer_types)}
    memory = Memory(source.config, source.hf_config, LENGTH, "vllm", BATCHED, "cpu")
    windowed = sum(group["window"] is not None for group in said["groups"] for _ in group["layers"])
    window = max(filter(None, windows.values()), default=LENGTH)
    assert granted_entries(said) == counted_entries(memory, layers - windowed, windowed, window)
    assert held_as_granted(said)
