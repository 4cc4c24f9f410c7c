"""What the answers' NLL becomes when one windowed layer is made full, for every such layer of one batch.

Two ways with the same results. `passes` runs the whole model again for each layer. `reuse` goes up the model once:
making layer l full leaves the layers below it as they are, so that a toggled stream starts from the base stream at
its own layer. With every one of L layers toggled that is L (L + 3) / 2 layer evaluations in place of L (L + 1), and
`toggles_at_once` + 1 hidden states [B, T, d] in memory, twice over while a group of streams is formed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from swa_jax.evaluate.nll import AnswerBatch, answer_loss, score_batch
from swa_jax.model.attention import LayerData
from swa_jax.model.block import Stream
from swa_jax.model.decoder import Decoder
from swa_jax.model.layer_types import FULL, WINDOW
from swa_jax.model.sharding import Partition, constrain

KINDS = (FULL, WINDOW)


def passes(
    graph: Any,
    weights: nnx.State,
    batch: AnswerBatch,
    data: LayerData,
    toggles: Sequence[int],
    *,
    partition: Partition | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> np.ndarray:
    """Answer NLL of each row [1 + toggles, B] f64: as planned, then with each of `toggles` made full.

    Args:
      graph, weights: of a decoder whose pattern has the window and the sink tokens.
      data: which layers are full and which windowed, by `KINDS`.
      toggles: windowed layers, in ascending order.
      progress: called with how many of the 1 + toggles results are new.
    """
    nll = []
    for toggle in (None, *toggles):
        kind = data.kind if toggle is None else data.kind.at[toggle].set(KINDS.index(FULL))
        mean, _ = score_batch(graph, weights, batch, dataclasses.replace(data, kind=kind), partition)
        nll.append(np.asarray(mean, np.float64))
        progress(1)
    return np.stack(nll)


def reuse(
    graph: Any,
    weights: nnx.State,
    batch: AnswerBatch,
    data: LayerData,
    toggles: Sequence[int],
    *,
    toggles_at_once: int = 1,
    partition: Partition | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> np.ndarray:
    """As `passes`; `toggles_at_once` streams go through the layers as one batch of that many times the rows."""
    layers = len(data.kind)
    size = min(toggles_at_once, max(1, len(toggles)))
    groups = [list(toggles[i : i + size]) for i in range(0, len(toggles), size)] or [[]]
    x, at, nll = _embed(graph, weights, batch.tokens, partition), 0, []
    for number, group in enumerate(groups):
        # The base stream leaves a group above its last layer, and the last group at the top, where it is scored.
        stop = layers if number == len(groups) - 1 else group[-1] + 1
        padded = np.array(group + [layers] * (size - len(group)), np.int32)
        x, scored = _group(graph, weights, batch, x, data, at, stop, padded, partition)
        at, base = stop, np.asarray(scored[0], np.float64)
        nll += list(np.asarray(scored[1 : 1 + len(group)], np.float64))
        progress(len(group))
    progress(1)
    return np.stack([base, *nll])


@functools.partial(jax.jit, static_argnames=("graph", "partition"))
def _embed(graph: Any, weights: nnx.State, tokens: jax.Array, partition: Partition | None) -> jax.Array:
    return nnx.merge(graph, weights).embed(tokens, partition)


@functools.partial(jax.jit, static_argnames=("graph", "partition"), donate_argnames="x")
def _group(
    graph: Any,
    weights: nnx.State,
    batch: AnswerBatch,
    x: jax.Array,
    data: LayerData,
    first: jax.Array,
    stop: jax.Array,
    toggles: jax.Array,
    partition: Partition | None,
) -> tuple[jax.Array, jax.Array]:
    """The base stream [B, T, d] from layer `first` to `stop`, and the streams that `toggles` [G] start on the way.

    Layers are data, so that one compilation serves every group.

    Args:
      toggles: in ascending order, all in [first, stop); the number of layers stands for none. Where one is missing,
        `stop` must be the number of layers.

    Returns:
      The base stream at `stop`, and the NLL of each row [1 + G, B]: of the base (of use at the top only), then of
      the toggled streams.
    """
    model: Decoder = nnx.merge(graph, weights)
    block_graph, stacked = nnx.split(model.layers)
    layers, size, (rows, length, width) = len(data.kind), len(toggles), x.shape
    # One stream at a time below `stop`, where they start one after the other; all together above it.
    one, all_of_them = (
        model.context(
            jnp.repeat(batch.tokens, times, axis=0),
            jnp.repeat(batch.segment_ids, times, axis=0),
            full_from=jnp.repeat(batch.full_from, times, axis=0),
            partition=partition,
        )
        for times in (1, size)
    )

    def layer(x: jax.Array, index: jax.Array, kind: jax.Array | int, context: Any = one) -> jax.Array:
        take_own = lambda w: lax.dynamic_index_in_dim(w, index, keepdims=False)  # noqa: E731
        own, row = jax.tree.map(take_own, (stacked, data))
        return nnx.merge(block_graph, own)(Stream(x), dataclasses.replace(row, kind=jnp.asarray(kind)), context)[0].x

    put = functools.partial(_put, partition)

    def climb(index: jax.Array, streams: jax.Array) -> jax.Array:
        started = jnp.sum(toggles < index)
        streams = lax.cond(
            jnp.any(toggles == index),
            lambda s: put(s, started + 1, layer(_take(s, 0), index, KINDS.index(FULL))),
            lambda s: s,
            streams,
        )
        step = lambda slot, s: put(s, slot, layer(_take(s, slot), index, data.kind[index]))  # noqa: E731
        return lax.fori_loop(0, started + 1, step, streams)

    streams = put(jnp.zeros((rows, 1 + size, length, width), x.dtype), 0, x)  # the base in slot 0
    streams = lax.fori_loop(first, stop, climb, streams)
    base, toggled = streams[:, 0], streams[:, 1:].reshape(rows * size, length, width)
    toggled = lax.fori_loop(stop, layers, lambda index, x: layer(x, index, data.kind[index], all_of_them), toggled)

    score = functools.partial(_nll, model, batch)
    by_stream = jnp.moveaxis(toggled.reshape(rows, size, length, width), 1, 0)
    return base, jnp.concatenate([score(base)[None], lax.map(score, by_stream)])


def _take(streams: jax.Array, slot: jax.Array | int) -> jax.Array:
    return lax.dynamic_index_in_dim(streams, slot, axis=1, keepdims=False)


def _put(partition: Partition | None, streams: jax.Array, slot: jax.Array | int, x: jax.Array) -> jax.Array:
    streams = lax.dynamic_update_index_in_dim(streams, x, slot, axis=1)
    return constrain(streams, partition, "batch", None, "sequence", None)


def _nll(model: Decoder, batch: AnswerBatch, hidden: jax.Array) -> jax.Array:
    """Of each row's answer [B], by the last layer's output [B, T, d]."""
    hidden = jnp.take_along_axis(hidden, batch.queries[:, :, None], axis=1)  # [B, A, d]
    return answer_loss(model, model.norm(hidden), batch)[0]
