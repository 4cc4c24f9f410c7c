"""Activation patching: what a head says under full attention, put into a run with windows, one head at a time.

HydraHead (arXiv:2606.20097) chooses by such interventions the heads that keep full attention. The run that is patched
has windows everywhere. Into it goes what one head said in a run with full attention, all else of that run left out:
its score is by how much the answers' loss falls. So a head counts also where its full attention has nothing to find
unless a head below has looked before, which opening heads one at a time (`select.nll`) cannot see.

One gradient gives the first-order form of all scores at once (attribution patching, Nanda 2023): with o_full what a
head said in the full run and o_window what it says in the windowed one, -<dLoss / d o_window, o_full - o_window>.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from swa_jax.base.errors import ConfigError
from swa_jax.evaluate.examples import Example
from swa_jax.evaluate.nll import AnswerBatch, answer_batches
from swa_jax.model.decoder import Decoder
from swa_jax.model.layer_types import WINDOW
from swa_jax.model.pattern import AttentionPattern
from swa_jax.model.window import Window
from swa_jax.select.gates import full_heads, gated_loss, real_rows
from swa_jax.select.work import count_pass


def patching_scores(
    model: Decoder,
    examples: Sequence[Example],
    window: Window,
    *,
    by_gradient: bool = False,
    batch_size: int = 8,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> np.ndarray:
    """How far each KV head's patch lowers the answers' loss, nats a token: [L, K] float64, the mean over examples.

    Args:
      by_gradient: the first-order form, two passes and a gradient; else a pass for each head.
      progress: called with (passes done, passes in all).

    Raises:
      ConfigError: no examples, or one with an empty prompt or answer; layers whose heads are not all alike.
    """
    config = model.config
    shape = config.num_hidden_layers, config.common_kv_heads
    if len(shapes := {*zip(config.query_heads, config.head_shapes, strict=True)}) > 1:
        raise ConfigError(f"patching goes through layers whose heads are all alike, the model has {len(shapes)} kinds")
    pattern = AttentionPattern((WINDOW,) * shape[0], **window.fields)
    graph, weights = nnx.split(model.with_pattern(pattern))
    batches = list(answer_batches(examples, batch_size, window))
    total, done = np.zeros(shape), 0
    passes = len(batches) * (1 if by_gradient else 1 + total.size)

    def advance() -> None:
        nonlocal done
        done += 1
        progress(done, passes)

    for index, batch in batches:
        counted = real_rows(index, batch)
        clean = _full_heads(graph, weights, batch)
        made, scored = (2, 3) if by_gradient else (2 + total.size, 1 + total.size)
        count_pass(batch.tokens, made, back=by_gradient, logits=scored * batch.labels.size)
        if by_gradient:
            total -= np.asarray(_slope(np.zeros(shape, np.float32), graph, weights, batch, counted, clean), np.float64)
            advance()
            continue
        patched = functools.partial(_loss, graph=graph, weights=weights, batch=batch, counted=counted, clean=clean)
        windowed = float(patched(np.zeros(shape, np.float32)))
        advance()
        for place in np.ndindex(shape):
            gates = np.zeros(shape, np.float32)
            gates[place] = 1
            total[place] += windowed - float(patched(gates))
            advance()
    return total / len(examples)


_full_heads = jax.jit(
    lambda graph, weights, batch: full_heads(nnx.merge(graph, weights), batch), static_argnames="graph"
)


@functools.partial(jax.jit, static_argnames="graph")
def _loss(
    gates: jax.Array, graph: Any, weights: nnx.State, batch: AnswerBatch, counted: jax.Array, clean: jax.Array
) -> jax.Array:
    """The sum of the examples' losses, with the heads whose gates [L, K] are 1 patched."""
    return jnp.sum(gated_loss(nnx.merge(graph, weights), gates, batch, clean=clean) * counted)


_slope = jax.jit(jax.grad(_loss), static_argnames="graph")
