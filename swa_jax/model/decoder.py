"""The decoder: embeddings, stacked and scanned layers, head. One module for every family and every pattern."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pallas_kernels.math.checks import check_array
from pallas_kernels.math.spec import segment_positions
from swa_jax.base.errors import ConfigError
from swa_jax.model.attention import AttentionContext, LayerData, MadeKeys, Routing, known_layer_data, model_spec
from swa_jax.model.block import Block, Stream, scan_layers, stacked_layers
from swa_jax.model.cache import CacheLayout, CachePools, KVCache, ring_entry, ring_positions
from swa_jax.model.cached_attention import (
    Chunk,
    DecodeStep,
    LayerCall,
    LayerPlace,
    decode_layer,
    extend_layer,
    layer_places,
    put_prompts,
    put_rings,
    with_visits,
)
from swa_jax.model.config import ModelConfig
from swa_jax.model.gated_delta import GatedDelta, LinearState
from swa_jax.model.layer_inputs import LayerInputs
from swa_jax.model.layer_stacks import head_groups
from swa_jax.model.layer_types import SWITCH
from swa_jax.model.layers import Norm, RopeTables, drawn, linear, query_scale, rope_tables
from swa_jax.model.lookup import rows_of
from swa_jax.model.lora import LoraConfig, seed_dropout, with_lora
from swa_jax.model.loss import Teacher, TeacherStates, TokenLoss, scaled_logits, token_loss
from swa_jax.model.pattern import AttentionPattern
from swa_jax.model.remat import PLAIN, TrainingPass, rematerialised
from swa_jax.model.sharding import Partition, constrain


class Decoder(nnx.Module):
    """A causal language model. `model(tokens [B, T]) -> logits [B, T, V]` f32.

    The parameter tree does not depend on the pattern, but for the routers, which exist if any layer is routed.
    """

    def __init__(
        self,
        config: ModelConfig,
        pattern: AttentionPattern | str,
        *,
        dtype: jax.typing.DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        pattern = _fitting(pattern, config)
        self.config, self.pattern = config, pattern
        self.lora: LoraConfig | None = None  # set by `swa_jax.model.lora.with_lora`
        dtype = jnp.dtype(dtype)  # one spelling, so that equal models hash alike and share compilations
        self.routed = routed = SWITCH in pattern.layer_types
        self.embedding = drawn("embedding", config, dtype, rngs)
        if config.hidden_size_per_layer_input:
            self.layer_inputs = LayerInputs(config, dtype, rngs)
        self.layers = stacked_layers(config, routed, dtype, rngs)
        self.norm = Norm("norm", config, dtype)
        if not config.tie_word_embeddings:
            self.lm_head = linear("lm_head", config, dtype, rngs)

    def __setattr__(self, name: str, value: Any) -> None:
        """`model.pattern` may be set to a pattern, or to a recipe, which takes the window of the pattern before."""
        if name == "pattern" and hasattr(self, "pattern"):
            value = _fitting(value, self.config, self.pattern.sliding_window)
            if SWITCH in value.layer_types and not self.routed:
                raise ConfigError("the model has no routers for this pattern: take model.with_pattern(pattern)")
        super().__setattr__(name, value)

    def __call__(
        self,
        tokens: jax.typing.ArrayLike,
        *,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        full_from: jax.Array | None = None,
    ) -> jax.Array:
        """tokens [B, T] int32 -> logits [B, T, V] f32.

        Another shape, or an id that the vocabulary does not have, raises `ConfigError`; under `jit`, all that see such
        an id is NaN.

        Args:
          segment_ids: [B, T] int32; tokens see only their own segment, 0 is padding. None: one segment.
          positions: [B, T] int32; None counts from the start of each segment.
          full_from: [B] or [B, segments] int32; queries of windowed layers at this position or later see everything.
        """
        if not isinstance(tokens, jax.core.Tracer):
            self.config.check_tokens(tokens, "tokens", batch=True)
        tokens = jnp.asarray(tokens)
        for name, array in (("segment_ids", segment_ids), ("positions", positions)):
            check_array(name, array, dict(zip("BT", tokens.shape, strict=True)), jnp.integer)
        positions = None if positions is None else jnp.asarray(positions)
        return self.logits(self.features(tokens, segment_ids, positions, full_from)[0])

    def features(
        self,
        tokens: jax.Array,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        full_from: jax.Array | None = None,
        *,
        data: LayerData | None = None,
        partition: Partition | None = None,
        training: TrainingPass = PLAIN,
        watch: Callable[[jax.Array, Any], Any] = lambda x, beside: None,
        beside: Any = None,
    ) -> tuple[jax.Array, Routing, Any]:
        """The normed hidden states [B, T, d], every layer's routing [L, B, T], and what was watched.

        Args:
          data: how each layer attends, in place of the pattern, so that a search over patterns compiles once.
          partition: the mesh that parameters and tokens lie on.
          training: what is saved for the backward pass, and LoRA's dropout.
          watch: what `watch(x, beside)` gives of the residual stream x [B, T, d] behind each layer is returned with an
            axis of layers in front, as `beside` has one, of which a layer gets its entry.
        """
        if 0 in tokens.shape:
            raise ValueError(f"tokens is [B, T] = {tokens.shape}: give at least one sequence of one token")
        context = self.context(tokens, segment_ids, positions, full_from, partition)
        remat, unroll, key = training
        keys = None if key is None else jax.random.split(key, self.config.num_hidden_layers)

        def layer(stream: Stream, block: Block, scanned: tuple) -> tuple[Stream, tuple[Routing, Any]]:
            row, key, beside = scanned
            if key is not None:
                seed_dropout(block, key)
            stream, routing = block(stream, row, context)
            return stream, (routing, watch(stream.x, beside))

        stream, data = self.begin(tokens, data, partition)
        stream, (routing, watched) = self.scan(
            layer, stream, (data, keys, beside), wrap=lambda f: rematerialised(f, remat), unroll=unroll
        )
        return self.norm(stream.x), routing, watched

    def begin(
        self, tokens: jax.Array, data: LayerData | None = None, partition: Partition | None = None
    ) -> tuple[Stream, LayerData]:
        """What the first layer reads of tokens [B, T], and the data of all layers (None: the pattern's), with what each
        layer reads of them."""
        x, data = self.embed(tokens, partition), data or known_layer_data(self.pattern, self.config)
        if self.config.hidden_size_per_layer_input:
            data = dataclasses.replace(data, inputs=self.layer_inputs(tokens, x, partition))
        return Stream.at_start(x, self.config), data

    def scan(self, layer: Callable, carry: Any, scanned: Any, **options: Any) -> tuple[Any, Any]:
        """`scan_layers` over the decoder's layers."""
        return scan_layers(self.config, self.layers, layer, carry, scanned, **options)

    def embed(self, tokens: jax.Array, partition: Partition | None = None) -> jax.Array:
        """tokens [B, T] int32 -> [B, T, d]."""
        x = rows_of(self.embedding[...], tokens, partition)
        if self.config.embedding_multiplier != 1:
            x = x * jnp.asarray(self.config.embedding_multiplier, x.dtype)
        return constrain(x, partition, "batch", "sequence", None)

    def head(self) -> jax.Array:
        """The output matrix [d, V]."""
        return self.embedding[...].T if self.config.tie_word_embeddings else self.lm_head.kernel[...]

    def logits(self, hidden: jax.Array) -> jax.Array:
        """hidden [..., d] -> logits [..., V] f32."""
        tied = self.config.tie_word_embeddings  # the table as it lies: a row times its transpose is a slow loop on CPUs
        matrix, axes = (self.embedding[...], "vd") if tied else (self.lm_head.kernel[...], "dv")
        logits = jnp.einsum(f"...d,{axes}->...v", hidden, matrix, preferred_element_type=jnp.float32)
        return scaled_logits(logits, self.config.logit_multiplier, self.config.logit_softcap)

    def token_loss(
        self,
        hidden: jax.Array,
        targets: jax.Array,
        weights: jax.Array,
        *,
        teacher: Teacher | TeacherStates | None = None,
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

    def with_pattern(self, pattern: AttentionPattern | str, *, rngs: nnx.Rngs | None = None) -> Decoder:
        """The same weights under another pattern (arrays are shared), or under a recipe, which takes the window of the
        pattern before. Routed layers get fresh routers from `rngs`."""
        pattern = _fitting(pattern, self.config, self.pattern.sliding_window)
        routed = SWITCH in pattern.layer_types
        dtype = self.embedding.get_value().dtype  # may be a shape alone
        other = nnx.eval_shape(lambda: Decoder(self.config, pattern, dtype=dtype, rngs=nnx.Rngs(0)))
        if (lora := self.lora) is not None:
            other = nnx.eval_shape(lambda: with_lora(other, lora, nnx.Rngs(0)))
        graph, wanted = nnx.split(other)
        mine = dict(nnx.to_flat_state(nnx.state(self)))
        if routed and not self.routed:
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
        layouts: tuple[CacheLayout, ...],
        *,
        partition: Partition | None = None,
    ) -> tuple[jax.Array, KVCache]:
        """Right-padded prompts [B, T] of `lengths` [B] -> logits after each last token [B, V] f32, the filled cache.

        `partition`, here and below: the mesh on which the parameters and the cache lie.
        """
        segments = (jnp.arange(tokens.shape[1])[None] < lengths[:, None]).astype(jnp.int32)
        full_from = self.pattern.full_from(lengths) if self.pattern.num_last_tokens else None
        context = self.context(
            tokens, segments, full_from=full_from, partition=partition, rope_length=layouts[0].max_length
        )
        context = dataclasses.replace(context, inference=True)
        ring = ring_positions(layouts[0], lengths)

        def attend(
            block: Block, stream: Stream, row: LayerData, pools: CachePools, place: LayerPlace
        ) -> tuple[jax.Array, CachePools, MadeKeys]:
            x, others = block.attention_input(stream.x), stream.read_by(block)
            mixed, _, (k, v) = block.attention(x, row, context, others)
            if block.attention.has_keys:
                pools = put_prompts(k, v, pools, place, ring, partition)
            return mixed, pools, (k, v)

        def linear(mixer: GatedDelta, x: jax.Array, _: LinearState) -> tuple[jax.Array, LinearState]:
            return mixer(x, count=lengths)

        cache = dataclasses.replace(cache, lengths=lengths)
        stream, cache = self._through_cache(attend, linear, tokens, cache, layouts, partition)
        last = jnp.take_along_axis(stream.x, lengths[:, None, None] - 1, axis=1)[:, 0]  # [B, d]
        return self.logits(self.norm(last)), cache

    def decode_step(
        self,
        tokens: jax.Array,
        cache: KVCache,
        layouts: tuple[CacheLayout, ...],
        full_from: jax.Array | None = None,
        *,
        active: jax.Array | None = None,
        partition: Partition | None = None,
    ) -> tuple[jax.Array, KVCache]:
        """One new token a sequence, tokens [B] -> logits [B, V] f32 of what follows, and the cache with it in.

        Args:
          full_from: [B] int32, where each sequence begins to see everything (`AttentionPattern.full_from`), else None.
          active: [B] bool; the cache of other sequences stays as it is, and their logits mean nothing. None: all.
        """
        context = self.context(
            tokens[:, None],
            positions=cache.lengths[:, None],
            full_from=full_from,
            partition=partition,
            rope_length=layouts[0].max_length,
        )
        lengths, layout = cache.lengths + 1, layouts[0]
        whole_entry, entry = cache.lengths, ring_entry(layout, cache.lengths)
        ring = ring_positions(layout, lengths)
        if active is not None:  # an entry that no pool has is not written
            whole_entry = jnp.where(active, whole_entry, layout.max_length)
            entry = jnp.where(active, entry, layout.ring_entries)
        step = DecodeStep(lengths, whole_entry, entry, ring)
        steps = []
        for pools, layout, group in zip(cache.pools, layouts, head_groups(self.config), strict=True):
            shape = tokens.shape[0], 1, group.num_attention_heads, layout.head_dim
            queries = jax.ShapeDtypeStruct(shape, self.embedding[...].dtype)
            steps.append(with_visits(step, queries, pools, layout, context))

        def linear(mixer: GatedDelta, x: jax.Array, before: LinearState) -> tuple[jax.Array, LinearState]:
            return mixer(x, before=before, count=None if active is None else active.astype(jnp.int32))

        attend = functools.partial(_attend_to_cache, decode_layer, context, layouts, steps)
        stream, cache = self._through_cache(attend, linear, tokens[:, None], cache, layouts, partition)
        lengths = lengths if active is None else jnp.where(active, lengths, cache.lengths)
        return self.logits(self.norm(stream.x[:, 0])), dataclasses.replace(cache, lengths=lengths)

    def extend(
        self,
        tokens: jax.Array,
        count: jax.Array,
        row: jax.Array,
        cache: KVCache,
        layouts: tuple[CacheLayout, ...],
        full_from: jax.Array | None = None,
        *,
        partition: Partition | None = None,
    ) -> tuple[jax.Array, KVCache]:
        """The next piece of one prompt: logits [V] f32 after its last token, and the cache with it in.

        Args:
          tokens: [C] int32, of which the first `count` (at least 1) are the piece. They stand behind the tokens that
            the cache holds of the sequence, and there must be room for `count` more.
          row: the number of the sequence in the cache.
          full_from: int32, where last tokens that see everything begin; None: there are none.
        """
        chunk = Chunk(row, cache.lengths[row], count)
        positions = chunk.start + jnp.arange(tokens.shape[0], dtype=jnp.int32)
        context = self.context(
            tokens[None],
            positions=positions[None],
            full_from=None if full_from is None else full_from[None],
            partition=partition,
            rope_length=layouts[0].max_length,
        )
        alone = None if partition is None else partition.of_one_row

        def linear(mixer: GatedDelta, x: jax.Array, before: LinearState) -> tuple[jax.Array, LinearState]:
            def put(every: jax.Array, one: jax.Array) -> jax.Array:
                return jax.lax.dynamic_update_slice_in_dim(every, one, row, 0)

            mine = (jax.lax.dynamic_slice_in_dim(state, row, 1) for state in before)
            known = LinearState(*(jnp.where(chunk.start > 0, state, 0) for state in mine))  # else another sequence's
            mixed, behind = mixer(x, before=known, count=count[None])
            return mixed, jax.tree.map(put, before, behind)

        attend = functools.partial(_attend_to_cache, extend_layer, context, layouts, [chunk] * len(layouts))
        stream, cache = self._through_cache(attend, linear, tokens[None], cache, layouts, alone)
        pools = list(cache.pools)
        for i, (made, layout) in enumerate(zip(stream.made, layouts, strict=False)):
            if layout.source is not None:
                pools[i] = put_rings(*made, pools[i], layout, chunk, partition)
        lengths = cache.lengths.at[row].add(count)
        return self.logits(self.norm(stream.x[0, count - 1])), KVCache(tuple(pools), lengths, cache.states)

    def _through_cache(
        self,
        attend: Callable[..., tuple[jax.Array, CachePools, MadeKeys]],
        linear: Callable[[GatedDelta, jax.Array, LinearState], tuple[jax.Array, LinearState]],
        tokens: jax.Array,
        cache: KVCache,
        layouts: tuple[CacheLayout, ...],
        partition: Partition | None,
    ) -> tuple[Stream, KVCache]:
        """The stream behind the last layer, and the cache with the tokens [B, T] in.

        `attend(block, stream, the layer's data, pools, place)` is the attention of a layer: what it gives [B, T, d],
        the pools of its group with its keys in, and those keys and values. `linear(mixer, what the layer reads
        [B, T, d], its state)` is the same of a linear layer: what it gives, and the state with the tokens in.
        """
        Carry = tuple[Stream, tuple[CachePools, ...], LinearState | None]

        def layer(carry: Carry, block: Block, scanned: tuple) -> tuple[Carry, None]:
            (stream, pools, states), (row, places, slot) = carry, scanned
            made: MadeKeys = (None, None)
            if (mixer := block.gated_delta) is not None:
                mixed, state = linear(mixer, block.attention_input(stream.x), jax.tree.map(lambda x: x[slot], states))
                states = jax.tree.map(lambda every, one: every.at[slot].set(one), states, state)
            else:
                mixed, own, made = attend(block, stream, row, pools[block.group], places[block.group])
                pools = tuple(own if i == block.group else other for i, other in enumerate(pools))
            x, _ = block.after_attention(stream.x, mixed, row, partition)
            return (stream.behind(block, x, *made), pools, states), None

        stream, data = self.begin(tokens, partition=partition)
        slots = None  # where the states of linear layers lie, by layer
        if linear_layers := self.config.linear_layers:
            slots = jnp.asarray(np.searchsorted(linear_layers, np.arange(self.config.num_hidden_layers)))
        scanned = data, tuple(map(layer_places, layouts)), slots
        (stream, pools, states), _ = self.scan(layer, (stream, cache.pools, cache.states), scanned)
        return stream, dataclasses.replace(cache, pools=pools, states=states)

    def context(
        self,
        tokens: jax.Array,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        full_from: jax.Array | None = None,
        partition: Partition | None = None,
        rope_length: int | None = None,
    ) -> AttentionContext:
        """What the layers of one pass over tokens [B, T] share; the arguments are those of `features`, and the length
        that RoPE goes by (`rope_frequencies`), which is T where it is not given."""
        rope: RopeTables = {}
        scale = None
        if self.config.uses_rope:
            rows = jnp.arange(tokens.shape[1])[None]
            counted = rows if segment_ids is None else segment_positions(segment_ids)
            rope_positions = counted if positions is None else positions
            length = rope_length or tokens.shape[1]
            tables = rope_tables(self.config, rope_positions, length, self.pattern.nope_full_layers)
            # Without the barrier, XLA makes them again in every layer of a loop.
            rope = jax.lax.optimization_barrier(tables)
            scale = query_scale(self.config, rope_positions)
        spec = model_spec(self.config, self.pattern)
        return AttentionContext(spec, rope, scale, segment_ids, positions, full_from, partition=partition)


def _attend_to_cache(
    attend: Callable[..., tuple[jax.Array, CachePools]],
    context: AttentionContext,
    layouts: tuple[CacheLayout, ...],
    at: Sequence[DecodeStep | Chunk],
    block: Block,
    stream: Stream,
    row: LayerData,
    pools: CachePools,
    place: LayerPlace,
) -> tuple[jax.Array, CachePools, MadeKeys]:
    """The attention of one layer for `Decoder._through_cache`, by `decode_layer` or `extend_layer`.

    Args:
      layouts, at: of each group of layers, the layout of its caches, and where the new tokens stand.
    """
    attention, x = block.attention, block.attention_input(stream.x)
    q, k, v = attention.qkv(x, row, context)
    _, gate = attention.route(x)
    call = LayerCall(
        attention.per_head(),
        *(q, k, v, stream.read_by(block), gate),
        *(pools, place, attention.full_heads(row), context.full_from, at[block.group]),
    )
    mixed, pools = attend(call, layouts[block.group], context)
    return attention.output(mixed, x), pools, (k, v)


def _fitting(pattern: AttentionPattern | str, config: ModelConfig, window: int | None = None) -> AttentionPattern:
    """A pattern for this model; a recipe means one with that window. Raises `ConfigError` where it does not fit."""
    if isinstance(pattern, str):
        pattern = AttentionPattern.from_recipe(pattern, config, sliding_window=window)
    elif not isinstance(pattern, AttentionPattern):
        raise ConfigError(f"model.pattern must be an AttentionPattern or a recipe, got {pattern!r:.80}")
    pattern.validate(config)
    return pattern
