"""Sink tokens, full-attention decode and single full KV heads in vLLM's own engine, with our plug-in and without it.

Five families, each with every kind of pattern: prompts in chunks, once more from the cache of prefixes, and the next
turn of a conversation, whose first answer is in the cache.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from asking import BATCHED, CLOSE, NEW, PROMPTS, TURN, WINDOW_SIZE, asked, difference_of
from sized_models import LENGTH

from swa_jax import generate, load_model
from swa_jax.base.files import read_json, write_json
from swa_jax.checkpoint.folder import open_checkpoint
from swa_jax.checkpoint.hf_export import export_model
from swa_jax.checkpoint.served_cache import Memory, grouped_entries, modules
from swa_jax.checkpoint.servers import SERVERS
from swa_jax.model.layer_types import FULL, HYBRID, WINDOW
from swa_jax.model.pattern import AttentionPattern

PLUGIN = Path(__file__).parents[3] / "plugins" / "vllm"
SINKS, DECODE = {"num_sink_tokens": 3}, {"full_attention_decode": True}
PATTERNS = {
    "windows": ("wF", {}),
    "sinks": ("wF", SINKS),
    "sinks everywhere": ("w", SINKS),
    "decode": ("wF", DECODE),
    "heads": ("hF", {}),
    "heads and sinks": ("whF", SINKS),
    "all": ("hwF", SINKS | DECODE),
}
FAMILIES = sorted(SERVERS["vllm-plugin"].classes)


def pattern_of(kind: str, layers: int) -> AttentionPattern:
    letters, options = PATTERNS[kind]
    row = (letters * layers)[:layers]
    types = tuple({"F": FULL, "w": WINDOW, "h": HYBRID}[letter] for letter in row)
    heads = tuple((layer // 2 % 2,) if letter == "h" else () for layer, letter in enumerate(row))
    return AttentionPattern(types, WINDOW_SIZE, full_kv_heads=heads, **options)


@pytest.fixture(scope="session")
def plugin(tmp_path_factory):
    """vLLM with the plug-in, as it is installed."""
    folder = tmp_path_factory.mktemp("plugin")
    source = shutil.copytree(PLUGIN, folder / "source")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*install, "--target", folder / "installed", source], check=True)
    with asked(folder / "log", str(folder / "installed")) as ask:
        yield ask


@pytest.mark.parametrize("kind", PATTERNS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_plugin_computes_what_we_do_in_the_memory_that_we_say(family, kind, plugin, checkpoints, tmp_path):
    source = open_checkpoint(checkpoints(family))
    pattern = pattern_of(kind, source.config.num_hidden_layers)
    folder = export_model(source.folder, tmp_path / "hf", pattern=pattern, server="vllm-plugin", canary=False)
    model = load_model(source.folder, pattern=pattern)
    said = plugin(folder)
    assert "refused" not in said, said

    difference, largest = difference_of(model, said)
    assert difference <= CLOSE * max(1, largest / 10)
    assert said["tokens"] == generate(model, PROMPTS, max_new_tokens=NEW)
    assert said["second"] == said["tokens"]
    turns = [[*prompt, *answer, *TURN] for prompt, answer in zip(PROMPTS, said["tokens"], strict=True)]
    assert said["next_turn"] == generate(model, turns, max_new_tokens=NEW)
    assert min(said["reused"] + said["next_reused"]) > 0

    memory = Memory(source.config, source.hf_config, LENGTH, "vllm-plugin", BATCHED)
    assert memory.blocks.tokens == said["block_tokens"]
    full, windowed = modules(pattern, source.config.num_key_value_heads)
    size = max(len(group["layers"]) for group in said["groups"])
    entries, _ = grouped_entries(full, windowed, WINDOW_SIZE, LENGTH, memory.blocks, pattern.num_sink_tokens)
    assert entries == size * memory.blocks.tokens * sum(group["granted"][0] for group in said["groups"])
    whole = -(-LENGTH // memory.blocks.tokens)
    for group in said["groups"]:
        assert (group["granted"][0] < whole) == (group["window"] is not None)
    for held in said["held"]:
        assert all(most <= group["granted"][0] for most, group in zip(held, said["groups"], strict=True))


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("sinks", {"num_sink_tokens": 2}),
        ("sinks", {"sliding_window": WINDOW_SIZE + 1}),
        ("heads", {"full_kv_heads": [[], [], [], []]}),
    ],
    ids=str,
)
def test_another_pattern_is_noticed(kind, change, plugin, checkpoints, tmp_path):
    source = open_checkpoint(checkpoints("llama"))
    pattern = pattern_of(kind, source.config.num_hidden_layers)
    folder = export_model(source.folder, tmp_path / "hf", pattern=pattern, server="vllm-plugin", canary=False)
    hf = read_json(folder / "config.json")
    if "full_kv_heads" in change:
        change = {"full_kv_heads": [[] for _ in pattern.layer_types]}
    write_json(folder / "config.json", hf | {"swa_pattern": hf["swa_pattern"] | change})
    assert difference_of(load_model(source.folder, pattern=pattern), plugin(folder))[0] > 10 * CLOSE


@pytest.mark.parametrize("family", FAMILIES)
def test_without_the_plugin_it_is_refused(family, engine, checkpoints, tmp_path):
    source = open_checkpoint(checkpoints(family))
    pattern = pattern_of("all", source.config.num_hidden_layers)
    folder = export_model(source.folder, tmp_path / "hf", pattern=pattern, server="vllm-plugin", canary=False)
    assert f"swa_jax_{family}" in engine(folder)["refused"]
