"""The receipt of an export against a live vLLM server that reads the export, or a changed one; with our plug-in too."""

import functools
import shutil

import pytest
from layer_letters import types_of
from letter_patterns import DECODE, SINKS
from live import check_named
from sized_models import LENGTH, write_model

from swa_jax.base.files import read_json, write_json
from swa_jax.checkpoint.folder import open_checkpoint
from swa_jax.checkpoint.hf_export import export_model
from swa_jax.checkpoint.hf_import import import_model
from swa_jax.model.pattern import AttentionPattern

GOLDENS = {"llama": "llama3-rope", "gemma2": "gemma2-hybrid", "gemma3": "gemma3-hybrid"}


def types(letters):
    return {"layer_types": [*types_of(letters)]}


def rope(**changes):
    """Gemma 3's, by the layer type, with the changes to one."""
    return {"rope_parameters": changes}


GLOBAL = {"factor": 8.0, "rope_theta": 1000000.0, "rope_type": "linear"}
LOCAL = {"rope_theta": 100.0, "rope_type": "default"}
PLAIN = {"rope_theta": 1000000.0, "rope_type": "default"}
# What is changed in config.json, and the reading that the receipt then names.
CHANGES = [
    ("llama", {}, "right"),
    ("llama", {"sliding_window": 25}, "window + 1"),
    ("llama", {"sliding_window": 23}, "window - 1"),
    ("llama", {"sliding_window": 48}, "twice the window"),
    ("llama", types("FFFFFF"), "full everywhere"),
    ("llama", types("wwwwww"), "window everywhere"),
    ("llama", types("FFwFFw"), "kinds swapped"),
    ("llama", types("FwwFww"), "kinds one layer late"),
    ("llama", types("wwwwwF"), "layer 2"),
    ("llama", {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}, "rope unscaled"),
    ("gemma3", {}, "right"),
    ("gemma3", rope(full_attention=LOCAL, sliding_attention=GLOBAL), "rope swapped"),
    ("gemma3", rope(full_attention=PLAIN, sliding_attention=LOCAL), "rope unscaled"),
    ("gemma3", rope(full_attention=LOCAL, sliding_attention=LOCAL), "rope local"),
    ("gemma2", {"final_logit_softcapping": None}, "without logit_softcap"),
]


HEADS = {"full_kv_heads": ((0,), (), (1,), (), (), ())}
# Exports for the plug-in, in the layer types and what else the pattern has.
PLUGIN_PATTERNS = {
    "decode": ("wwFwwF", DECODE),
    "sinks": ("wwFwwF", SINKS),
    "heads": ("hwhwwF", HEADS),
    "all": ("hwhwwF", HEADS | SINKS | DECODE),
}
# What is changed in the pattern, lines that are added to the plug-in's modules, and the reading that is then named.
TAKEN_OVER = {"cache.py": "del PromptOnlyManager.cache_blocks"}
PLUGIN_CHANGES = [
    *((name, {}, {}, "right") for name in PLUGIN_PATTERNS),
    ("decode", {"full_attention_decode": False}, {}, "decode dropped"),
    ("all", {}, TAKEN_OVER, "answer taken over"),
    ("sinks", {"num_sink_tokens": 0}, {}, "sink tokens dropped"),
    ("sinks", {"sliding_window": 23}, {}, "window - 1"),
    ("all", {"sliding_window": 25}, {}, "window + 1"),
    ("heads", {"full_kv_heads": [[1], [], [0], [], [], []]}, {}, "full heads swapped"),
]


def export(name, folder, pattern=None, **options):
    layers = 6 if name == "llama" else None
    source = import_model(write_model(GOLDENS[name], folder / "hf", layers), folder / "ours")
    options = {"serve_length": LENGTH, "batched_tokens": 64, "device": "cpu", **options}
    return export_model(source, folder / "export", pattern=pattern or open_checkpoint(source).pattern, **options)


@pytest.fixture(scope="session")
def exports(tmp_path_factory):
    """The folder of an export with its receipt, made when it is asked for."""

    @functools.cache
    def of(name):
        pattern = AttentionPattern(types_of("wwF", 6), 24) if name == "llama" else None
        return export(name, tmp_path_factory.mktemp(name), pattern, server="vllm")

    return of


@pytest.fixture(scope="session")
def plugin_exports(tmp_path_factory):
    """The same, for the plug-in."""

    @functools.cache
    def of(name):
        letters, options = PLUGIN_PATTERNS[name]
        pattern = AttentionPattern(types_of(letters, 6), 24, **options)
        return export("llama", tmp_path_factory.mktemp(name), pattern, server="vllm-plugin")

    return of


@pytest.mark.parametrize(("name", "change", "expected"), CHANGES, ids=[f"{c[0]}-{c[2]}" for c in CHANGES])
def test_a_changed_export_is_named(name, change, expected, exports, serve, tmp_path):
    folder = shutil.copytree(exports(name), tmp_path / "served")
    config = read_json(folder / "config.json")
    assert change.keys() <= config.keys()
    write_json(folder / "config.json", config | change)
    with serve(folder) as url:
        check_named(folder, url, expected)


@pytest.mark.parametrize(
    ("name", "change", "lines", "expected"), PLUGIN_CHANGES, ids=[f"{c[0]}-{c[3]}" for c in PLUGIN_CHANGES]
)
def test_the_plugin_is_right_and_a_changed_one_is_named(
    name, change, lines, expected, plugin, plugin_exports, serve, tmp_path
):
    folder = shutil.copytree(plugin_exports(name), tmp_path / "served")
    config = read_json(folder / "config.json")
    assert change.keys() <= config["swa_pattern"].keys()
    write_json(folder / "config.json", config | {"swa_pattern": config["swa_pattern"] | change})
    packages = shutil.copytree(plugin, tmp_path / "packages")
    for module, line in lines.items():
        with (packages / "swa_jax_vllm" / module).open("a") as file:
            file.write(f"\n{line}\n")
    with serve(folder, packages=packages) as url:
        check_named(folder, url, expected)
