"""Norms of heads whose gradients a kernel computes: a model's gradients, and which models have them."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from kernels.tolerances import assert_close
from tiny_models import SOFTMAX, make

from swa_jax.model import attention
from swa_jax.model.decoder import Decoder
from swa_jax.model.head_norm import kernel_serves
from swa_jax.model.lora import LoraConfig, with_lora

WIDE = dataclasses.replace(SOFTMAX, head_dim=128, num_hidden_layers=2)


@pytest.mark.parametrize(
    "change", [{}, {"norm_unit_offset": True}, pytest.param({"lora": 3}, marks=pytest.mark.slow)], ids=str
)
def test_a_model_with_the_kernel_has_the_gradients_of_one_without(monkeypatch, change):
    lora = change.pop("lora", None)
    model = Decoder(dataclasses.replace(WIDE, **change), make("wF"), rngs=nnx.Rngs(0))
    if lora:
        model = with_lora(model, LoraConfig(lora), nnx.Rngs(1))
    graph, weights = nnx.split(model)
    # Zeros at first, so that what comes behind them would have no gradient.
    weights = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape, x.dtype), weights)
    tokens = jnp.asarray(np.random.default_rng(0).integers(61, size=(2, 128)))

    def gradients(weights):
        hidden, *_ = nnx.merge(graph, weights).features(tokens, segment_ids=jnp.ones_like(tokens))
        return (hidden**2).mean()

    expected = jax.jit(jax.grad(gradients))(weights)
    monkeypatch.setattr(attention, "kernel_serves", lambda *_: True)
    found = jax.jit(lambda weights: jax.grad(gradients)(weights))
    assert str(jax.make_jaxpr(found)(weights)).count("name=norm_gradient") == 2  # queries and keys
    assert_close(found(weights), expected, "float32", gradient=True)


def test_what_the_kernel_serves():
    four = types.SimpleNamespace(size=lambda dimension: {"sequence": 4}[dimension])
    for change, length, partition, implementation, served in (
        ({}, 512, None, "tpu", True),
        ({}, 512, four, "tpu", True),
        ({}, 256, four, "tpu", False),
        ({}, 512, None, "xla", False),
        ({}, 512, None, None, False),  # no TPU is here
        ({"head_dim": 64}, 512, None, "tpu", False),
        ({"qk_norm": False}, 512, None, "tpu", False),
        ({"qk_norm_over": "projection"}, 512, None, "tpu", False),
        ({"norm_type": "layer"}, 512, None, "tpu", False),
    ):
        config = dataclasses.replace(WIDE, **change)
        assert kernel_serves(config, length, partition, implementation) == served, (change, length)
