"""Learned gates: open and shut they are full and window attention; trained, they find planted heads."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from kernels.tolerances import assert_close
from plants import FULL_HEADS, KV_HEADS, LAYERS, WINDOW_SIZE, Plant, placement
from tiny_models import MIXED, SANDWICH, SOFTMAX

from swa_jax.errors import ConfigError
from swa_jax.evaluate import Example
from swa_jax.evaluate.nll import answer_batches, score_answers
from swa_jax.model.decoder import Decoder
from swa_jax.model.layer_types import FULL, WINDOW
from swa_jax.model.pattern import AttentionPattern
from swa_jax.select.gates import gate_logits, gated_loss
from swa_jax.select.heads import head_pattern, window_most_local

WINDOWED = AttentionPattern((WINDOW,) * 4, 4, 1)


def examples(vocab, count=3):
    rng = np.random.default_rng(0)
    return [Example(rng.integers(vocab, size=20 + i).tolist(), [1, 2], []) for i in range(count)]


@pytest.mark.parametrize("config", [SOFTMAX, pytest.param(SANDWICH, marks=pytest.mark.slow)])
@pytest.mark.parametrize("decode", [False, True])
def test_open_and_shut_gates_are_full_and_window_attention(config, decode):
    windowed = dataclasses.replace(WINDOWED, full_attention_decode=decode)
    model = Decoder(config, windowed, rngs=nnx.Rngs(0))
    asked = examples(config.vocab_size)
    ((index, batch),) = answer_batches(asked, 4, decode)
    full = np.zeros((4, 2), bool)
    full[1, 0] = full[2] = True
    for mask in (np.ones((4, 2), bool), np.zeros((4, 2), bool), full):
        got = gated_loss(model, jnp.asarray(mask, jnp.float32), batch)[: len(index)]
        pattern = dataclasses.replace(head_pattern(mask, 4, 1, {}), full_attention_decode=decode)
        expected = score_answers(model.with_pattern(pattern), asked, batch_size=4).nll[index]
        assert_close(got, expected.astype(np.float32), "float32")


def test_models_whose_layers_differ_are_refused():
    model = Decoder(MIXED, AttentionPattern((FULL,) * 4), rngs=nnx.Rngs(0))
    with pytest.raises(ConfigError, match="mlp_layer_types differ"):
        gate_logits(model, examples(61), full_share=0.5, sliding_window=4)


def test_the_noise_is_drawn_by_the_seed():
    model = Decoder(dataclasses.replace(SOFTMAX, num_hidden_layers=1), WINDOWED_ONE, rngs=nnx.Rngs(0))
    runs = [
        gate_logits(model, examples(61), full_share=0.5, sliding_window=4, steps=3, seed=seed)
        for seed in (0, 0, 1)
    ]
    np.testing.assert_array_equal(runs[0], runs[1])
    assert np.abs(runs[0] - runs[2]).max() > 1e-3


WINDOWED_ONE = AttentionPattern((WINDOW,), 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["one a layer", *(pytest.param(n, marks=pytest.mark.long) for n in ("conjunctions", "redundant pairs"))],
)
def test_planted_heads_are_found(name):
    plant = Plant(placement(name, 0))
    share = FULL_HEADS / (LAYERS * KV_HEADS)
    logits = gate_logits(
        plant.model(), plant.examples(16), full_share=share, sliding_window=WINDOW_SIZE, batch_size=16
    )
    assert plant.hits(window_most_local(logits, 1 - share, larger_is_local=False)) >= 0.95
