"""Learned gates: open and shut they are full and window attention."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from kernels.tolerances import assert_close
from tiny_models import MIXED, SANDWICH, SOFTMAX

from swa_jax.evaluate import Example
from swa_jax.evaluate.nll import answer_batches, score_answers
from swa_jax.model.decoder import Decoder
from swa_jax.model.layer_types import WINDOW
from swa_jax.model.pattern import AttentionPattern
from swa_jax.model.window import Window
from swa_jax.select import gates as gates_module
from swa_jax.select.gates import GATE, gate_gradient, gate_logits, gated_loss
from swa_jax.select.heads import head_pattern

WINDOWED = AttentionPattern((WINDOW,) * 4, 4, 1)


@functools.partial(jax.jit, static_argnames="graph")
def loss_of(graph, weights, gates, batch, through=None):
    """`gated_loss`, compiled once for a model and a shape."""
    return gated_loss(nnx.merge(graph, weights), gates, batch, through=through)


def examples(vocab, count=3):
    rng = np.random.default_rng(0)
    return [Example(rng.integers(vocab, size=20 + i).tolist(), [1, 2], []) for i in range(count)]


@pytest.mark.parametrize(
    ("config", "decode"),
    [
        (SOFTMAX, True),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((SOFTMAX, False), (MIXED, True), (SANDWICH, True))),
    ],
)
def test_open_and_shut_gates_are_full_and_window_attention(config, decode):
    windowed = dataclasses.replace(WINDOWED, full_attention_decode=decode)
    model = Decoder(config, windowed, rngs=nnx.Rngs(0))
    graph, weights = nnx.split(model)
    asked = examples(config.vocab_size)
    ((index, batch),) = answer_batches(asked, 4, windowed.window)
    full = np.zeros((4, 2), bool)
    full[1, 0] = full[2] = True
    for mask in (np.ones((4, 2), bool), np.zeros((4, 2), bool), full):
        got = loss_of(graph, weights, mask.astype(np.float32), batch)[: len(index)]
        pattern = head_pattern(mask, Window(4, 1, decode))
        expected = score_answers(model, asked, batch_size=4, pattern=pattern).nll[index]
        assert_close(got, expected.astype(np.float32), "float32")


def losses(graph, weights, full, batches, gates):
    """Of all examples, with these gates where nothing is full."""
    gates = np.where(full, 1, gates).astype(np.float32)
    return sum(float(loss_of(graph, weights, gates, batch)[: len(index)].sum()) for index, batch in batches)


@pytest.mark.parametrize("config", [SOFTMAX, pytest.param(MIXED, marks=pytest.mark.slow)])
def test_the_gradient_of_gates_is_that_of_the_loss(config, monkeypatch):
    """Against differences of the loss. Rows that fill up a batch do not count, and what is full has none."""
    config = dataclasses.replace(config, initializer_range=0.5)
    model = Decoder(config, WINDOWED, rngs=nnx.Rngs(0))
    batches = list(answer_batches(examples(config.vocab_size), 2))  # a row too many
    graph, weights = nnx.split(model)
    full = np.zeros((4, 2), bool)
    full[2, 0] = True
    # Gradients flow through the full attention of the layers that are in `full`, here of all.
    real = gates_module.gated_loss
    monkeypatch.setattr(gates_module, "gated_loss", lambda *a, through, **k: real(*a, through=None, **k))
    got = gate_gradient(graph, weights, batches, full)
    assert got[2, 0] == 0
    step = 0.002  # a larger one sends tokens to other experts
    for head in [(0, 0), (2, 1), (3, 0)]:
        other = np.zeros((4, 2))
        other[head] = step
        less, more = (losses(graph, weights, full, batches, GATE + sign * other) for sign in (-1, 1))
        assert got[head] == pytest.approx((less - more) / (2 * step), rel=0.02, abs=2e-3)
        assert abs(got[head]) > 4e-3


def test_gradients_flow_through_full_attention_where_they_are_let():
    model = Decoder(dataclasses.replace(SOFTMAX, initializer_range=0.5), WINDOWED, rngs=nnx.Rngs(0))
    ((_, batch),) = answer_batches(examples(SOFTMAX.vocab_size), 4)

    split = nnx.split(model)
    slope = jax.jit(jax.grad(lambda gates, through: loss_of(*split, gates, batch, through).sum()))

    def gradient(through):
        return np.asarray(slope(jnp.full((4, 2), GATE), jnp.array(through)))

    whole, none, third = gradient([True] * 4), gradient([False] * 4), gradient([False, False, True, False])
    np.testing.assert_allclose(none[3], whole[3], rtol=1e-4)  # nothing lies above it
    assert np.abs(none[:3] - whole[:3]).max() > 1e-3
    np.testing.assert_allclose(third[2], none[2], rtol=1e-4)
    assert np.abs(third[:2] - none[:2]).max() > 1e-4


def test_the_noise_is_drawn_by_the_seed():
    model = Decoder(dataclasses.replace(SOFTMAX, num_hidden_layers=1), WINDOWED_ONE, rngs=nnx.Rngs(0))
    runs = [gate_logits(model, examples(61), Window(4), full_share=0.5, steps=3, seed=seed) for seed in (0, 0, 1)]
    np.testing.assert_array_equal(runs[0], runs[1])
    assert np.abs(runs[0] - runs[2]).max() > 1e-3


def test_what_fills_up_a_batch_does_not_count():
    """Of five examples in batches of three, the last of two is there twice."""
    model = Decoder(SOFTMAX, WINDOWED, rngs=nnx.Rngs(0))
    asked = examples(61, 5)
    (_, (index, filled)), ((_, alone),) = (
        list(answer_batches(some, size, Window(4))) for some, size in ((asked, 3), (asked[3:], 2))
    )
    assert index.tolist() == [3, 4]
    logits, key, (graph, weights) = jnp.zeros((4, 2)), jax.random.key(0), nnx.split(model)
    got, expected = (
        gates_module._gradient(logits, graph, weights, batch, counts, jnp.array(0.5), jnp.array(0.0), key)[0]
        for batch, counts in ((filled, gates_module.real_rows(index, filled)), (alone, jnp.ones(2)))
    )
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


WINDOWED_ONE = AttentionPattern((WINDOW,), 4)
