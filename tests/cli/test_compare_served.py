"""`compare --for SERVER`: rows with the cache that their patterns take there, without those that it cannot run."""

import json

import pytest

from swa_jax.adapt.job import find_source
from swa_jax.base.errors import ConfigError
from swa_jax.checkpoint.served_cache import Memory
from swa_jax.cli.compare import _counted
from swa_jax.model.pattern import AttentionPattern


def row(name, pattern, **more):
    return {"name": name, "pattern": json.loads(pattern.to_json()), "kv_cache_bytes": 7} | more


@pytest.fixture
def memory():
    source = find_source("recall")
    return Memory(source.config, source.hf_config, 32768, "vllm")


def test_rows_have_the_cache_as_served(memory, capsys):
    one = AttentionPattern.from_full_layers([2], 8, 64)
    sinks = AttentionPattern.from_full_layers([2], 8, 64, num_sink_tokens=4)
    rows = _counted([row("one", one), row("sinks", sinks)], memory, None)
    assert [(found["name"], found["kv_cache_bytes"]) for found in rows] == [("one", memory.bytes(one))]
    assert "sinks: not shown, as vllm 0.33.0 cannot run this pattern: num_sink_tokens = 4" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="vllm runs none of these patterns"):
        _counted([row("sinks", sinks)], memory, None)


def test_what_a_method_chose_is_counted_under_the_window_of_scoring(memory):
    chosen = AttentionPattern.from_full_layers([2], 8, 64)
    wider = AttentionPattern.from_full_layers([2], 8, 4096)
    rows = [row("a", chosen), row("nll", chosen, ratio=0.5, seed=0)]
    for window, expected in ((None, chosen), (4096, wider)):
        named, method = _counted(rows, memory, window)
        assert named["kv_cache_bytes"] == memory.bytes(chosen)
        assert method["kv_cache_bytes"] == memory.bytes(expected)
    assert memory.bytes(wider) > memory.bytes(chosen)
