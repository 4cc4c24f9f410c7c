"""What windowing one layer or one KV head, all else full, does to what the model says: the KL to the full model.

As in work that turns pretrained models into hybrids layer by layer (KL-guided layer selection, 2025): a layer whose
replacement leaves the output distribution as it was needs no full attention. Unlike `nll` and BOSCH it starts from full
attention and reads no answer: any text will do, and a head that helps only together with others is seen.
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

from swa_jax.evaluate.examples import Example
from swa_jax.evaluate.nll import AnswerBatch, answer_batches
from swa_jax.model.attention import LayerData, layer_data
from swa_jax.model.decoder import Decoder
from swa_jax.model.layer_types import HYBRID
from swa_jax.model.loss import TeacherStates
from swa_jax.model.pattern import AttentionPattern
from swa_jax.model.window import Window
from swa_jax.select.work import count_pass


def kl_scores(
    model: Decoder,
    examples: Sequence[Example],
    window: Window,
    *,
    whole_layers: bool = False,
    batch_size: int = 8,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> np.ndarray:
    """Mean KL(full || one windowed), in nats a token, at the answers' tokens: of each KV head [L, K] float64.

    Larger means that full attention is needed more.

    Args:
      whole_layers: window whole layers, one at a time; all heads of a layer then have the layer's score.
      progress: called with (passes done, passes in all).

    Raises:
      ConfigError: no examples, or one with an empty prompt or answer.
    """
    config = model.config
    layers, heads = config.num_hidden_layers, config.most_kv_heads if whole_layers else config.common_kv_heads
    kinds = (HYBRID,)
    pattern = AttentionPattern(kinds * layers, **window.fields)
    graph, weights = nnx.split(model.with_pattern(pattern))

    def data_of(full: np.ndarray) -> LayerData:
        shapes = zip(full, config.head_shapes, strict=True)
        rows = tuple(tuple(np.flatnonzero(row[:count]).tolist()) for row, (count, _) in shapes)
        return layer_data(dataclasses.replace(pattern, full_kv_heads=rows), config, kinds)

    masks = []
    for turned in np.ndindex(layers) if whole_layers else np.ndindex(layers, heads):
        full = np.ones((layers, heads), bool)
        full[turned] = False
        masks.append(full)
    batches = list(answer_batches(examples, batch_size, window))
    sums, done = np.zeros(len(masks)), 0
    for index, batch in batches:
        count_pass(batch.tokens, 1 + len(masks), logits=2 * len(masks) * batch.labels.size)
        everything = _features(graph, weights, batch, data_of(np.ones((layers, heads), bool)))
        for i, full in enumerate(masks):
            kl = _kl(graph, weights, batch, data_of(full), everything)
            sums[i] += np.asarray(kl, np.float64)[: len(index)].sum()
            done += 1
            progress(done, len(batches) * len(masks))
    scores = (sums / len(examples)).reshape(layers, -1)
    return np.broadcast_to(scores, (layers, heads)).copy()


@functools.partial(jax.jit, static_argnames="graph")
def _features(graph: Any, weights: nnx.State, batch: AnswerBatch, data: LayerData) -> jax.Array:
    """The hidden states that predict the answers' tokens: [B, A, d]."""
    hidden, *_ = nnx.merge(graph, weights).features(
        batch.tokens, segment_ids=batch.segment_ids, full_from=batch.full_from, data=data
    )
    return jnp.take_along_axis(hidden, batch.queries[:, :, None], axis=1)


@functools.partial(jax.jit, static_argnames="graph")
def _kl(graph: Any, weights: nnx.State, batch: AnswerBatch, data: LayerData, everything: jax.Array) -> jax.Array:
    """The mean KL of each example's answer tokens to what `everything` [B, A, d] predicts: [B] f32."""
    model: Decoder = nnx.merge(graph, weights)
    hidden = _features(graph, weights, batch, data)
    said = TeacherStates(everything, model.head(), batch.weights, 1.0)  # whose logits exist for a chunk at a time
    kl = model.token_loss(hidden, batch.labels, batch.weights, teacher=said).divergence
    assert kl is not None  # there is a teacher
    return kl.sum(1) / batch.weights.sum(1)
