"""The decoder: embeddings, stacked and scanned layers, head. One module for every family and every pattern."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels.spec import segment_positions
from swa_jax.model.attention import (
    Attention,
    AttentionContext,
    LayerPlan,
    Routing,
    kinds_of,
    layer_plan,
    model_spec,
)
from swa_jax.model.cache import CacheLayout, KVCache, ring_entry, ring_positions
from swa_jax.model.cached_attention import (
    Chunk,
    DecodeStep,
    decode_layer,
    extend_layer,
    layer_places,
    put_prompts,
    with_visits,
)
from swa_jax.model.config import MlpKind, ModelConfig
from swa_jax.model.experts import ExpertLoad, MixtureOfExperts
from swa_jax.model.layer_types import SWITCH
from swa_jax.model.layers import MLP, Norm, linear, query_scale, rope_tables
from swa_jax.model.lora import LoraConfig, seed_dropout, with_lora
from swa_jax.model.loss import Teacher, TokenLoss, scaled_logits, token_loss
from swa_jax.model.parameters import declared
from swa_jax.model.pattern import AttentionPattern
from swa_jax.model.remat import Remat, rematerialised
from swa_jax.model.sharding import Partition, constrain


class Block(nnx.Module):
    """One decoder layer: attention, then MLP, each with a norm before it, on what it gives, or both.

    The norms before are `input_norm` and `post_attention_norm` (of the MLP's input), those after `attention_out_norm`
    and `mlp_out_norm`. In a parallel layer the MLP reads what attention reads. A dense layer has an `mlp`, a sparse one
    `experts`; what a layer does not have is None.
    """

    def __init__(
        self, config: ModelConfig, routed: bool, dtype: jnp.dtype, *, mlp: MlpKind | None, rngs: nnx.Rngs
    ):
        def norm(name: str, *placements: str) -> Norm | None:
            return Norm(f"layers.{name}", config, dtype) if config.norm_placement in placements else None

        self.input_norm = norm("input_norm", "pre", "sandwich", "parallel")
        self.attention = Attention(config, routed, dtype, rngs)
        self.attention_out_norm = norm("attention_out_norm", "post", "sandwich")
        self.post_attention_norm = norm("post_attention_norm", "pre", "sandwich")
        self.mlp = nnx.data(MLP(config, dtype, rngs) if mlp == "dense" else None)
        self.experts = nnx.data(MixtureOfExperts(config, dtype, rngs) if mlp == "sparse" else None)
        self.mlp_out_norm = norm("mlp_out_norm", "post", "sandwich")
        self.config = config

    def __call__(self, x: jax.Array, plan: LayerPlan, context: AttentionContext) -> tuple[jax.Array, Routing]:
        """x [B, T, d] and this layer's row of the plan -> output [B, T, d], routing [B, T]."""
        mixed, routing, _ = self.attention(self.attention_input(x), plan, context)
        counted = None if context.segment_ids is None else context.segment_ids != 0
        x, load = self.after_attention(x, mixed, context.partition, counted)
        return x, routing._replace(experts=load)

    def attention_input(self, x: jax.Array) -> jax.Array:
        """What attention (and a router) reads of the residual stream [B, T, d]."""
        return _normed(self.input_norm, x)

    def after_attention(
        self,
        x: jax.Array,
        mixed: jax.Array,
        partition: Partition | None = None,
        counted: jax.Array | None = None,
    ) -> tuple[jax.Array, ExpertLoad | None]:
        """The residual stream behind the layer, from the one before it and attention's output, all [B, T, d]; in a
        model with experts also how many of the counted tokens [B, T] (None: all) they got."""
        stream = self._add(x, _normed(self.attention_out_norm, mixed))
        stream = constrain(stream, partition, "batch", "sequence", None)
        parallel = self.config.norm_placement == "parallel"
        read = self.attention_input(x) if parallel else _normed(self.post_attention_norm, stream)
        y, load = self._feed_forward(read, counted, partition)
        stream = self._add(stream, _normed(self.mlp_out_norm, y))
        return constrain(stream, partition, "batch", "sequence", None), load

    def _feed_forward(
        self, x: jax.Array, counted: jax.Array | None, partition: Partition | None
    ) -> tuple[jax.Array, ExpertLoad | None]:
        """The MLP's output, and in a model with experts how many of the counted tokens [B, T] they got."""
        if self.experts is not None:
            return self.experts(x, counted, partition)
        assert self.mlp is not None
        none = jnp.zeros(self.config.num_experts, jnp.float32)
        return self.mlp(x), ExpertLoad(none, none) if self.config.num_experts else None

    def _add(self, x: jax.Array, y: jax.Array) -> jax.Array:
        multiplier = self.config.residual_multiplier
        return x + (y if multiplier == 1 else y * multiplier)


def _normed(norm: Norm | None, x: jax.Array) -> jax.Array:
    return x if norm is None else norm(x)


def stacked_layers(config: ModelConfig, routed: bool, dtype: jnp.dtype, rngs: nnx.Rngs) -> Block:
    """The layers of a decoder as one `Block` whose arrays have an axis of layers in front.

    Where dense and sparse layers are mixed, `mlp` and `experts` have those layers only that are dense or sparse.
    """

    def stack[M](make: Callable[[nnx.Rngs], M], count: int) -> M:
        return nnx.split_rngs(splits=count)(nnx.vmap(make, in_axes=(0,), out_axes=0))(rngs)

    alike: MlpKind = "sparse" if config.num_experts else "dense"
    mlp = None if config.mlp_layer_types else alike
    layers = stack(lambda rngs: Block(config, routed, dtype, mlp=mlp, rngs=rngs), config.num_hidden_layers)
    if config.mlp_layer_types:
        layers.mlp = stack(lambda rngs: MLP(config, dtype, rngs), len(config.dense_layers))
        layers.experts = stack(lambda rngs: MixtureOfExperts(config, dtype, rngs), len(config.sparse_layers))
    return layers


def scan_layers(
    layers: Block,
    layer: Callable[[Any, Block, Any], tuple[Any, Any]],
    carry: Any,
    scanned: Any,
    *,
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda function: function,
    unroll: bool = False,
) -> tuple[Any, Any]:
    """`jax.lax.scan` over stacked layers: `layer(carry, block, row of scanned) -> (carry, output)`.

    One scan, or, where dense and sparse layers are mixed, one for each run of layers of a kind. `wrap` is for what a
    scan runs: `rematerialised`. `unroll` writes all layers out, in place of a loop.
    """
    outputs = []
    for run, rows in _runs(layers):
        graph, weights = nnx.split(run)

        def one(carry: Any, scanned: tuple, graph: Any = graph) -> tuple[Any, Any]:
            weights, row = scanned
            return layer(carry, nnx.merge(graph, weights), row)

        here = scanned if rows is None else jax.tree.map(lambda x, rows=rows: x[rows], scanned)
        carry, output = jax.lax.scan(wrap(one), carry, (weights, here), unroll=unroll)
        outputs.append(output)
    return carry, outputs[0] if len(outputs) == 1 else jax.tree.map(lambda *x: jnp.concatenate(x), *outputs)


def _runs(layers: Block) -> Iterator[tuple[Block, slice | None]]:
    """The layers in runs of one kind of MLP, and which they are; None stands for all of them."""
    kinds = layers.config.mlp_layer_types
    if not kinds:
        yield layers, None
        return
    done = {"mlp": 0, "experts": 0}
    for kind, group in itertools.groupby(range(len(kinds)), lambda i: kinds[i]):
        numbers = list(group)
        rows = slice(numbers[0], numbers[-1] + 1)
        name, other = ("mlp", "experts") if kind == "dense" else ("experts", "mlp")
        own = slice(done[name], done[name] + len(numbers))
        done[name] = own.stop
        run = nnx.merge(*nnx.split(layers))
        setattr(run, other, None)
        graph, weights = nnx.split(run)
        pieces = {
            path: variable.replace(variable[...][own if path[0] == name else rows])
            for path, variable in nnx.to_flat_state(weights)
        }
        yield nnx.merge(graph, nnx.from_flat_state(pieces)), rows


class Decoder(nnx.Module):
    """A causal language model. `model(tokens [B, T]) -> logits [B, T, V]` f32.

    The parameter tree does not depend on the pattern, but for the routers, which exist if any layer is routed.
    """

    def __init__(
        self,
        config: ModelConfig,
        pattern: AttentionPattern,
        *,
        dtype: jax.typing.DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        pattern.validate(config)
        self.config, self.pattern = config, pattern
        self.lora: LoraConfig | None = None  # set by `swa_jax.model.lora.with_lora`
        dtype = jnp.dtype(dtype)  # one spelling, so that equal models hash alike and share compilations
        routed = SWITCH in pattern.layer_types
        embedding = declared(config)["embedding"]
        self.embedding = nnx.Param(embedding.init(rngs.params(), embedding.shape, dtype))

        self.layers = stacked_layers(config, routed, dtype, rngs)
        self.norm = Norm("norm", config, dtype)
        if not config.tie_word_embeddings:
            self.lm_head = linear("lm_head", config, dtype, rngs)

    def __call__(
        self,
        tokens: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        full_from: jax.Array | None = None,
    ) -> jax.Array:
        """tokens [B, T] int32 -> logits [B, T, V] f32.

        An id that the vocabulary does not have raises `ConfigError`; under `jit`, all that see it is NaN.

        Args:
          segment_ids: [B, T] int32; tokens see only their own segment, 0 is padding. None: one segment.
          positions: [B, T] int32; None counts from the start of each segment.
          full_from: [B] or [B, segments] int32; queries of windowed layers at this position or later see everything.
        """
        if not isinstance(tokens, jax.core.Tracer):
            self.config.check_tokens(tokens, "tokens")
        tokens = jnp.asarray(tokens)
        hidden, _ = self.features(tokens, segment_ids=segment_ids, positions=positions, full_from=full_from)
        return self.logits(hidden)

    def features(
        self,
        tokens: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        full_from: jax.Array | None = None,
        plan: LayerPlan | None = None,
        kinds: tuple[str, ...] | None = None,
        remat: Remat = "none",
        unroll: bool = False,
        partition: Partition | None = None,
        dropout_key: jax.Array | None = None,
    ) -> tuple[jax.Array, Routing]:
        """The normed hidden states [B, T, d] and every layer's routing [L, B, T].

        Args:
          plan, kinds: replace the pattern's layer map by data, so that a search over patterns compiles once.
          remat: what is computed again in the backward pass rather than saved; see `rematerialised`.
          unroll: compile every layer for itself in place of one loop over the layers. The step is faster on a TPU: what
            is saved for the backward pass needs no copies, and weights are gathered beside the layer before. Compiling
            takes longer, in proportion to the layers.
          partition: the mesh that parameters and tokens lie on.
          dropout_key: a JAX key; LoRA adapters drop inputs by it, each layer its own. None: none are dropped.
        """
        if 0 in tokens.shape:
            raise ValueError(f"tokens is [B, T] = {tokens.shape}: give at least one sequence of one token")
        kinds = kinds or kinds_of(self.pattern)
        plan = plan or self._plan(kinds)
        context = self.context(tokens, kinds, segment_ids, positions, full_from, partition)
        keys = None if dropout_key is None else jax.random.split(dropout_key, self.config.num_hidden_layers)

        def layer(x: jax.Array, block: Block, scanned: tuple) -> tuple[jax.Array, Routing]:
            plan, key = scanned
            if key is not None:
                seed_dropout(block, key)
            return block(x, plan, context)

        x, routing = scan_layers(
            self.layers,
            layer,
            self.embed(tokens, partition),
            (plan, keys),
            wrap=lambda f: rematerialised(f, remat),
            unroll=unroll,
        )
        return self.norm(x), routing

    def embed(self, tokens: jax.Array, partition: Partition | None = None) -> jax.Array:
        """tokens [B, T] int32 -> [B, T, d]."""
        # The table is gathered over fsdp, as the layers' weights are; else XLA would gather the tokens of all rows.
        table = constrain(self.embedding[...], partition, "vocab", None)
        x = table.at[tokens].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
        if self.config.embedding_multiplier != 1:
            x = x * jnp.asarray(self.config.embedding_multiplier, x.dtype)
        return constrain(x, partition, "batch", "sequence", None)

    def head(self) -> jax.Array:
        """The output matrix [d, V]."""
        return self.embedding[...].T if self.config.tie_word_embeddings else self.lm_head.kernel[...]

    def logits(self, hidden: jax.Array) -> jax.Array:
        """hidden [..., d] -> logits [..., V] f32."""
        logits = jnp.einsum("...d,dv->...v", hidden, self.head(), preferred_element_type=jnp.float32)
        return scaled_logits(logits, self.config.logit_multiplier, self.config.logit_softcap)

    def token_loss(
        self,
        hidden: jax.Array,
        targets: jax.Array,
        weights: jax.Array,
        *,
        teacher: Teacher | None = None,
        partition: Partition | None = None,
    ) -> TokenLoss:
        """Cross-entropy of normed hidden states [B, T, d] against targets [B, T]: `swa_jax.model.loss.token_loss`."""
        return token_loss(
            hidden,
            self.head(),
            targets,
            weights,
            teacher=teacher,
            partition=partition,
            logit_multiplier=self.config.logit_multiplier,
            logit_softcap=self.config.logit_softcap,
        )

    def with_pattern(self, pattern: AttentionPattern, *, rngs: nnx.Rngs | None = None) -> Decoder:
        """The same weights under another pattern (arrays are shared). Routed layers get fresh routers from `rngs`."""
        pattern.validate(self.config)
        routed = SWITCH in pattern.layer_types
        dtype = self.embedding[...].dtype
        other = nnx.eval_shape(lambda: Decoder(self.config, pattern, dtype=dtype, rngs=nnx.Rngs(0)))
        if (lora := self.lora) is not None:
            other = nnx.eval_shape(lambda: with_lora(other, lora, nnx.Rngs(0)))
        graph, wanted = nnx.split(other)
        mine = dict(nnx.to_flat_state(nnx.state(self)))
        if routed and not hasattr(self.layers.attention, "router"):
            fresh = nnx.state(Decoder(self.config, pattern, dtype=dtype, rngs=rngs or nnx.Rngs(0)))
            mine = dict(nnx.to_flat_state(fresh)) | mine
        kept = {path: mine[path] for path, _ in nnx.to_flat_state(wanted)}
        return nnx.merge(graph, nnx.from_flat_state(kept))

    # ---- generation: a prompt into the cache, then one token at a time ----

    def prefill(
        self,
        tokens: jax.Array,
        lengths: jax.Array,
        cache: KVCache,
        layout: CacheLayout,
        *,
        partition: Partition | None = None,
    ) -> tuple[jax.Array, KVCache]:
        """Right-padded prompts [B, T] of `lengths` [B] -> logits after each last token [B, V] f32, the filled cache.

        `partition`, here and below: the mesh on which the parameters and the cache lie.
        """
        segments = (jnp.arange(tokens.shape[1])[None] < lengths[:, None]).astype(jnp.int32)
        kinds = kinds_of(self.pattern)
        context = self.context(tokens, kinds, segments, partition=partition, rope_length=layout.max_length)
        context = dataclasses.replace(context, inference=True)
        ring = ring_positions(layout, lengths)

        def layer(
            carry: tuple[jax.Array, KVCache], block: Block, scanned: tuple
        ) -> tuple[tuple[jax.Array, KVCache], None]:
            (x, cache), (plan, place) = carry, scanned
            mixed, _, (k, v) = block.attention(block.attention_input(x), plan, context)
            cache = put_prompts(k, v, cache, place, ring, partition)
            return (block.after_attention(x, mixed, partition)[0], cache), None

        cache = dataclasses.replace(cache, lengths=lengths)
        scanned = (self._plan(kinds), layer_places(layout))
        (x, cache), _ = scan_layers(self.layers, layer, (self.embed(tokens, partition), cache), scanned)
        last = jnp.take_along_axis(x, lengths[:, None, None] - 1, axis=1)[:, 0]  # [B, d]
        return self.logits(self.norm(last)), cache

    def decode_step(
        self,
        tokens: jax.Array,
        cache: KVCache,
        layout: CacheLayout,
        full_from: jax.Array | None = None,
        *,
        active: jax.Array | None = None,
        partition: Partition | None = None,
    ) -> tuple[jax.Array, KVCache]:
        """One new token a sequence, tokens [B] -> logits [B, V] f32 of what follows, and the cache with it in.

        Args:
          full_from: [B] int32, the length of each prompt under full-attention decode, else None.
          active: [B] bool; the cache of other sequences stays as it is, and their logits mean nothing. None: all.
        """
        context = self.context(
            tokens[:, None], kinds_of(self.pattern), positions=cache.lengths[:, None], full_from=full_from,
            partition=partition, rope_length=layout.max_length,
        )  # fmt: skip
        lengths = cache.lengths + 1
        whole_entry, entry = cache.lengths, ring_entry(layout, cache.lengths)
        ring = ring_positions(layout, lengths)
        if active is not None:  # an entry that no pool has is not written
            whole_entry = jnp.where(active, whole_entry, layout.max_length)
            entry = jnp.where(active, entry, layout.ring_entries)
        heads = self.config.num_attention_heads, self.config.head_dim
        queries = jax.ShapeDtypeStruct((tokens.shape[0], 1, *heads), self.embedding[...].dtype)
        step = DecodeStep(lengths, whole_entry, entry, ring)
        step = with_visits(step, queries, cache, layout, context)

        def layer(
            carry: tuple[jax.Array, KVCache], block: Block, scanned: tuple
        ) -> tuple[tuple[jax.Array, KVCache], None]:
            (x, cache), (plan, place) = carry, scanned
            normed = block.attention_input(x)
            q, k, v = block.attention.qkv(normed, plan, context)
            _, gate = block.attention.route(normed)
            heads = block.attention.per_head()
            mixed, cache = decode_layer(heads, q, k, v, gate, cache, layout, place, plan, context, step)
            return (
                block.after_attention(x, block.attention.output(mixed, normed), partition)[0],
                cache,
            ), None

        scanned = (self._plan(context.kinds), layer_places(layout))
        (x, cache), _ = scan_layers(
            self.layers, layer, (self.embed(tokens[:, None], partition), cache), scanned
        )
        lengths = lengths if active is None else jnp.where(active, lengths, cache.lengths)
        return self.logits(self.norm(x[:, 0])), dataclasses.replace(cache, lengths=lengths)

    def extend(
        self,
        tokens: jax.Array,
        count: jax.Array,
        row: jax.Array,
        cache: KVCache,
        layout: CacheLayout,
        *,
        partition: Partition | None = None,
    ) -> tuple[jax.Array, KVCache]:
        """The next piece of one prompt: logits [V] f32 after its last token, and the cache with it in.

        Args:
          tokens: [C] int32, of which the first `count` (at least 1) are the piece. They stand behind the tokens that
            the cache holds of the sequence, and there must be room for `count` more.
          row: the number of the sequence in the cache.
        """
        chunk = Chunk(row, cache.lengths[row], count)
        positions = chunk.start + jnp.arange(tokens.shape[0], dtype=jnp.int32)
        context = self.context(
            tokens[None], kinds_of(self.pattern), positions=positions[None], partition=partition,
            rope_length=layout.max_length,
        )  # fmt: skip
        alone = None if partition is None else partition.of_one_row

        def layer(
            carry: tuple[jax.Array, KVCache], block: Block, scanned: tuple
        ) -> tuple[tuple[jax.Array, KVCache], None]:
            (x, cache), (plan, place) = carry, scanned
            normed = block.attention_input(x)
            q, k, v = block.attention.qkv(normed, plan, context)
            _, gate = block.attention.route(normed)
            heads = block.attention.per_head()
            mixed, cache = extend_layer(heads, q, k, v, gate, cache, layout, place, plan, context, chunk)
            return (block.after_attention(x, block.attention.output(mixed, normed), alone)[0], cache), None

        scanned = (self._plan(context.kinds), layer_places(layout))
        (x, cache), _ = scan_layers(self.layers, layer, (self.embed(tokens[None], alone), cache), scanned)
        lengths = cache.lengths.at[row].add(count)
        return self.logits(self.norm(x[0, count - 1])), dataclasses.replace(cache, lengths=lengths)

    def _plan(self, kinds: tuple[str, ...]) -> LayerPlan:
        return layer_plan(self.pattern, self.config, kinds)

    def context(
        self,
        tokens: jax.Array,
        kinds: tuple[str, ...],
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        full_from: jax.Array | None = None,
        partition: Partition | None = None,
        rope_length: int | None = None,
    ) -> AttentionContext:
        """What the layers of one pass over tokens [B, T] share; the arguments are those of `features`, and the length
        that RoPE goes by (`rope_frequencies`), which is T where it is not given."""
        cos = sin = scale = None
        if self.config.uses_rope:
            rows = jnp.arange(tokens.shape[1])[None]
            counted = rows if segment_ids is None else segment_positions(segment_ids)
            turned = counted if positions is None else positions
            tables = rope_tables(self.config, turned, rope_length or tokens.shape[1])
            # Without the barrier, XLA makes them again in every layer of a loop.
            cos, sin = jax.lax.optimization_barrier(tables)
            scale = query_scale(self.config, turned)
        spec = model_spec(self.config, self.pattern)
        return AttentionContext(
            spec, kinds, cos, sin, scale, segment_ids, positions, full_from, partition=partition
        )
