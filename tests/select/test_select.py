"""NLL-guided selection: planted answers are found, a window that holds the prompt scores exactly nothing."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_models import WIDER

from swa_jax.base.errors import ConfigError
from swa_jax.evaluate import Example, answer_nll
from swa_jax.evaluate.nll import score_batch
from swa_jax.model.decoder import Decoder
from swa_jax.model.generate import generate
from swa_jax.model.pattern import AttentionPattern
from swa_jax.model.window import Window
from swa_jax.select import NLLScores, nll_deltas, nll_scores

LAYERS, WINDOW_SIZE = 5, 6
CARRIER, READER = 1, 3
CONFIG = dataclasses.replace(WIDER, num_hidden_layers=LAYERS, initializer_range=0.4)


@pytest.fixture(scope="module")
def model() -> Decoder:
    """Attention writes to the residual stream in two layers only; the other layers cannot need a long range.

    What the carrier gathers at prompt positions is read from there in the reader, by answer queries that see
    everything anyway: windowing the prompt harms through the carrier.
    """
    model = Decoder(CONFIG, AttentionPattern.from_recipe("full", LAYERS), rngs=nnx.Rngs(0))
    silent = ~np.isin(np.arange(LAYERS), (CARRIER, READER))
    kernel = model.layers.attention.o_proj.kernel
    kernel[...] = jnp.where(silent[:, None, None], 0.0, kernel[...])
    return model


@pytest.fixture(scope="module")
def examples(model) -> list[Example]:
    """Long prompts whose answers are what the model says with full attention."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, CONFIG.vocab_size, 40).tolist() for _ in range(8)]
    answers = generate(model, prompts, max_new_tokens=4)
    return [Example(p, a, []) for p, a in zip(prompts, answers, strict=True)]


@pytest.fixture(scope="module")
def scores(model, examples) -> NLLScores:
    return nll_deltas(model, examples, Window(WINDOW_SIZE, 1, True), batch_size=4)


def test_the_planted_layer_is_found(scores):
    silent = [layer for layer in range(LAYERS) if layer not in (CARRIER, READER)]
    np.testing.assert_array_equal(scores.deltas[:, silent], 0)
    assert scores.mean[CARRIER] > 0.2
    assert 0 < abs(scores.mean[READER]) < scores.mean[CARRIER] / 4
    assert scores.best() == [CARRIER]


def test_without_full_attention_decode_the_reader_shows(model, examples, scores):
    plain = nll_scores(
        model, examples, sliding_window=WINDOW_SIZE, num_sink_tokens=1, batch_size=4, full_attention_decode=False
    )
    assert plain[READER] > 2 * abs(scores.mean[READER])
    assert sorted(np.argsort(-plain)[:2]) == [CARRIER, READER]


def test_scores_are_differences_of_answer_nll(model, examples, scores):
    def nll(full_layers):
        pattern = AttentionPattern.from_full_layers(
            full_layers, LAYERS, WINDOW_SIZE, num_sink_tokens=1, full_attention_decode=True
        )
        return answer_nll(model.with_pattern(pattern), examples, batch_size=4)

    base = nll([])
    np.testing.assert_allclose(scores.window_nll, base, rtol=1e-6)
    np.testing.assert_allclose(scores.deltas[:, 3], base - nll([3]), atol=1e-6)
    got = nll_scores(model, examples, sliding_window=WINDOW_SIZE, num_sink_tokens=1, batch_size=4)
    assert got.shape == (LAYERS,)
    np.testing.assert_allclose(got, scores.deltas.mean(0), atol=1e-7)


def test_one_compilation_serves_all_passes(model, examples, scores):
    before, seen = score_batch._cache_size(), []
    again = nll_deltas(
        model,
        examples[::-1],
        Window(WINDOW_SIZE, 1, True),
        batch_size=4,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert score_batch._cache_size() == before
    assert seen == [(i + 1, LAYERS + 1) for i in range(LAYERS + 1)]
    np.testing.assert_allclose(again.deltas[::-1], scores.deltas, atol=1e-5)  # each example keeps its own row


def test_a_prompt_that_the_window_holds_scores_exactly_zero(model, examples):
    short = dataclasses.replace(examples[0], prompt=examples[0].prompt[:7])
    one_longer = dataclasses.replace(examples[0], prompt=examples[0].prompt[:8])
    # Among longer ones in one batch, too. Window 6 and 1 sink token hold 7 prompt tokens, not 8.
    got = nll_deltas(model, [short, one_longer, examples[1]], Window(6, 1, True), batch_size=4)
    assert (got.deltas[0] == 0).all()
    assert got.deltas[1].any()
    assert got.deltas[2].any()
    assert got.window_nll[0] == pytest.approx(answer_nll(model, [short])[0], rel=1e-5)
    # Without full-attention decode the 3 queries at answer tokens that predict another one count too.
    fits = dataclasses.replace(short, answer=examples[0].answer[:1])
    got = nll_deltas(model, [short, fits], Window(6, 1, False), batch_size=4)
    assert got.deltas[0].any()
    assert (got.deltas[1] == 0).all()


@pytest.mark.parametrize("options", [{}, {"num_sink_tokens": 2}])
def test_a_window_is_needed(model, examples, options):
    with pytest.raises(ConfigError, match="no window is given"):
        nll_scores(model, examples, **options)


def test_intervals_surround_the_mean():
    deltas = np.random.default_rng(0).normal(0.3, 0.1, (16, 2))
    for interval, mean in zip(
        NLLScores(deltas, np.ones(16), Window(8, 0, True)).intervals(), deltas.mean(0), strict=True
    ):
        assert interval.mean == pytest.approx(mean)
        assert interval.low < mean < interval.high
