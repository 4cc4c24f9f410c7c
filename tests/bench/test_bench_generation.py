"""`swa-jax bench generation`: memory by the cache's formula, times in turn, ratios to the first row."""

import dataclasses
import json

import pytest
from command_line import fails, run
from flax import nnx
from planted import PLANT, in_place_of_a_checkpoint, planted_model
from plants import KV_HEADS, LAYERS

from swa_jax.bench import generation
from swa_jax.bench.generation import measure
from swa_jax.model.cache import cache_bytes
from swa_jax.model.decoder import Decoder
from swa_jax.model.generate import round_up
from swa_jax.model.pattern import AttentionPattern
from swa_jax.model.window import Window
from swa_jax.select.heads import head_pattern, heuristic_mask


@pytest.mark.slow
def test_memory_is_the_formula_and_rounds_take_turns(monkeypatch):
    ran = []
    real = generation._time

    def time(model, *rest):
        ran.append(sum(model.pattern.full_head_counts) + KV_HEADS * len(model.pattern.full_layers))
        return real(model, *rest)

    monkeypatch.setattr(generation, "_time", time)
    told = {"length": 60, "batch_size": 2, "new_tokens": 3}
    rows = measure(planted_model(), [0.0, 0.5, 1.0], Window(8, 2), rounds=1, **told)
    assert ran == 2 * [32, 16, 0]
    for row in rows:
        mask = heuristic_mask("random-heads", LAYERS, KV_HEADS, row["ratio"])
        pattern = head_pattern(mask, Window(8, 2))
        assert row["windowed_heads"] == (~mask).sum()
        assert row["kv_cache_bytes"] == cache_bytes(PLANT.config, pattern, 1, round_up(63), 4)
        assert row["decode_tokens_per_second"] > 0
    assert rows[0]["prefill_tokens_per_second_ratio"] == 1
    longest = round_up(63)
    assert rows[2]["kv_cache_bytes_ratio"] == pytest.approx(10 / longest)
    assert rows[1]["kv_cache_bytes_ratio"] == pytest.approx((longest + 10) / 2 / longest)


def test_on_the_command_line(monkeypatch, tmp_path):
    config = dataclasses.replace(PLANT.config, num_hidden_layers=2)
    model = nnx.jit(lambda: Decoder(config, AttentionPattern.from_recipe("full", 2), rngs=nnx.Rngs(0)))()
    in_place_of_a_checkpoint(monkeypatch, model, "bench")
    options = ("x", "--length", 40, "--new-tokens", 2, "--rounds", 1, "--ratio", 0.75)
    output = run("bench", "generation", *options, "--window", 8, "--out", tmp_path / "new" / "g.json")
    assert "75% (6)" in output
    report = json.loads((tmp_path / "new" / "g.json").read_text())
    assert [row["ratio"] for row in report["rows"]] == [0.75]
    assert "no window is given (--window)" in fails("bench", "generation", *options)
    assert "--window 40 holds whole prompts of 40 tokens" in fails("bench", "generation", *options, "--window", 40)
    assert "ratio is 2.0" in fails("bench", "generation", "x", "--window", 8, "--ratio", 2)
