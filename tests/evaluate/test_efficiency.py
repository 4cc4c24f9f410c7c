"""Speed measured in turn: which figures there are, what they count, and when a cost is earned back."""

import numpy as np
import pytest
from flax import nnx
from tiny_models import BYTES

from swa_jax.base.errors import ConfigError
from swa_jax.evaluate import efficiency
from swa_jax.evaluate.efficiency import break_even, measure_efficiency
from swa_jax.model.cache import cache_bytes
from swa_jax.model.decoder import Decoder
from swa_jax.model.flops import matrix_parameters, some_positions, work_by_position
from swa_jax.model.layer_types import FULL, SWITCH, WINDOW
from swa_jax.model.parameters import parameters
from swa_jax.model.pattern import AttentionPattern


@pytest.fixture(scope="module")
def models():
    full = AttentionPattern.from_recipe("full", 2)
    window = AttentionPattern.from_recipe("window", 2, sliding_window=8)
    model = Decoder(BYTES, full, rngs=nnx.Rngs(0))
    return {"original": model, "adapted": model.with_pattern(window)}


def test_the_models_are_timed_in_turn_and_the_first_round_does_not_count(models, monkeypatch):
    order, clock = [], iter(range(100))

    def timed(model, batch, new_tokens):
        order.append(model.pattern.sliding_window)
        number = next(clock)
        return (100.0 if number < 2 else 1.0 + number), 0.5, 64

    monkeypatch.setattr(efficiency, "_time", timed)
    steps = []
    figures = measure_efficiency(models, [[1, 2, 3]] * 2, new_tokens=5, repeats=3, advance=steps.append)
    assert order == [None, 8] * 4
    assert sum(steps) == 8
    assert figures["original"]["first_token_seconds_all"] == [3.0, 5.0, 7.0]
    assert figures["original"]["first_token_seconds"] == 5.0
    assert figures["original"]["request_seconds"] == (5.0 + 4 * 0.5) / 2
    assert figures["adapted"]["tokens_per_second"] == pytest.approx((6 + 10) / (6.0 + 4 * 0.5))
    assert figures["adapted"]["kv_cache_bytes"] == 32


def test_the_cache_is_the_allocated_one(models):
    prompt = np.arange(100).tolist()
    figures = measure_efficiency(models, [prompt] * 3, new_tokens=3, repeats=1)
    weights = 4 * sum(row.size for row in parameters(BYTES))
    for name, model in models.items():
        assert figures[name]["kv_cache_bytes"] == cache_bytes(BYTES, model.pattern, 1, 128, 4)
        assert figures[name]["memory_bytes"] == weights + 3 * figures[name]["kv_cache_bytes"]
        assert figures[name]["token_seconds"] > 0
        assert 3 * figures[name]["request_seconds"] >= figures[name]["first_token_seconds"]


@pytest.mark.parametrize("wrong", [{"new_tokens": 1}, {"repeats": 0}])
def test_what_cannot_be_timed_is_refused(models, wrong):
    with pytest.raises(ConfigError, match="new_tokens must be at least 2 and repeats at least 1"):
        measure_efficiency(models, [[1]], **wrong)


@pytest.mark.parametrize(
    ("before", "after", "requests"), [(3.0, 1.0, 5), (3.0, 2.0, 10), (4.0, 1.0, 4), (1.0, 1.0, None), (1.0, 2.0, None)]
)
def test_a_cost_of_ten_seconds_is_earned_back(before, after, requests):
    assert break_even(10.0, {"request_seconds": before}, {"request_seconds": after}) == requests


def test_work_by_position():
    """Figure 4 of SwiAttn: operations of the prefill, and tokens that decoding reads, the mean over the layers."""
    config = BYTES
    matrices = 2 * matrix_parameters(config)
    key = 4 * config.num_attention_heads * config.head_dim  # of a layer

    def work(pattern, position, ratio=1.0):
        (row,) = work_by_position(config, pattern, [position], ratio)
        assert row.position == position
        return row.prefill_flops - matrices, row.kv_tokens_read

    mixed = AttentionPattern((FULL, WINDOW), 8, 2)
    assert work(mixed, 100) == (key * (100 + 10), (100 + 10) / 2)
    assert work(mixed, 5) == (key * 10, 5)
    # The prompt is read through windows, the answer sees everything.
    decode = AttentionPattern((WINDOW, WINDOW), 8, 2, full_attention_decode=True)
    assert work(decode, 100) == (key * 20, 100)
    routed = AttentionPattern((SWITCH, WINDOW), 8)
    assert work(routed, 100, 0.25) == (key * (8 + 0.25 * 92 + 8), (8 + 0.25 * 92 + 8) / 2)
    assert some_positions(100) == [1, 4, 16, 64, 100]
    assert some_positions(64) == [1, 4, 16, 64]
    assert some_positions(1) == [1]
