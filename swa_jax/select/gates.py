"""Learned gates: a number for each KV head, or layer, that mixes full and window attention, trained to be 0 or 1.

As in work of 2026 on hybrids (ConSA, arXiv:2606.18056; FlashMorph, arXiv:2606.30562): the model's weights stay, and
gradients of the answers' loss say which heads need full attention, all heads at once. With o_full and o_window what a
head says under each,

    o = o_window + g (o_full - o_window),    g = min(1, max(0, 1.2 sigmoid((a + log u - log(1 - u)) / b) - 0.1)),

u uniform in (0, 1): the hard concrete distribution (Louizos, Welling, Kingma: "Learning Sparse Neural Networks through
L0 Regularization", 2018), whose gates are often just 0 or 1, so that heads are judged as they will run. The budget is
a constraint, that the expected share of open gates is the share asked for, kept by an augmented Lagrangian (ConSA):

    loss + m c + (r / 2) c^2,    c = share of open gates - share asked for,    m grows by c after each step.

The heads, or layers, of largest a stay full.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from swa_jax.evaluate.examples import Example
from swa_jax.evaluate.nll import AnswerBatch, answer_batches, answer_loss
from swa_jax.model.attention import layer_data, own_or
from swa_jax.model.block import Block, Stream
from swa_jax.model.decoder import Decoder
from swa_jax.model.layer_types import FULL, WINDOW
from swa_jax.model.mesh_attention import attention_on_mesh
from swa_jax.model.pattern import AttentionPattern
from swa_jax.model.sharding import Partition
from swa_jax.model.window import Window
from swa_jax.select.work import count_pass

LOW, HIGH = -0.1, 1.1  # gates are stretched to here and cut at 0 and 1
TEMPERATURE = 2 / 3  # b
START = 2.0  # of a: nearly full attention
LEARNING_RATE = 0.2
PENALTY = 40.0  # r
GATE = 0.25  # of the heads that `gate_gradient` ranks


def gate_logits(
    model: Decoder,
    examples: Sequence[Example],
    window: Window,
    *,
    full_share: float,
    whole_layers: bool = False,
    steps: int = 200,
    batch_size: int = 8,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> np.ndarray:
    """a of every KV head [L, K] float64, or of every layer [L, 1]; the larger, the more full attention is needed.

    Args:
      full_share: of the KV heads, or layers, that will stay full.
      steps: of Adam, each on one batch of examples, in turn.
      seed: of the gates' noise.

    Raises:
      ConfigError: no examples, or one with an empty prompt or answer.
    """
    config = model.config
    pattern = AttentionPattern.everywhere(WINDOW, config, **window.fields)
    graph, weights = nnx.split(model.with_pattern(pattern))
    batches = list(answer_batches(examples, batch_size, window))
    optimizer = optax.adam(LEARNING_RATE)
    logits = jnp.full((config.num_hidden_layers, 1 if whole_layers else config.common_kv_heads), START)
    state, multiplier = optimizer.init(logits), jnp.zeros(())
    for step in range(steps):
        key = jax.random.fold_in(jax.random.key(seed), step)
        index, batch = batches[step % len(batches)]
        counts = real_rows(index, batch) * len(batches) / len(examples)  # each example once in a round, in any batches
        count_pass(batch.tokens, back=1, logits=3 * batch.labels.size)
        gradient, excess = _gradient(logits, graph, weights, batch, counts, full_share, multiplier, key)
        multiplier += excess
        updates, state = optimizer.update(gradient, state)
        logits = optax.apply_updates(logits, updates)
        progress(step + 1, steps)
    return np.asarray(logits, np.float64)


def real_rows(index: np.ndarray, batch: AnswerBatch) -> np.ndarray:
    """[B] f32: 1 for an example, 0 for what fills up a batch."""
    return (np.arange(len(batch.tokens)) < len(index)).astype(np.float32)


@functools.partial(jax.jit, static_argnames=("graph",))
def _gradient(
    logits: jax.Array,
    graph: Any,
    weights: nnx.State,
    batch: AnswerBatch,
    counts: jax.Array,
    full_share: jax.Array,
    multiplier: jax.Array,
    key: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The objective's gradient by the logits, and c."""

    def objective(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        model: Decoder = nnx.merge(graph, weights)
        noise = jax.random.logistic(key, logits.shape)
        gates = jnp.clip(LOW + (HIGH - LOW) * jax.nn.sigmoid((logits + noise) / TEMPERATURE), 0, 1)
        gates = jnp.broadcast_to(gates, (len(gates), model.config.most_kv_heads))
        excess = jax.nn.sigmoid(logits - TEMPERATURE * math.log(-LOW / HIGH)).mean() - full_share
        loss = (gated_loss(model, gates, batch) * counts).sum()
        return loss + multiplier * excess + PENALTY / 2 * jnp.square(excess), excess

    return jax.grad(objective, has_aux=True)(logits)


def gated_loss(
    model: Decoder,
    gates: jax.Array,
    batch: AnswerBatch,
    *,
    through: jax.Array | None = None,
    clean: jax.Array | None = None,
    partition: Partition | None = None,
) -> jax.Array:
    """The mean NLL of each example's answer [B] f32, where heads mix full and window attention by `gates` [L, K].

    The window is that of the model's pattern. A gate of 1 is full attention, one of 0 a window.

    Args:
      gates: K is the most KV heads that a layer has.
      through: [L] bool, the layers through whose full attention gradients flow to the layers below; None is all of
        them. In the others they flow through the windows alone, which costs a third less.
      clean: what heads said in a run with full attention (`full_heads`), to be mixed in place of what they would say
        here.
      partition: the mesh that weights and examples lie on.
    """
    stream, _ = _through_gates(model, gates, batch, through=through, clean=clean, partition=partition)
    hidden = jnp.take_along_axis(model.norm(stream.x), batch.queries[:, :, None], axis=1)  # [B, A, d]
    return answer_loss(model, hidden, batch)[0]


def full_heads(model: Decoder, batch: AnswerBatch) -> jax.Array:
    """What each query head says in a run with full attention, before the output projection: [L, B, T, H, D]."""
    everything = jnp.ones((model.config.num_hidden_layers, model.config.most_kv_heads))
    heads = _through_gates(model, everything, batch, keep=True)[1]
    assert heads is not None
    return heads


def _through_gates(
    model: Decoder,
    gates: jax.Array,
    batch: AnswerBatch,
    *,
    through: jax.Array | None = None,
    clean: jax.Array | None = None,
    keep: bool = False,
    partition: Partition | None = None,
) -> tuple[Stream, jax.Array | None]:
    """`gated_loss` up to the last layer, and, to `keep`, what each layer's heads say with full attention."""
    config = model.config
    data = layer_data(AttentionPattern.everywhere(FULL, config), config, (FULL,))
    context = model.context(batch.tokens, batch.segment_ids, full_from=batch.full_from, partition=partition)

    def layer(stream: Stream, block: Block, scanned: tuple) -> tuple[Stream, jax.Array | None]:
        row, open_, whole, said = scanned
        if block.gated_delta is not None:  # it has no heads that attend
            assert not keep
            return block(stream, row, context)[0], None
        read = block.attention_input(stream.x)
        q, *made = block.attention.qkv(read, row, context)
        k, v = own_or(stream.read_by(block), *made)
        attend = functools.partial(attention_on_mesh, (q, None), k, v, partition=partition)
        heads, packing, static = block.attention.per_head(), context.packing, context.static

        def full() -> jax.Array:
            return attend(heads, packing._replace(full_from=None), static._replace(spec=static.spec.full))[0]

        windowed = attend(heads, packing, static)[0]
        if said is not None:
            other = said
        else:
            other = full() if whole is None else jax.lax.cond(whole, full, lambda: jax.lax.stop_gradient(full()))
        open_ = jnp.repeat(open_[: k.shape[2]], q.shape[2] // k.shape[2])[:, None].astype(q.dtype)  # [H, 1]
        mixed = windowed + open_ * (other - windowed)
        x, _ = block.after_attention(stream.x, block.attention.output(mixed, read), row, partition)
        return stream.behind(block, x, *made), other if keep else None

    stream, data = model.begin(batch.tokens, data, partition)
    return model.scan(layer, stream, (data, gates, through, clean), wrap=jax.checkpoint)


def gate_gradient(
    graph: Any,
    weights: nnx.State,
    batches: Sequence[tuple[np.ndarray, AnswerBatch]],
    full: np.ndarray,
    partition: Partition | None = None,
) -> np.ndarray:
    """How fast the answers' loss falls as each KV head is opened, nats a token: [L, K] f64, a sum over examples.

    Heads in `full` [L, K] bool are full, and have 0; the others mix a quarter (`GATE`) of full attention into their
    windows, so that heads that help only beside others are seen.

    Args:
      graph, weights: of a decoder whose pattern has the window and the sink tokens.
      batches: as `answer_batches` gives them; rows that fill up a batch do not count.
    """
    total = np.zeros(full.shape)
    gates, through = np.where(full, 1.0, GATE).astype(np.float32), full.any(1)
    for index, batch in batches:
        gradient = _loss_gradient(gates, through, graph, weights, batch, real_rows(index, batch), partition)
        total -= np.asarray(gradient, np.float64)
    return np.where(full, 0.0, total)


@functools.partial(jax.jit, static_argnames=("graph", "partition"))
def _loss_gradient(
    gates: jax.Array,
    through: jax.Array,
    graph: Any,
    weights: nnx.State,
    batch: AnswerBatch,
    counted: jax.Array,
    partition: Partition | None,
) -> jax.Array:
    def loss(gates: jax.Array) -> jax.Array:
        model = nnx.merge(graph, weights)
        return jnp.sum(gated_loss(model, gates, batch, through=through, partition=partition) * counted)

    return jax.grad(loss)(gates)
