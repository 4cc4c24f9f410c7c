"""The KL of a head's or layer's window to the full model, against whole forward passes."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from flax import nnx
from tiny_models import SOFTMAX

from swa_jax.evaluate import Example
from swa_jax.evaluate.nll import answer_batches
from swa_jax.model.attention import layer_data
from swa_jax.model.decoder import Decoder
from swa_jax.model.layer_types import FULL
from swa_jax.model.loss import CHUNK
from swa_jax.model.pattern import AttentionPattern
from swa_jax.model.window import Window
from swa_jax.select.heads import head_pattern
from swa_jax.select.kl import _kl
from swa_jax.select.static import static_scores

CONFIG = dataclasses.replace(SOFTMAX, num_hidden_layers=2)
WINDOW, SINKS = 4, 1


@nnx.jit
def log_probs(model, tokens, full_from):
    return jax.nn.log_softmax(model(tokens, full_from=full_from))


@pytest.mark.parametrize("decode", [False, True])
def test_scores_are_those_of_whole_passes(decode):
    model = Decoder(CONFIG, AttentionPattern((FULL,) * 2), rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    texts = [rng.integers(CONFIG.vocab_size, size=n).tolist() for n in (30, 30, 30)]
    examples = [Example(text[:-3], text[-3:], []) for text in texts]
    options = {"window": Window(WINDOW, SINKS, decode), "batch_size": 2}
    full_from = np.full(3, 27 if decode else 30, np.int32)
    heads, layers = (static_scores(model, examples, kind, **options) for kind in ("kl", "kl-layers"))

    def expected(full):
        windowed = model.with_pattern(head_pattern(full, Window(WINDOW, SINKS)))
        whole, other = (np.asarray(log_probs(m, np.array(texts), full_from), np.float64) for m in (model, windowed))
        return (np.exp(whole) * (whole - other)).sum(-1)[:, -4:-1].mean()

    for layer, head in ((0, 0), (1, 1)):
        full = np.ones((2, 2), bool)
        full[layer, head] = False
        np.testing.assert_allclose(heads[layer, head], expected(full), rtol=2e-3, atol=1e-6)
    full = np.array([[True, True], [False, False]])
    np.testing.assert_allclose(layers, [[layers[0, 0]] * 2, [expected(full)] * 2], rtol=2e-3, atol=1e-6)
    assert heads.min() > 1e-5


def test_a_long_answer_has_logits_for_a_chunk_at_a_time():
    model = Decoder(CONFIG, AttentionPattern((FULL,) * 2), rngs=nnx.Rngs(0))
    ((_, batch),) = answer_batches([Example([1], [2] * 2 * CHUNK, [])], 1)
    everything = jax.ShapeDtypeStruct((1, 2 * CHUNK, CONFIG.hidden_size), np.float32)
    data = layer_data(model.pattern, CONFIG)
    program = str(
        jax.make_jaxpr(functools.partial(_kl, nnx.split(model)[0]))(nnx.split(model)[1], batch, data, everything)
    )
    assert f"[{CHUNK},{CONFIG.vocab_size}]" in program
    assert f"{2 * CHUNK},{CONFIG.vocab_size}]" not in program
