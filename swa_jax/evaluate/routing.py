"""What a routed model (SwiAttn) reads: full-attention ratio by layer, by needle depth, and keys read a token.

The paper's Figures 4b (memory access), 5 (layers) and 6 (needle depth). Everything is teacher-forced.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from swa_jax.base.errors import ConfigError
from swa_jax.base.estimates import Estimate, bootstrap
from swa_jax.evaluate.examples import Example
from swa_jax.evaluate.nll import answer_batches
from swa_jax.evaluate.ruler import Cell
from swa_jax.model.config import ModelConfig
from swa_jax.model.decoder import Decoder
from swa_jax.model.flops import forward_flops, visible_keys
from swa_jax.model.layer_types import FULL, HYBRID, SWITCH
from swa_jax.model.pattern import AttentionPattern


class Routed(NamedTuple):
    """Means over the units of one measurement, which are sequences or examples, with 95 % bootstrap intervals."""

    full_ratio: Estimate  # of all layers
    by_layer: list[Estimate]  # [L]
    keys_read: Estimate  # keys a token reads of the KV cache, the mean over its layers
    keys_of_full: float  # the same if every layer were full
    num_units: int


def text_routing(
    model: Decoder,
    tokens: Sequence[int],
    *,
    length: int,
    start: Sequence[int] = (),
    batch_size: int = 8,
    advance: Callable[[int], None] = lambda _: None,
) -> tuple[Routed, np.ndarray]:
    """Routing on plain text in sequences of `length` tokens: the figures, and keys read at each position [length].

    Each sequence begins with the start tokens `start`, which the figures leave out. What is left at the end and is
    shorter than `length` is not read; `Routed.num_units` counts the sequences. `advance` is called with how many more
    of them are read.

    Raises:
      ConfigError: no layer of the model is routed, or the text is shorter than one sequence.
    """
    check_routed(model.pattern)
    size = length - len(start)  # tokens of text in a sequence
    count = len(tokens) // size if size > 0 else 0
    if count == 0:
        raise ConfigError(f"the text has {len(tokens)} tokens, too few for one sequence of {length}")
    text = np.asarray(tokens[: count * size], np.int32).reshape(count, size)
    rows = np.concatenate([np.tile(np.array(start, np.int32), (count, 1)), text], axis=1)
    gate = full_share(model, rows, batch_size=batch_size, advance=advance)  # [S, L, T]
    position = np.broadcast_to(np.arange(length), (count, length))
    keys = keys_read(gate, position, model.pattern)
    return _routed(gate, keys, position, 1.0 * (position >= len(start))), keys.mean((0, 1))


def full_share(
    model: Decoder, tokens: np.ndarray, *, batch_size: int = 8, advance: Callable[[int], None] = lambda _: None
) -> np.ndarray:
    """The share of the KV heads that attends in full, of each layer at tokens [N, T]: [N, L, T]."""
    count, length = tokens.shape
    batch_size = min(batch_size, count)
    gates = []
    for first in range(0, count, batch_size):
        batch = np.resize(tokens[first : first + batch_size], (batch_size, length))
        gates.append(_gates(*nnx.split(model), jnp.asarray(batch), None, None)[: count - first])
        advance(len(gates[-1]))
    return _with_static_layers(np.concatenate(gates), model)


def answer_routing(
    model: Decoder, examples: Sequence[Example], *, batch_size: int = 8, advance: Callable[[int], None] = lambda _: None
) -> Routed:
    """Routing of the queries that predict the answers' tokens, each example a unit. Raises as `text_routing`."""
    check_routed(model.pattern)
    width = max(len(example.answer) for example in examples)
    gate = np.zeros((len(examples), model.pattern.num_layers, width), np.float32)
    position, weight = np.zeros((len(examples), width), int), np.zeros((len(examples), width))
    for index, batch in answer_batches(examples, batch_size, model.pattern.window):
        gates = _gates(*nnx.split(model), batch.tokens, batch.segment_ids, batch.full_from)  # [B, L, T]
        queries = np.asarray(batch.queries)
        chosen = np.take_along_axis(gates, queries[:, None], axis=2)  # [B, L, A]
        longest = queries.shape[1]  # of this batch
        gate[index, :, :longest] = chosen[: len(index)]
        position[index, :longest] = queries[: len(index)]
        weight[index, :longest] = np.asarray(batch.weights)[: len(index)]
        advance(len(index))
    gate = _with_static_layers(gate, model)
    return _routed(gate, keys_read(gate, position, model.pattern), position, weight)


class RoutingReport(NamedTuple):
    """What is measured of one model: rows of results.json, and what their picture shows."""

    rows: list[dict[str, Any]]
    by_layer: list[Estimate]  # [L], on the text; empty without one
    by_depth: dict[str, list[tuple[float, Estimate]]]  # (depth, full-attention ratio) by task and length


def measure_routing(
    name: str,
    model: Decoder,
    tokens: Sequence[int],
    cells: Mapping[Cell, Sequence[Example]],
    *,
    length: int,
    start: Sequence[int] = (),
    batch_size: int = 8,
    advance: Callable[[int], None] = lambda _: None,
) -> RoutingReport:
    """`text_routing` of `tokens` in sequences of `length`, if there are any, and `answer_routing` of every cell.

    Errors are those of the two functions.
    """
    report = RoutingReport([], [], {})
    if tokens:
        on_text, _ = text_routing(model, tokens, length=length, start=start, batch_size=batch_size, advance=advance)
        report.by_layer.extend(on_text.by_layer)
        report.rows.append(routing_row(name, ("text", length, None), on_text, model.config))
    for cell, examples in cells.items():
        routed = answer_routing(model, examples, batch_size=batch_size, advance=advance)
        report.rows.append(routing_row(name, cell, routed, model.config))
        task, tokens_of_prompt, depth = cell
        if depth is not None:
            line = report.by_depth.setdefault(f"{task}, {tokens_of_prompt} tokens", [])
            line.append((depth, routed.full_ratio))
    return report


def keys_read(gate: np.ndarray, position: np.ndarray, pattern: AttentionPattern) -> np.ndarray:
    """Keys that queries at positions [N, T] read in every layer [N, L, T], given which share reads all: gate [N, L, T].

    Under full-attention decode that is what windowed queries would read while a prompt is processed.
    """
    full = visible_keys(position, None)[:, None]
    window = visible_keys(position, pattern.sliding_window, pattern.num_sink_tokens)[:, None]
    return gate * full + (1 - gate) * window


def check_routed(pattern: AttentionPattern) -> None:
    if SWITCH not in pattern.layer_types:
        raise ConfigError(
            "no layer of this pattern is routed, so there is no routing to look at: it needs 'switch_attention' "
            "layers, as --pattern switch and training into SwiAttn give"
        )


def _with_static_layers(gate: np.ndarray, model: Decoder) -> np.ndarray:
    """Gates [N, L, T] with the share of full heads in layers that have no router, where the model's gates are 0."""
    shapes, heads = model.config.head_shapes, model.pattern.full_kv_heads
    share = {FULL: lambda layer: 1.0, HYBRID: lambda layer: len(heads[layer]) / shapes[layer][0]}
    static = [share.get(kind, lambda layer: 0.0)(layer) for layer, kind in enumerate(model.pattern.layer_types)]
    return gate + np.array(static)[:, None]


def _routed(gate: np.ndarray, keys: np.ndarray, position: np.ndarray, weight: np.ndarray) -> Routed:
    """gate, keys [N, L, T]; position, weight [N, T]."""
    total = weight.sum(1)  # [N]
    ratio = np.einsum("nlt,nt->nl", gate, weight) / total[:, None]
    read = np.einsum("nlt,nt->n", keys, weight) / (total * gate.shape[1])
    return Routed(
        full_ratio=bootstrap(ratio.mean(1)),
        by_layer=[bootstrap(layer) for layer in ratio.T],
        keys_read=bootstrap(read),
        keys_of_full=float((((position + 1) * weight).sum(1) / total).mean()),
        num_units=len(gate),
    )


@functools.partial(jax.jit, static_argnames="graph")
def _all_gates(
    graph: Any, state: nnx.State, tokens: jax.Array, segment_ids: jax.Array | None, full_from: jax.Array | None
) -> jax.Array:
    model: Decoder = nnx.merge(graph, state)
    _, routing, _ = model.features(tokens, segment_ids=segment_ids, full_from=full_from)
    return routing.gate  # [L, B, T]


def _gates(
    graph: Any, state: nnx.State, tokens: jax.Array, segment_ids: jax.Array | None, full_from: jax.Array | None
) -> np.ndarray:
    """1 where a token takes full attention: [B, L, T]."""
    return np.asarray(_all_gates(graph, state, tokens, segment_ids, full_from)).transpose(1, 0, 2)


def routing_row(name: str, cell: Cell, routed: Routed, config: ModelConfig) -> dict[str, Any]:
    """What a routed model does on a text, or on the answers of a (task, length, depth): a row of results.json."""
    task, length, depth = cell
    return {
        "name": name,
        "data": task,
        "length": length,
        "depth": depth,
        "full_ratio": routed.full_ratio.mean,
        "interval": routed.full_ratio.interval,
        "by_layer": [layer.mean for layer in routed.by_layer],
        "by_layer_intervals": [layer.interval for layer in routed.by_layer],
        "keys_read": routed.keys_read.mean,
        "keys_read_interval": routed.keys_read.interval,
        "keys_of_full": routed.keys_of_full,
        "gflops": forward_flops(config, routed.keys_read.mean) / 1e9,
        "gflops_of_full": forward_flops(config, routed.keys_of_full) / 1e9,
        "n": routed.num_units,
    }
