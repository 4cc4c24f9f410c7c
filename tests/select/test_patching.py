"""Activation patching against layers run one by one, and its first-order form."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx
from kernels.tolerances import assert_close
from tiny_models import SOFTMAX, TWO_SHAPES

from pallas_kernels import AttentionSpec, attention
from swa_jax.base.errors import ConfigError
from swa_jax.evaluate import Example
from swa_jax.evaluate.nll import answer_batches
from swa_jax.model.attention import layer_data
from swa_jax.model.block import Stream
from swa_jax.model.decoder import Decoder
from swa_jax.model.layer_types import FULL
from swa_jax.model.pattern import AttentionPattern
from swa_jax.model.window import Window
from swa_jax.select.patching import patching_scores

CONFIG = dataclasses.replace(SOFTMAX, num_hidden_layers=2, initializer_range=0.5)
WINDOW = Window(4, 1, False)


def examples(count):
    rng = np.random.default_rng(0)
    return [Example(rng.integers(CONFIG.vocab_size, size=20 + i).tolist(), [1, 2], []) for i in range(count)]


def losses(model: Decoder, batch, patch=None) -> np.ndarray:
    """The answers' losses [B] under windows, layer by layer and head by head, by the plain formula of attention.

    `patch` is (layer, KV head): its query heads say what they say in a run with full attention.
    """
    pattern = AttentionPattern((FULL,) * 2)
    context = model.context(batch.tokens, batch.segment_ids)
    graph, stacked = nnx.split(model.layers)

    def run(window, clean=None):
        stream, said = Stream(model.embed(batch.tokens)), []
        for layer in range(2):
            block = nnx.merge(graph, jax.tree.map(lambda w, layer=layer: w[layer], stacked))
            row = jax.tree.map(lambda x, layer=layer: x[layer], layer_data(pattern, CONFIG, (FULL,)))
            read = block.attention_input(stream.x)
            q, k, v = block.attention.qkv(read, row, context)
            spec = AttentionSpec(window=window, num_sink_tokens=0 if window is None else 1)
            ids = batch.segment_ids
            heads = attention(q, k, v, spec, q_segment_ids=ids, kv_segment_ids=ids, implementation="reference")
            said.append(heads)
            if clean is not None and patch is not None and patch[0] == layer:
                group = q.shape[2] // k.shape[2]
                own = slice(patch[1] * group, (patch[1] + 1) * group)
                heads = heads.at[:, :, own].set(clean[layer][:, :, own])
            x, _ = block.after_attention(stream.x, block.attention.output(heads, read), row, None)
            stream = Stream(x)
        return stream.x, said

    _, clean = run(None)
    hidden, _ = run(WINDOW.keys, clean)
    logits = jax.nn.log_softmax(model.logits(model.norm(hidden)))  # [B, T, V]
    rows = np.arange(len(batch.tokens))[:, None]
    own = -np.asarray(logits)[rows, np.asarray(batch.queries), np.asarray(batch.labels)]
    weights = np.asarray(batch.weights)
    return (own * weights).sum(1) / weights.sum(1)


def test_scores_are_those_of_patched_passes():
    model = Decoder(CONFIG, AttentionPattern((FULL,) * 2), rngs=nnx.Rngs(0))
    asked = examples(3)
    got = patching_scores(model, asked, WINDOW, batch_size=2)  # a row too many
    expected = np.zeros((2, 2))
    for index, batch in answer_batches(asked, 2):
        windowed = losses(model, batch)
        for place in np.ndindex(2, 2):
            expected[place] += (windowed - losses(model, batch, place))[: len(index)].sum() / 3
    assert_close(got.astype(np.float32), expected.astype(np.float32), "float32")
    assert np.abs(expected).min() > 1e-3


def test_the_gradient_is_the_scores_to_first_order():
    """Where patches change little: heads whose outputs count little have scores that are their own first order."""
    model = Decoder(CONFIG, AttentionPattern((FULL,) * 2), rngs=nnx.Rngs(0))
    kernel = model.layers.attention.o_proj.kernel
    kernel[...] = kernel[...] * 1e-3
    exact, slope = (patching_scores(model, examples(3), WINDOW, batch_size=2, by_gradient=g) for g in (False, True))
    np.testing.assert_allclose(slope, exact, rtol=0.02, atol=0.02 * np.abs(exact).max())
    assert np.ptp(exact) > 1e-5


def test_layers_that_differ_are_refused():
    layers = TWO_SHAPES.num_hidden_layers
    model = Decoder(TWO_SHAPES, AttentionPattern((FULL,) * layers), rngs=nnx.Rngs(0))
    with pytest.raises(ConfigError, match="layers"):
        patching_scores(model, examples(1), WINDOW)
