"""The log-probabilities that a model gives to the tokens of a few texts, under each reading of it.

Layer kinds, positions and rotary embeddings are data of one compiled program; another window or another configuration
is another program.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pallas_kernels import AttentionSpec
from swa_jax.checkpoint.readings import Reading
from swa_jax.model.attention import AttentionContext, LayerData, cast_parameters, layer_data, model_spec
from swa_jax.model.block import Block, Stream
from swa_jax.model.config import ModelConfig
from swa_jax.model.decoder import Decoder
from swa_jax.model.layer_types import FULL, LAYER_TYPES, SWITCH
from swa_jax.model.layers import RopeTables, query_scale, rope_tables
from swa_jax.model.pattern import AttentionPattern


class Texts(NamedTuple):
    """Token ids of P texts, the longest first, and the positions from which their next tokens are asked for."""

    tokens: list[list[int]]
    queries: list[list[int]]  # the last position of a text may be among them; it has no next token
    front: int = 0  # the token that a server may put in front, and pad with


class TokenScores(NamedTuple):
    log_probs: list[np.ndarray]  # [Q] for each text; 0 where there is no next token
    top: list[np.ndarray]  # [Q, 5] for each text, those of the likeliest tokens, falling


class Forward:
    """A model whose weights every reading uses."""

    def __init__(self, model: Decoder, kinds: set[str], top: int, advance: Callable[[], None] = lambda: None):
        """`kinds`: the layer types that the readings have; `top`: how many of the likeliest tokens are asked for;
        `advance` is called after each pass."""
        self.config, self.top, self.advance = model.config, top, advance
        self.kinds = tuple(kind for kind in LAYER_TYPES if kind in kinds)
        self.routed = SWITCH in kinds
        self.weights = dict(nnx.to_flat_state(nnx.state(model)))

    def __call__(self, reading: Reading, texts: Texts, dtype: jax.typing.DTypeLike = jnp.float32) -> TokenScores:
        """What the reading answers, computed in `dtype`."""
        longest = max(map(len, texts.tokens))
        count, width = len(texts.tokens), longest + 1  # with room for a token in front
        tokens = np.zeros((count, width), np.int32)
        most = max(map(len, texts.queries))
        queries, targets = np.zeros((count, most), np.int32), np.zeros((count, most), np.int32)
        for i, (text, asked) in enumerate(zip(texts.tokens, texts.queries, strict=True)):
            before = longest - len(text) if reading.padding_seen else int(reading.in_front)
            row = [texts.front] * before + text
            tokens[i, : len(row)] = row
            queries[i, : len(asked)] = np.array(asked) + before
            targets[i, : len(asked)] = [[*text, 0][t + 1] for t in asked]
        graph, weights = self._weights(reading.config, jnp.dtype(dtype))
        rope, scale = self._rope(reading, longest, width)
        data = layer_data(reading.pattern, reading.config, self.kinds)
        spec = model_spec(reading.config, reading.pattern)
        log_probs, top = _answers(graph, weights, spec, self.top, data, rope, scale, tokens, queries, targets)
        answers = TokenScores(
            *(
                [np.asarray(row)[: len(asked)] for row, asked in zip(rows, texts.queries, strict=True)]
                for rows in (log_probs, top)
            )
        )
        self.advance()
        return answers

    def _weights(self, config: ModelConfig, dtype: jnp.dtype) -> tuple[Any, Any]:
        """The modules that a configuration asks for, and those of the weights that they have."""
        # RoPE comes as data, so models that differ in it are the same program.
        layers = config.rope_layers if config.heads_differ else ()
        same = dataclasses.replace(config, rope_theta=1e4, rope_scaling=None, rope_layers=layers, local_rope_theta=1e4)
        graph, paths = _structure(same, self.routed, dtype)
        state = nnx.from_flat_state({path: self.weights[path] for path in paths})
        return graph, state if dtype == jnp.float32 else cast_parameters(state, dtype)

    @staticmethod
    def _rope(reading: Reading, longest: int, width: int) -> tuple[RopeTables, jax.Array | None]:
        """cos and sin of every position, and the factor on queries."""
        if not reading.config.uses_rope:
            return {}, None
        positions = jnp.arange(width)
        if reading.jump:
            positions = positions + (positions >= longest // 2)
        after = reading.config.long_rope_after
        length = longest if not reading.long_rope or after is None else after + 1
        tables = rope_tables(reading.config, positions[None], length, reading.pattern.nope_full_layers)
        return tables, query_scale(reading.config, positions[None])


@functools.lru_cache(maxsize=64)
def _structure(config: ModelConfig, routed: bool, dtype: jnp.dtype) -> tuple[Any, tuple[Any, ...]]:
    """The modules of a configuration, and the paths of their parameters."""
    pattern = AttentionPattern((SWITCH if routed else FULL,) * config.num_hidden_layers, 1 if routed else None)
    skeleton = nnx.eval_shape(lambda: Decoder(config, pattern, dtype=dtype, rngs=nnx.Rngs(0)))
    graph, wanted = nnx.split(skeleton)
    return graph, tuple(path for path, _ in nnx.to_flat_state(wanted))


@functools.partial(jax.jit, static_argnames=("graph", "spec", "top"))
def _answers(
    graph: Any,
    weights: Any,
    spec: AttentionSpec,
    top: int,
    data: LayerData,
    rope: RopeTables,
    scale: jax.Array | None,
    tokens: jax.Array,
    queries: jax.Array,
    targets: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """tokens [P, T]; queries, positions in them, and targets, tokens, both [P, Q] -> [P, Q] and [P, Q, top] f32."""
    model = nnx.merge(graph, weights)
    rope = jax.tree.map(lambda t: jnp.broadcast_to(t, (t.shape[0], *tokens.shape, t.shape[-1])), rope)
    if scale is not None:
        scale = jnp.broadcast_to(scale, tokens.shape)
    context = AttentionContext(spec, rope, scale)

    def layer(stream: Stream, block: Block, row: LayerData) -> tuple[Stream, None]:
        return block(stream, row, context)[0], None

    stream, _ = model.scan(layer, *model.begin(tokens, data))

    def of_a_text(row: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x, asked, targets = row
        hidden = model.norm(x[None, asked])[0]
        logits = model.logits(hidden)
        if hidden.dtype != jnp.float32:  # servers round logits as well
            logits = logits.astype(hidden.dtype).astype(jnp.float32)
        log_probs = jax.nn.log_softmax(logits)  # [Q, V]
        chosen = jnp.take_along_axis(log_probs, targets[:, None], axis=1)[:, 0]
        return chosen, jax.lax.top_k(log_probs, top)[0]

    return jax.lax.map(of_a_text, (stream.x, queries, targets))
