"""LightTransfer: window the layers whose last queries attend to sink tokens and recent keys anyway.

Source: LightTransfer (arXiv 2410.13846) as the papers on SWAA and NLL-guided selection compare with it: a layer's lazy
ratio is the attention mass of the prompt's last queries on the first and the most recent tokens, the mean over
queries and heads, under full attention. Lazy layers are windowed. SWAA looks at 64 queries in place of 32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from swa_jax.base.errors import ConfigError
from swa_jax.evaluate.examples import Example
from swa_jax.evaluate.nll import answer_batches
from swa_jax.model.decoder import Decoder
from swa_jax.select.attention_rows import Heads, logits_of
from swa_jax.select.static import check_softmax, layer_statistics
from swa_jax.select.work import count_pass

LAST_QUERIES, SINK_TOKENS, RECENT_KEYS = 32, 4, 1020


def lazy_ratios(
    model: Decoder,
    examples: Sequence[Example],
    *,
    last_queries: int = LAST_QUERIES,
    num_sink_tokens: int = SINK_TOKENS,
    recent_keys: int = RECENT_KEYS,
    batch_size: int = 8,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> np.ndarray:
    """The lazy ratio of every layer for each example, from one pass under full attention: [N, L] f64, from 0 to 1.

    Larger means that full attention is needed less. Only the prompts of the examples are used.

    Args:
      last_queries: how many last queries of a prompt are looked at; all of a shorter prompt.
      num_sink_tokens: how many first keys of the prompt count as near.
      recent_keys: how many keys up to the query's own count as near, its own included.
      progress: called with (batches done, batches in all).

    Raises:
      ConfigError: a number out of range; a model whose attention is not softmax; no examples, or one with an empty
        prompt or answer.
    """
    for name, value, least in (
        ("last_queries", last_queries, 1),
        ("num_sink_tokens", num_sink_tokens, 0),
        ("recent_keys", recent_keys, 1),
    ):
        if value < least:
            raise ConfigError(f"{name} must be at least {least}, got {value}")
    check_softmax(model.config, "LightTransfer scores layers")
    graph, weights = nnx.split(model)
    batches = list(answer_batches(examples, batch_size))
    ratios = np.empty((len(examples), model.config.num_hidden_layers))
    for done, (index, batch) in enumerate(batches):
        prompt = jnp.arange(batch.tokens.shape[1]) <= batch.queries[:, :1]  # the first label's query is its last token
        count_pass(batch.tokens)
        statistic = (lazy_ratio, (last_queries, num_sink_tokens, recent_keys))
        values = layer_statistics(graph, weights, batch.tokens, prompt.astype(jnp.int32), statistic)
        ratios[index] = np.asarray(values, np.float64).mean(-1).T[: len(index)]  # [L, B, H] -> [B, L]
        progress(done + 1, len(batches))
    return ratios


def lazy_ratio(heads: Heads, settings: tuple[int, int, int]) -> jax.Array:
    """The ratio of every head [B, H] f32.

    `settings`: last queries, sink tokens, recent keys. One query at a time, so that memory is O(B H T).
    """
    last, sinks, recent = settings
    q, lengths = heads.q, heads.lengths
    keys = jnp.arange(q.shape[1])

    def one_query(back: jax.Array) -> jax.Array:
        position = lengths - 1 - back  # [B], negative before the start of a short prompt
        row = jnp.take_along_axis(q, jnp.maximum(position, 0)[:, None, None, None], axis=1)  # [B, 1, H, D]
        lag = jnp.maximum(position, 0)[:, None] - keys  # [B, T]
        weights = jax.nn.softmax(logits_of(heads, row, lag[:, None]), axis=-1)
        near = (lag < recent) | (keys < sinks)
        mass = jnp.where(near[:, None, None, None], weights, 0).sum(-1)[..., 0]  # [B, K, G]
        return jnp.where(position[:, None] >= 0, mass.reshape(q.shape[0], -1), 0)  # [B, H]

    total = jax.lax.map(one_query, jnp.arange(last)).sum(0)
    return total / jnp.minimum(lengths, last)[:, None]
