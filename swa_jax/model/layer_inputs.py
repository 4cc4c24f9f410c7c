"""Inputs of single layers: beside the residual stream, every layer reads a vector of its own of each token.

They come from a second embedding table and from the first one's output (Gemma 3n and 4: per-layer embeddings).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from swa_jax.model.config import ModelConfig
from swa_jax.model.layers import Norm, activated, drawn, linear
from swa_jax.model.sharding import Partition, constrain


class LayerInputs(nnx.Module):
    """What each layer reads of each token."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.embedding = drawn("layer_inputs.embedding", config, dtype, rngs)
        self.projection = linear("layer_inputs.projection", config, dtype, rngs)
        self.norm = Norm("layer_inputs.norm", config, dtype)
        self.config = config

    def __call__(self, tokens: jax.Array, x: jax.Array, partition: Partition | None = None) -> jax.Array:
        """tokens [B, T] int32 and their embeddings x [B, T, d] -> [L, B, T, P]."""
        config, width = self.config, self.config.hidden_size_per_layer_input
        table = constrain(self.embedding[...], partition, "vocab", None)
        own = table[tokens] * jnp.asarray(width**0.5, x.dtype)
        seen = self.projection(x) * jnp.asarray(config.hidden_size**-0.5, x.dtype)
        own, seen = (y.reshape(*tokens.shape, config.num_hidden_layers, width) for y in (own, seen))
        inputs = (self.norm(seen) + own) * jnp.asarray(2**-0.5, x.dtype)  # [B, T, L, P]
        return constrain(jnp.moveaxis(inputs, 2, 0), partition, None, "batch", "sequence", None)


class InputReader(nnx.Module):
    """How a layer adds its input to the residual stream: gated by the stream, projected, normed."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.gate = linear("layers.input_reader.gate", config, dtype, rngs)
        self.projection = linear("layers.input_reader.projection", config, dtype, rngs)
        self.norm = Norm("layers.input_reader.norm", config, dtype)
        self.config = config

    def __call__(self, x: jax.Array, inputs: jax.Array) -> jax.Array:
        """x [B, T, d], inputs [B, T, P] -> what is added to x."""
        return self.norm(self.projection(activated(self.gate(x), inputs, self.config)))
