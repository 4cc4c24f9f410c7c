"""The likeliest tokens at each place of a reply and their log-probabilities: one teacher-forced pass, no generation."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from swa_jax.base.errors import ConfigError
from swa_jax.model.decoder import Decoder
from swa_jax.model.generate import round_up
from swa_jax.model.sharding import Partition

CHUNK = 256  # reply tokens whose logits exist at one time


def top_logprobs(
    model: Decoder, prompt: Sequence[int], reply: Sequence[int], count: int, partition: Partition | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """What the model expects where each token of a reply [n] stands, given all tokens before it.

    Args:
      prompt: token ids, at least one.
      count: K, how many tokens of each place; below the size of the vocabulary.
      partition: the mesh on which the model's parameters lie.

    Returns:
      The K likeliest tokens [n, K] int32, likeliest first, and their log-probabilities [n, K] f32 in nats. Temperature,
      top-k and top-p change neither.

    Raises `ConfigError`: `count` is out of its range.
    """
    if not 0 < count < model.config.vocab_size:
        raise ConfigError(
            f"top log-probabilities must be 1 to {model.config.vocab_size - 1}, which is all but one of the "
            f"vocabulary, got {count}"
        )
    whole = [*prompt, *reply]
    size, places = round_up(len(whole)), -(-len(reply) // CHUNK) * CHUNK
    tokens = np.zeros((1, size), np.int32)
    tokens[0, : len(whole)] = whole
    graph, weights = nnx.split(model)
    arrays = jnp.asarray(tokens), jnp.int32(len(whole)), jnp.int32(len(prompt))
    one_row = None if partition is None else partition.of_one_row
    ids, values = _top_logprobs(graph, weights, *arrays, places=places, count=count, partition=one_row)
    return np.asarray(ids)[: len(reply)], np.asarray(values)[: len(reply)]


@functools.partial(jax.jit, static_argnames=("graph", "places", "count", "partition"))
def _top_logprobs(
    graph: Any,
    weights: nnx.State,
    tokens: jax.Array,
    length: jax.Array,
    boundary: jax.Array,
    *,
    places: int,
    count: int,
    partition: Partition | None,
) -> tuple[jax.Array, jax.Array]:
    """tokens [1, T] of which `length` are no padding, the reply from `boundary` on -> [places, K] each."""
    model: Decoder = nnx.merge(graph, weights)
    inside = (jnp.arange(tokens.shape[1]) < length).astype(jnp.int32)[None]  # [1, T]
    full_from = model.pattern.full_from(boundary[None])
    hidden, *_ = model.features(tokens, segment_ids=inside, full_from=full_from, partition=partition)
    # The token before the reply predicts its first one.
    predicting = jnp.minimum(boundary - 1 + jnp.arange(places), tokens.shape[1] - 1)
    chunks = hidden[0, predicting].reshape(-1, CHUNK, hidden.shape[-1])

    def one(chunk: jax.Array) -> tuple[jax.Array, jax.Array]:
        values, ids = jax.lax.top_k(jax.nn.log_softmax(model.logits(chunk), axis=-1), count)
        return ids.astype(jnp.int32), values

    ids, values = jax.lax.map(one, chunks)
    return ids.reshape(-1, count), values.reshape(-1, count)
