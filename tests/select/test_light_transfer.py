"""LightTransfer's lazy ratio against whole attention matrices, and what it makes of a planted model."""

import dataclasses
from types import SimpleNamespace

import dense_scores
import numpy as np
import pytest
from flax import nnx
from planted import PLANTED, planted_examples, planted_model
from plants import WINDOW_SIZE
from tiny_models import PLAIN

from swa_jax.base.errors import ConfigError
from swa_jax.evaluate import Example
from swa_jax.model.decoder import Decoder
from swa_jax.model.pattern import AttentionPattern
from swa_jax.model.window import Window
from swa_jax.select import Task, choose, lazy_ratios, light_transfer

CONFIG = dataclasses.replace(PLAIN, num_hidden_layers=2, initializer_range=0.4)


@pytest.fixture(scope="module")
def model():
    return Decoder(CONFIG, AttentionPattern.from_recipe("full", 2), rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("last", "sinks", "recent"),
    [(32, 4, 40), *(pytest.param(*other, marks=pytest.mark.slow) for other in ((5, 0, 1), (1, 3, 7)))],
)
def test_the_ratio_is_that_of_whole_matrices(model, last, sinks, recent):
    rng = np.random.default_rng(0)
    prompts = [rng.integers(CONFIG.vocab_size, size=n).tolist() for n in (150, 97, 20)]  # one below 32 queries
    examples = [Example(prompt, [1, 2, 3], []) for prompt in prompts]
    got = lazy_ratios(model, examples, last_queries=last, num_sink_tokens=sinks, recent_keys=recent, batch_size=2)
    wanted = np.array([dense_scores.lazy_ratios(model, prompt, last, sinks, recent) for prompt in prompts])
    np.testing.assert_allclose(got, wanted, atol=1e-5)
    assert wanted[:2].min() > 0.001
    assert wanted[:2].max() < 0.99


def test_what_the_window_holds_is_all_lazy(model):
    got = lazy_ratios(model, [Example([1] * 50, [2], [])])
    np.testing.assert_allclose(got, 1, atol=1e-6)


def test_lazy_layers_are_windowed(monkeypatch):
    scores = np.array([[0.9, 0.2, 0.5, 0.2]] * 3)
    monkeypatch.setattr(light_transfer, "lazy_ratios", lambda *_, **options: asked.append(options) or scores)
    asked = []
    model = SimpleNamespace(config=CONFIG, pattern=AttentionPattern.from_recipe("full", 4))
    task = Task(model, [Example([1] * 5000, [2], [])], Window(2048, 1), data="needles", seed=1)
    half, quarter = choose("light-transfer", task, [0.5, 0.75])
    assert (half.full_layers, quarter.full_layers) == ((1, 3), (1,))
    assert (half.sliding_window, half.num_sink_tokens) == (2048, 1)
    said = AttentionPattern.from_json(half.to_json()).provenance
    assert (said["method"], said["recent_keys"], said["scores"][0]) == ("light-transfer", 1020, 0.9)
    choose("light-transfer", dataclasses.replace(task, window=Window(64)), [0.5], lazy_sinks=10)
    assert [options["recent_keys"] for options in asked] == [1020, 54]


def test_means_over_heads_and_queries_miss_planted_layers():
    """One token in 48 looks far, through at most 3 heads in 8."""
    layers, near = {layer for layer, _ in PLANTED}, {"num_sink_tokens": 0, "recent_keys": WINDOW_SIZE}
    ratios = lazy_ratios(planted_model(), planted_examples(), last_queries=32, batch_size=8, **near)
    chosen = np.argsort(ratios.mean(0), kind="stable")[: len(layers)].tolist()
    assert len(layers & {*chosen}) < len(layers) - 1


def test_bad_numbers_and_models_are_named(model):
    examples = [Example([1] * 50, [2], [])]
    with pytest.raises(ConfigError, match="last_queries must be at least 1, got 0"):
        lazy_ratios(model, examples, last_queries=0)
    with pytest.raises(ConfigError, match="recent_keys must be at least 1"):
        lazy_ratios(model, examples, recent_keys=0)
    config = dataclasses.replace(CONFIG, attention_activation="sigmoid")
    sigmoid = Decoder(config, AttentionPattern.from_recipe("full", 2), rngs=nnx.Rngs(0))
    with pytest.raises(ConfigError, match=r"LightTransfer scores layers of softmax.*sigmoid"):
        lazy_ratios(sigmoid, examples)
