"""One decoder layer, and the stacks of layers that the decoder scans."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from swa_jax.model.attention import Attention, AttentionContext, KeysValues, LayerData, MadeKeys, Routing
from swa_jax.model.config import ModelConfig
from swa_jax.model.experts import ExpertLoad, MixtureOfExperts
from swa_jax.model.gated_delta import GatedDelta
from swa_jax.model.layer_inputs import InputReader
from swa_jax.model.layer_stacks import LayerStack, head_groups, layer_stacks
from swa_jax.model.layers import MLP, Norm, rms_normed
from swa_jax.model.sharding import Partition, constrain


class Stream(NamedTuple):
    """What goes from layer to layer.

    Attributes:
      x: the residual stream [B, T, d].
      made: for each `HeadGroup` the keys and values of its last layer that has some; () where no layer reads another's.
    """

    x: jax.Array
    made: tuple[KeysValues, ...] = ()

    @classmethod
    def at_start(cls, x: jax.Array, config: ModelConfig) -> Stream:
        if not config.num_kv_shared_layers:
            return cls(x)
        shapes = [(*x.shape[:2], group.num_key_value_heads, group.head_dim) for group in head_groups(config)]
        return cls(x, tuple((jnp.zeros(shape, x.dtype), jnp.zeros(shape, x.dtype)) for shape in shapes))

    def read_by(self, block: Block) -> KeysValues | None:
        """The keys and values that a layer reads that has none of its own."""
        return self.made[block.group] if self.made else None

    def behind(self, block: Block, x: jax.Array, k: jax.Array | None, v: jax.Array | None) -> Stream:
        """The stream behind a layer, which gave x and had these keys and values."""
        if not self.made or k is None or v is None:
            return self._replace(x=x)
        return Stream(x, tuple((k, v) if i == block.group else old for i, old in enumerate(self.made)))


class Block(nnx.Module):
    """One decoder layer: attention, or Gated DeltaNet in a linear layer, then MLP, each with a norm before it, on what
    it gives, or both.

    The norms before are `input_norm` and `post_attention_norm` (of the MLP's input), those after `attention_out_norm`
    and `mlp_out_norm`. In a parallel layer the MLP reads what attention reads. A dense layer has an `mlp`, a sparse one
    `experts`; what a layer does not have is None.
    """

    def __init__(self, like: LayerStack, routed: bool, dtype: jnp.dtype, *, num_experts: int, rngs: nnx.Rngs):
        """`num_experts`: of the model, whose dense layers give them no token."""
        config = like.config

        def norm(name: str, *placements: str) -> Norm | None:
            return Norm(f"layers.{name}", config, dtype) if config.norm_placement in placements else None

        self.input_norm = norm("input_norm", "pre", "sandwich", "parallel")
        self.gated_delta = nnx.data(GatedDelta(config, dtype, rngs) if config.linear_layers else None)
        if self.gated_delta is None:
            self.attention = Attention(config, routed, dtype, rngs)
        self.attention_out_norm = norm("attention_out_norm", "post", "sandwich")
        self.post_attention_norm = norm("post_attention_norm", "pre", "sandwich")
        self.mlp = nnx.data(MLP(config, dtype, rngs) if config.has_mlps else None)
        self.experts = nnx.data(MixtureOfExperts(config, dtype, rngs) if config.num_experts else None)
        self.beside_mlp = config.experts_beside_mlp and config.num_experts > 0
        if self.beside_mlp:
            self.mlp_alone_norm = Norm("layers.mlp_alone_norm", config, dtype)
            self.experts_norm = Norm("layers.experts_norm", config, dtype)
            self.experts_out_norm = Norm("layers.experts_out_norm", config, dtype)
        self.mlp_out_norm = norm("mlp_out_norm", "post", "sandwich")
        self.input_reader = nnx.data(InputReader(config, dtype, rngs) if config.hidden_size_per_layer_input else None)
        if config.layer_scalar:
            self.layer_scalar = nnx.Param(jnp.ones(1, dtype))
        self.config, self.num_experts, self.group = config, num_experts, like.group

    def __call__(self, stream: Stream, row: LayerData, context: AttentionContext) -> tuple[Stream, Routing]:
        """The stream before this layer and the layer's data -> the stream behind it, routing [B, T]."""
        read = self.attention_input(stream.x)
        made: MadeKeys = (None, None)
        if self.gated_delta is not None:
            mixed, _ = self.gated_delta(read, context.segment_ids)
            none = jnp.zeros(read.shape[:2], jnp.float32)
            routing = Routing(none, none, none)
        else:
            mixed, routing, made = self.attention(read, row, context, stream.read_by(self))
        counted = None if context.segment_ids is None else context.segment_ids != 0
        x, load = self.after_attention(stream.x, mixed, row, context.partition, counted)
        return stream.behind(self, x, *made), routing._replace(experts=load)

    def attention_input(self, x: jax.Array) -> jax.Array:
        """What attention (and a router) reads of the residual stream [B, T, d]."""
        return _normed(self.input_norm, x)

    def after_attention(
        self,
        x: jax.Array,
        mixed: jax.Array,
        row: LayerData,
        partition: Partition | None = None,
        counted: jax.Array | None = None,
    ) -> tuple[jax.Array, ExpertLoad | None]:
        """The residual stream behind the layer, from the one before it and attention's output, all [B, T, d]; in a
        model with experts also how many of the counted tokens [B, T] (None: all) they got. `row` is the
        layer's data."""
        stream = self._add(x, _normed(self.attention_out_norm, mixed))
        stream = constrain(stream, partition, "batch", "sequence", None)
        parallel = self.config.norm_placement == "parallel"
        read = self.attention_input(x) if parallel else _normed(self.post_attention_norm, stream)
        y, load = self._feed_forward(read, stream, counted, partition)
        stream = self._add(stream, _normed(self.mlp_out_norm, y))
        if self.input_reader is not None:
            assert row.inputs is not None, "Decoder.begin adds the inputs"
            stream = self._add(stream, self.input_reader(stream, row.inputs))
        if self.config.layer_scalar:
            stream = stream * jax.lax.stop_gradient(self.layer_scalar[...]).astype(stream.dtype)
        return constrain(stream, partition, "batch", "sequence", None), load

    def _feed_forward(
        self, x: jax.Array, stream: jax.Array, counted: jax.Array | None, partition: Partition | None
    ) -> tuple[jax.Array, ExpertLoad | None]:
        """What MLP and experts make of x, the normed residual stream [B, T, d]; in a model with experts also how many
        of the counted tokens [B, T] they got."""
        if self.experts is not None and not self.beside_mlp:
            return self.experts(x, counted, partition)
        assert self.mlp is not None
        if self.experts is not None:
            by = rms_normed(stream, self.config.rms_norm_eps)
            y, load = self.experts(self.experts_norm(stream), counted, partition, routed_by=by)
            return self.mlp_alone_norm(self.mlp(x)) + self.experts_out_norm(y), load
        none = jnp.zeros(self.num_experts, jnp.float32)
        return self.mlp(x), ExpertLoad(none, none) if self.num_experts else None

    def _add(self, x: jax.Array, y: jax.Array) -> jax.Array:
        multiplier = self.config.residual_multiplier
        return x + (y if multiplier == 1 else y * multiplier)


def _normed(norm: Norm | None, x: jax.Array) -> jax.Array:
    return x if norm is None else norm(x)


class Stacks(nnx.Module):
    """The layers of a model whose layers are not all alike: one `Block` a `LayerStack`, under its name."""

    def __init__(self, stacks: dict[str, Block]):
        for name, layers in stacks.items():
            setattr(self, name, layers)


def stacked_layers(config: ModelConfig, routed: bool, dtype: jnp.dtype, rngs: nnx.Rngs) -> Block | Stacks:
    """The layers of a decoder: a `Block` whose arrays have an axis of layers in front, or one for each stack."""

    def stack(like: LayerStack) -> Block:
        @nnx.split_rngs(splits=len(like.layers))
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def make(rngs: nnx.Rngs) -> Block:
            return Block(like, routed, dtype, num_experts=config.num_experts, rngs=rngs)

        return make(rngs)

    stacks = {like.name: stack(like) for like in layer_stacks(config)}
    return Stacks(stacks) if len(stacks) > 1 else stacks[""]


def scan_layers(
    config: ModelConfig,
    layers: Block | Stacks,
    layer: Callable[[Any, Block, Any], tuple[Any, Any]],
    carry: Any,
    scanned: Any,
    *,
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda function: function,
    unroll: bool = False,
) -> tuple[Any, Any]:
    """`jax.lax.scan` over the layers: `layer(carry, block, row of scanned) -> (carry, output)`.

    One scan, or, where layers differ, one for each run of layers of a stack. `wrap` is for what a scan runs:
    `rematerialised`. `unroll` writes all layers out, in place of a loop.
    """
    outputs = []
    for run, rows in _runs(config, layers):
        graph, weights = nnx.split(run)

        def one(carry: Any, scanned: tuple, graph: Any = graph) -> tuple[Any, Any]:
            weights, row = scanned
            return layer(carry, nnx.merge(graph, weights), row)

        here = scanned if rows is None else jax.tree.map(lambda x, rows=rows: x[rows], scanned)
        if unroll:
            carry, output = _written_out(wrap, one, carry, weights, here)
        else:
            carry, output = jax.lax.scan(wrap(one), carry, (weights, here))
        outputs.append(output)
    return carry, outputs[0] if len(outputs) == 1 else jax.tree.map(lambda *x: jnp.concatenate(x), *outputs)


def _written_out(wrap: Callable, one: Callable, carry: Any, weights: Any, rows: Any) -> tuple[Any, Any]:
    """One layer after the other, each with its row as it is, so that a kind of attention is known when it is traced.

    With the kind in an array, both branches would keep for the backward pass what either needs: a layer's keys as zeros
    in the place of the other kind's.
    """
    stacks, structure = jax.tree.flatten(weights)
    number = len(stacks[0])
    # The gradient of a split joins its parts, where that of an index would add each to zeros of all layers.
    apart = [jax.lax.split(stack, [1] * number) for stack in stacks]
    outputs = []
    for i in range(number):
        own = jax.tree.unflatten(structure, [parts[i][0] for parts in apart])
        row = jax.tree.map(lambda x, i=i: x[i], rows)
        carry, output = wrap(lambda carry, weights, row=row: one(carry, (weights, row)))(carry, own)
        outputs.append(output)
    return carry, jax.tree.map(lambda *x: jnp.stack(x), *outputs)


def _runs(config: ModelConfig, layers: Block | Stacks) -> Iterator[tuple[Block, slice | None]]:
    """Consecutive layers of one stack, and which they are; None stands for all of them."""
    if isinstance(layers, Block):
        yield layers, None
        return
    places = {layer: (like.name, i) for like in layer_stacks(config) for i, layer in enumerate(like.layers)}
    for name, group in itertools.groupby(range(config.num_hidden_layers), lambda layer: places[layer][0]):
        numbers = list(group)
        first = places[numbers[0]][1]
        own = slice(first, first + len(numbers))
        graph, weights = nnx.split(getattr(layers, name))
        yield (nnx.merge(graph, jax.tree.map(lambda x, own=own: x[own], weights)), slice(numbers[0], numbers[-1] + 1))
