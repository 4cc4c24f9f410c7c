"""Sink tokens, full-attention decode and single full KV heads in vLLM's own engine, with our plug-in and without it.

Five families, each with every kind of pattern: prompts in chunks, once more from the cache of prefixes, and the next
turn of a conversation, whose first answer is in the cache.
"""

import importlib
import os
import re
import subprocess

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
from engine_process import ENVIRONMENT, PLUGIN
from letter_patterns import DECODE, LICENSE, SINKS, made_pattern
from real_models import real_model
from sized_models import LENGTH, write_model

from swa_jax import generate, load_model
from swa_jax.base.files import read_json, write_json
from swa_jax.checkpoint.folder import open_checkpoint
from swa_jax.checkpoint.hf_export import export_model
from swa_jax.checkpoint.hf_import import import_model
from swa_jax.checkpoint.named import model_folder
from swa_jax.checkpoint.served_cache import Memory, modules
from swa_jax.checkpoint.servers import SERVERS
from swa_jax.data.tokenizer import load_tokenizer
from swa_jax.model.layer_types import FULL, HYBRID, WINDOW
from swa_jax.model.pattern import AttentionPattern

WINDOW_SIZE, BATCHED, NEW = 24, 64, 8
_RNG = np.random.default_rng(1)
# An answer begins in one block and ends in the next.
PROMPTS = [_RNG.integers(3, 130, length).tolist() for length in (380, 252)]
TURN = _RNG.integers(3, 130, 40).tolist()
PATTERNS = {
    "full": ("F", {}),
    "windows": ("wF", {}),
    "sinks": ("wF", SINKS),
    "sinks everywhere": ("w", SINKS),
    "decode": ("wF", DECODE),
    "heads": ("hF", {}),
    "heads and sinks": ("whF", SINKS),
    "all": ("hwF", SINKS | DECODE),
}
PADDED = {"chains": "Heads of 16 channels take the memory of 32 in vllm-plugin, with zeros at their ends."}
FAMILIES = sorted(SERVERS["vllm-plugin"].classes)


def pattern_of(kind: str, layers: int) -> AttentionPattern:
    return made_pattern(*PATTERNS[kind], layers, WINDOW_SIZE)


def granted_bytes(said, config, pattern) -> int:
    """What the engine's planner grants a sequence, at 2 bytes a number."""
    every = config.num_hidden_layers * config.common_kv_heads
    module = every // sum(modules(pattern, config.common_kv_heads))  # in KV heads
    return granted_entries(said)[0] * module * 2 * max(32, config.head_dim) * 2  # heads are padded to 32


@pytest.fixture
def exported(checkpoints, tmp_path):
    """The checkpoint of a family, a kind of pattern for it, and the folder of that export."""

    def of(family, kind):
        source = open_checkpoint(checkpoints(family))
        pattern = pattern_of(kind, source.config.num_hidden_layers)
        options = {"pattern": pattern, "server": "vllm-plugin", "canary": False}
        return source, pattern, export_model(source.folder, tmp_path / f"{family} {kind}", **options)

    return of


@pytest.mark.parametrize("kind", [kind for kind in PATTERNS if kind != "full"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_plugin_computes_what_we_do_in_the_memory_that_we_say(family, kind, plugin_engine, exported):
    source, pattern, folder = exported(family, kind)
    said = plugin_engine(folder, PROMPTS, LENGTH, BATCHED, NEW, TURN)
    check_answers(load_model(source.folder, pattern=pattern), PROMPTS, said, TURN)

    memory = Memory(source.config, source.hf_config, LENGTH, "vllm-plugin", BATCHED)
    assert memory.blocks.tokens == said["block_tokens"]
    full, windowed = modules(pattern, source.config.num_key_value_heads)
    assert granted_entries(said) == counted_entries(memory, full, windowed, WINDOW_SIZE, pattern.num_sink_tokens)
    assert memory.bytes(pattern) == granted_bytes(said, source.config, pattern)
    whole = -(-LENGTH // memory.blocks.tokens)
    for group in said["groups"]:
        assert (group["granted"][0] < whole) == (group["window"] is not None)
        assert (group["window"] is None or pattern.num_sink_tokens > 0) == said["first"][0][said["groups"].index(group)]
    assert held_as_granted(said)


@pytest.mark.parametrize(("kind", "blocks"), [("decode", 6), ("all", 6), ("sinks", 11)])
def test_a_request_that_is_put_aside_answers_the_same(kind, blocks, plugin_engine, exported):
    """Both prompts are begun; then both need a block, and one is left. The other is computed again, its answer too."""
    source, pattern, folder = exported("llama", kind)
    prompts = [np.random.default_rng(n).integers(3, 130, 246).tolist() for n in range(2)]
    said = plugin_engine(folder, prompts, LENGTH, BATCHED, 20, blocks=blocks)
    assert "refused" not in said, said
    assert said["block_tokens"] == 128
    assert said["put_aside"] > 0
    assert said["tokens"] == generate(load_model(source.folder, pattern=pattern), prompts, max_new_tokens=20)


def test_tensor_parallelism(plugin_engine, tmp_path, monkeypatch):
    """Full KV heads in twos, wherever they are: each of two ranks has one. Counts of 2 and 1 are refused."""
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4}
    source = import_model(write_model("llama3-rope", tmp_path / "hf", 4, **sizes), tmp_path / "ours")
    full = ((0, 3), (1, 2), (), ())
    pattern = AttentionPattern((HYBRID, HYBRID, WINDOW, FULL), WINDOW_SIZE, full_kv_heads=full, **SINKS)
    folder = export_model(source, tmp_path / "export", pattern=pattern, server="vllm-plugin", canary=False)
    said = plugin_engine(folder, PROMPTS, LENGTH, BATCHED, NEW, TURN, ranks=2)
    check_answers(load_model(source, pattern=pattern), PROMPTS, said, TURN)

    monkeypatch.syspath_prepend(PLUGIN)
    theirs = importlib.import_module("swa_jax_vllm.pattern").Pattern
    written = read_json(folder / "config.json")["swa_pattern"]
    with pytest.raises(NotImplementedError, match=r"size 2 does not divide .* take a divisor of 1"):
        theirs.read(written | {"full_kv_heads": [[0, 3], [1], [], []]}, 4, 4).order(0, 4, 2)


def test_without_the_block_of_sinks_nothing_is_taken_over(plugin_engine, exported):
    """The blocks of the window are still in the cache; what is seen of the sinks has to be computed again."""
    folder = exported("llama", "sinks everywhere")[2]
    said = plugin_engine(folder, PROMPTS, LENGTH, BATCHED, NEW, forget=True)
    assert said["reused"] == [0] * len(PROMPTS)
    assert said["second"] == said["tokens"]


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("sinks", {"num_sink_tokens": 2}),
        ("sinks", {"sliding_window": WINDOW_SIZE + 1}),
        ("heads", {"full_kv_heads": "others"}),
    ],
    ids=str,
)
def test_another_pattern_is_noticed(kind, change, plugin_engine, exported):
    source, pattern, folder = exported("llama", kind)
    hf = read_json(folder / "config.json")
    if "full_kv_heads" in change:
        change = {"full_kv_heads": [[1 - head for head in heads] for heads in pattern.full_kv_heads]}
    write_json(folder / "config.json", hf | {"swa_pattern": hf["swa_pattern"] | change})
    said = plugin_engine(folder, PROMPTS, LENGTH, BATCHED)
    ours = logprobs_of(load_model(source.folder, pattern=pattern), PROMPTS, said["tokens"])
    assert difference_of(ours, PROMPTS, said)[0] > 10 * CLOSE


def test_gemma_in_float16_is_refused(plugin_engine, exported):
    folder = exported("gemma3_text", "windows")[2]
    said = plugin_engine(folder, PROMPTS, LENGTH, BATCHED, dtype="float16")
    assert "Gemma 3 overflows in float16" in said["refused"]


LOAD = """
import sys, transformers
for folder in sys.argv[1:]:
    try:
        transformers.AutoModelForCausalLM.from_pretrained(folder)
    except ValueError as error:
        print(error)
"""


def test_without_the_plugin_it_is_refused(engine, exported):
    """By vLLM, and by transformers."""
    folders = [exported(family, "all")[2] for family in FAMILIES]
    for family, folder in zip(FAMILIES, folders, strict=True):
        assert f"swa_jax_{family}" in engine(folder, PROMPTS, LENGTH, BATCHED)["refused"]
    command = [os.environ["SERVERS_PYTHON"], "-c", LOAD, *folders]
    loaded = subprocess.run(command, env=os.environ | ENVIRONMENT, capture_output=True, text=True)
    assert [family for family in FAMILIES if f"model type `swa_jax_{family}`" in loaded.stdout] == FAMILIES


def test_what_exports_hold_is_measured(plugin, exported):
    """With sink tokens a request holds two of four blocks, the first and the last, or for a while three."""
    folders = [exported("llama", kind)[2] for kind in ("full", "sinks everywhere")]
    sizes = ["--prompt-tokens", "460", "--new-tokens", "40", "--batched-tokens", "64", "--runs", "1"]
    command = [os.environ["SERVERS_PYTHON"], PLUGIN / "measure.py", *folders, *sizes, "--enforce-eager"]
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": str(plugin)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    said = re.findall(r"(\w+): (\d+) blocks, .* \((.*)\)", done.stdout)
    assert said == [("full", "16", "100.0%"), ("everywhere", "9", "56.2%")], done.stderr


def test_another_version_is_refused_in_a_sentence():
    """As a vLLM that was not tried: the sentence says which was, and how to go on."""
    code = "import vllm; vllm.__version__ = '0.31.0'; from swa_jax_vllm.versions import check_version; check_version()"
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": str(PLUGIN)}
    command = [os.environ["SERVERS_PYTHON"], "-c", code]
    refused = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert "was tried with vLLM 0.32.0, and this is vLLM 0.31.0: install vllm==0.32.0" in refused.stderr
    allowed = subprocess.run(command, env=environment | {"SWA_JAX_VLLM_UNTRIED": "1"}, capture_output=True, text=True)
    assert allowed.returncode == 0, allowed.stderr


@pytest.mark.parametrize(
    ("name", "letters", "options", "share"),
    [
        pytest.param("recall", "wwwh", SINKS, 0.5, id="recall-sinks and heads"),
        pytest.param("chains", "whwF", SINKS, 0.6, id="chains-sinks and heads"),
        pytest.param("chains", "whwF", SINKS | DECODE, 1, id="chains-all"),
        pytest.param("smollm2", "wwwF", SINKS, 0.6, id="smollm2-sinks"),
        pytest.param("smollm2", "wwwh", {}, 0.4, id="smollm2-heads"),
    ],
)
def test_real_models(name, letters, options, share, plugin_engine, tmp_path):
    """A prompt of 14 windows, and the turn after its answer; `share`: most of full attention's cache that it takes."""
    folder = model_folder(real_model(name) if name == "smollm2" else name)
    source = open_checkpoint(folder)
    length = 1024
    pattern = made_pattern(letters, options, source.config.num_hidden_layers, 64)
    export = export_model(folder, tmp_path / "export", pattern=pattern, server="vllm-plugin", canary=False)
    prompts = [list(load_tokenizer(folder).encode(LICENSE.read_text()))[: length - 100]]
    said = plugin_engine(export, prompts, length, 64, NEW, TURN)
    check_answers(load_model(folder, pattern=pattern, dtype="float32"), prompts, said, TURN)
    memory = Memory(source.config, source.hf_config, length, "vllm-plugin", 64)
    assert memory.bytes(pattern) == granted_bytes(said, source.config, pattern) <= share * memory.full
    assert memory.padding == PADDED.get(name, "")
    assert held_as_granted(said)
