"""The attention module of a decoder layer: projections, rotary embeddings, router, and the choice of kind.

Which kind a layer is comes as data (`LayerData`), scanned with the stacked weights, so one compiled layer serves
the whole depth; `lax.switch` runs only the kind that is asked for.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pallas_kernels import AttentionSpec, alibi_slopes
from pallas_kernels.dispatch import Implementation
from pallas_kernels.math.rotary import Rotation, rotate
from pallas_kernels.math.spec import Packing, PerHead
from swa_jax.model.config import ModelConfig
from swa_jax.model.experts import ExpertLoad
from swa_jax.model.head_norm import kernel_serves, normed_heads
from swa_jax.model.layer_stacks import nope_of_full_layers, rope_groups
from swa_jax.model.layer_types import CHUNKED, FULL, HYBRID, LAYER_TYPES, LINEAR, SWITCH, WINDOW
from swa_jax.model.layers import Norm, RopeTables, drawn, linear, rms_normed, rope_distance
from swa_jax.model.mesh_attention import StaticOptions, attention_on_mesh
from swa_jax.model.parameters import ROUTERS
from swa_jax.model.pattern import AttentionPattern
from swa_jax.model.sharding import Partition

# The scope of what lies between the projections: norms of heads, RoPE, layout, masks, kernels.
AROUND_ATTENTION = "around_attention"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerData:
    """What differs by layer, as data that is scanned with the weights; a layer gets its row of it."""

    kinds: tuple[str, ...] = dataclasses.field(metadata={"static": True})  # the layer types that are compiled
    kind: jax.Array  # [L] int32: index into `kinds`; of linear layers, which attend in no way, 0
    full_heads: jax.Array  # [L, K] bool: the KV heads that stay full, K being the most that a layer has
    rope: jax.Array  # [L] int32: index into the RoPE tables of the layer's head_dim
    inputs: jax.Array | None = None  # [L, B, T, P]: see `layer_inputs`; of the tokens, not of the pattern


class Routing(NamedTuple):
    """What a layer's routers did: SwiAttn's for every token [B, T], zeros where the layer is not routed; that of
    experts in all, None in a model without experts."""

    logit: jax.Array  # f32
    gate: jax.Array  # f32, exactly 0 or 1
    disagreement: jax.Array  # f32, mean squared O_full - O_window over heads and head_dim
    experts: ExpertLoad | None = None


@dataclasses.dataclass(frozen=True)
class AttentionContext:
    """What all layers of one forward pass share."""

    spec: AttentionSpec
    rope: RopeTables  # `LayerData.rope` indexes R; empty in a model without RoPE
    query_scale: jax.Array | None = None  # [B, T]: the factor on queries (`layers.query_scale`)
    segment_ids: jax.Array | None = None  # [B, T]
    positions: jax.Array | None = None  # [B, T], only when they are not those of the segments
    full_from: jax.Array | None = None  # [B] or [B, segments]
    implementation: Implementation | None = None
    inference: bool = False  # nothing is differentiated: tokens routed to the window skip the full branch
    partition: Partition | None = None  # the mesh that the arrays lie on

    @property
    def static(self) -> StaticOptions:
        return StaticOptions(self.spec, self.inference, self.implementation)

    @property
    def packing(self) -> Packing:
        """The packing of the queries; the keys are the same tokens."""
        return Packing(q_segment_ids=self.segment_ids, q_positions=self.positions, full_from=self.full_from)


def kinds_of(pattern: AttentionPattern) -> tuple[str, ...]:
    """The types of attention layers that occur in a pattern, in a fixed order."""
    return tuple(kind for kind in LAYER_TYPES if kind in pattern.layer_types and kind != LINEAR)


def layer_data(pattern: AttentionPattern, config: ModelConfig, kinds: tuple[str, ...] = ()) -> LayerData:
    """How each layer attends and is rotated; `kinds`: () compiles those of the pattern."""
    return jax.tree.map(jnp.asarray, known_layer_data(pattern, config, kinds))


def known_layer_data(pattern: AttentionPattern, config: ModelConfig, kinds: tuple[str, ...] = ()) -> LayerData:
    """`layer_data` in NumPy's arrays, which stay known where a step is traced."""
    kinds = kinds or kinds_of(pattern)
    full_heads = np.zeros((pattern.num_layers, config.most_kv_heads), bool)
    for layer, heads in enumerate(pattern.full_kv_heads):
        full_heads[layer, list(heads)] = True
    kind = np.array([0 if kind == LINEAR else kinds.index(kind) for kind in pattern.layer_types], np.int32)
    tables, sizes = rope_groups(config, pattern.nope_full_layers), (size for _, size in config.head_shapes)
    ropes = config.rope_kinds_by_layer
    if pattern.nope_full_layers:
        ropes = nope_of_full_layers(pattern.layer_types, ropes)
    layers = zip(ropes, sizes, strict=True)
    rope = np.array([tables[size].index(name) for name, size in layers], np.int32)
    return LayerData(kinds, *cast(Any, (kind, full_heads, rope)))


def model_spec(config: ModelConfig, pattern: AttentionPattern) -> AttentionSpec:
    """All that is static in a model's attention; whatever computes its attention, or scores it, starts from this."""
    return AttentionSpec(
        window=pattern.sliding_window,
        num_sink_tokens=pattern.num_sink_tokens if pattern.sliding_window else 0,
        activation=config.attention_activation,
        logit_softcap=config.attention_softcap,
        scale=config.attention_scale,
        chunked=pattern.chunked,
    )


def model_slopes(config: ModelConfig) -> jax.Array | None:
    """SWAT's balanced slopes [H] (Eq. 4), None for a model without ALiBi."""
    if not config.uses_alibi:
        return None
    return alibi_slopes(config.alibi_negative_heads, config.alibi_positive_heads, config.slope_schedule)


def model_per_head(config: ModelConfig, sink_logits: jax.Array | None = None) -> PerHead:
    """What a model's heads add to their logits; full heads and `sink_logits` [H] are the layer's."""
    bias = None
    if config.attention_activation == "sigmoid":
        bias = jnp.full(config.num_attention_heads, config.sigmoid_bias, jnp.float32)
    return PerHead(model_slopes(config), bias, sink_logits)


class Router(nnx.Module):
    """SwiAttn's router: one linear map of the normed hidden state to one logit a token, shared by all heads.

    Its parameters and its arithmetic are f32 in a model of any dtype: a logit near 0 that is rounded to bf16 can turn
    the gate over, and rounds to a multiple of 2^-8 of its size where the regulariser wants its value.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.proj = linear("layers.attention.router.proj", config, jnp.dtype(jnp.float32), rngs)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """x [B, T, d] of any dtype -> logit [B, T] f32 and straight-through gate [B, T] f32 (1 = full attention)."""
        assert self.proj.bias is not None
        kernel, bias = self.proj.kernel[...].astype(jnp.float32), self.proj.bias[...].astype(jnp.float32)
        # A TPU multiplies f32 in bf16 unless told otherwise.
        highest = jax.lax.Precision.HIGHEST
        logit = (jnp.matmul(x.astype(jnp.float32), kernel, precision=highest) + bias)[..., 0]
        soft = jax.nn.sigmoid(logit)
        # The brackets keep the gate exactly 0 or 1 in floating point while its gradient is the sigmoid's.
        return logit, (soft > 0.5).astype(jnp.float32) + (soft - jax.lax.stop_gradient(soft))


def cast_parameters(params: Any, dtype: jax.typing.DTypeLike) -> Any:
    """A tree of f32 parameters in `dtype`, but for the routers, which stay f32."""

    def one(path: tuple, leaf: jax.Array) -> jax.Array:
        names = [getattr(key, "key", getattr(key, "name", key)) for key in path]
        return leaf.astype(jnp.float32 if ROUTERS & {*names} else dtype)

    return jax.tree_util.tree_map_with_path(one, params)


# The keys and values [B, T, K, D] of a layer, which later ones may read.
KeysValues = tuple[jax.Array, jax.Array]
MadeKeys = tuple[jax.Array | None, jax.Array | None]  # as `Attention.qkv` gives them


class Attention(nnx.Module):
    """The attention of one layer, or of stacked layers that are alike (`layer_stacks`)."""

    def __init__(self, config: ModelConfig, routed: bool, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.config = config
        self.has_keys = not config.num_kv_shared_layers  # else it reads those of another layer
        self.q_proj = linear("layers.attention.q_proj", config, dtype, rngs)
        if self.has_keys:
            self.k_proj = linear("layers.attention.k_proj", config, dtype, rngs)
        if self.has_keys and not config.attention_k_eq_v:
            self.v_proj = linear("layers.attention.v_proj", config, dtype, rngs)
        self.o_proj = linear("layers.attention.o_proj", config, dtype, rngs)
        if config.qk_norm:
            self.q_norm = Norm("layers.attention.q_norm", config, dtype)
        if config.qk_norm and self.has_keys:
            self.k_norm = Norm("layers.attention.k_norm", config, dtype)
        if config.attention_gate in ("head", "channel"):
            self.g_proj = linear("layers.attention.g_proj", config, dtype, rngs)
        if config.sink_logits:
            self.sink_logits = drawn("layers.attention.sink_logits", config, dtype, rngs)
        if routed:
            self.router = Router(config, rngs)

    def qkv(
        self, x: jax.Array, row: LayerData, context: AttentionContext
    ) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
        """x [B, T, d] and this layer's data -> q [B, T, H, D], k and v [B, T, K, D], normed and rotated.

        k and v are None in a layer that reads those of another.
        """
        q, k, v, rotation = self.unrotated(x, row, context)
        return q if rotation is None else rotate(q, rotation), k, v

    def unrotated(
        self, x: jax.Array, row: LayerData, context: AttentionContext, kernel_norms: bool = False
    ) -> tuple[jax.Array, jax.Array | None, jax.Array | None, Rotation | None]:
        """As `qkv`, with queries that are still to be rotated by the last result; `kernel_norms`: see `head_norm`."""
        size, width = self.config.head_dim, self.width
        together = {"side_by_side": kernel_norms}
        q: Any = self.queries_and_gate(x)[0] if self.gated_by_queries else self.q_proj.to_heads(x, width, **together)
        k = self.k_proj.to_heads(x, width, **together) if self.has_keys else None
        v = self.v_proj.to_heads(x, self.config.v_head_dim or width) if hasattr(self, "v_proj") else k
        rotation = None
        with jax.named_scope(AROUND_ATTENTION):
            if self.config.qk_norm:
                norm = functools.partial(normed_heads, partition=context.partition) if kernel_norms else Norm.__call__
                q, k = norm(self.q_norm, q), k if k is None else norm(self.k_norm, k)
            if self.config.v_norm and v is not None:
                v = rms_normed(v, self.config.rms_norm_eps)
            if self.config.value_multiplier != 1 and v is not None:
                v = v * self.config.value_multiplier
            if self.config.v_head_dim is not None and v is not None:
                v = jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, size - self.config.v_head_dim)))
            if context.rope:
                tables = context.rope[size]
                one = tables[0].shape[0] == 1  # a constant index costs nothing
                cos, sin = (table[0 if one else row.rope] for table in tables)
                rotation = Rotation(cos, sin, rope_distance(self.config))
                k = k if k is None else rotate(k, rotation)
                if context.query_scale is not None:  # queries that are rotated are scaled with it
                    cos, sin = (table * context.query_scale[..., None] for table in (cos, sin))
                    rotation = Rotation(cos, sin, rope_distance(self.config))
        if width != size:
            q, k, v = jax.tree.map(lambda t: _kept_apart(t).reshape(*t.shape[:2], -1, size), (q, k, v))
        return q, k, v, rotation

    @property
    def width(self) -> int:
        """The channels of a row between the projections: two heads of 64 lie side by side in a register's lanes."""
        config = self.config
        even = config.num_attention_heads % 2 == config.num_key_value_heads % 2 == 0
        plain = not (config.qk_norm or self.gated_by_queries) and config.v_head_dim is None
        return 2 * config.head_dim if config.head_dim == 64 and even and plain else config.head_dim

    @property
    def gated_by_queries(self) -> bool:
        return self.config.attention_gate == "query"

    def queries_and_gate(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Both halves of the query projection of x [B, T, d], [B, T, H, D] each. XLA computes what is asked for twice
        once."""
        both, size = self.q_proj.to_heads(x, 2 * self.config.head_dim), self.config.head_dim
        return both[..., :size], both[..., size:]

    def full_heads(self, row: LayerData) -> jax.Array:
        """Which of the layer's KV heads stay full: [K] bool."""
        return row.full_heads[..., : self.config.num_key_value_heads]

    def route(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        if hasattr(self, "router"):
            return self.router(x)
        zeros = jnp.zeros(x.shape[:2], jnp.float32)
        return zeros, zeros

    def per_head(self) -> PerHead:
        """What this layer's heads add to their logits."""
        sinks = self.sink_logits[...].astype(jnp.float32) if self.config.sink_logits else None
        return model_per_head(self.config, sinks)

    def output(self, mixed: jax.Array, x: jax.Array) -> jax.Array:
        """What the heads say, [B, T, H, D], and attention's input x [B, T, d], which gates it -> [B, T, d]."""
        mixed = mixed[..., : self.config.v_head_dim]
        if self.config.attention_gate != "none":
            width = 1 if self.config.attention_gate == "head" else mixed.shape[-1]
            act = nnx.sigmoid if self.config.attention_gate_act == "sigmoid" else nnx.softplus
            gate = self.queries_and_gate(x)[1] if self.gated_by_queries else self.g_proj.to_heads(x, width)
            mixed = mixed * act(gate.astype(jnp.float32)).astype(mixed.dtype)  # the gate is [B, T, H, 1 or D]
        if self.width != self.config.head_dim:
            mixed = _kept_apart(mixed.reshape(*mixed.shape[:2], -1, self.width))
        return self.o_proj.from_heads(mixed)

    def __call__(
        self, x: jax.Array, row: LayerData, context: AttentionContext, others: KeysValues | None = None
    ) -> tuple[jax.Array, Routing, KeysValues]:
        """x [B, T, d] and this layer's data -> output [B, T, d], routing [B, T], (k, v) [B, T, K, D].

        `others` are the keys and values that a layer reads that has none of its own.
        """
        kernel_norms = not self.gated_by_queries and kernel_serves(
            self.config, x.shape[1], context.partition, context.implementation
        )
        q, k, v, rotation = self.unrotated(x, row, context, kernel_norms)
        k, v = own_or(others, k, v)
        logit, gate = self.route(x)
        heads, packing, static = self.per_head(), context.packing, context.static
        attend = functools.partial(attention_on_mesh, (q, rotation), k, v, partition=context.partition)
        # out [B, T, H, D] and the disagreement of the branches [B, T], by the layer's kind
        branches = {
            FULL: lambda: attend(heads, packing._replace(full_from=None), static._replace(spec=static.spec.full)),
            WINDOW: lambda: attend(heads, packing, static),
            HYBRID: lambda: attend(heads._replace(full_heads=self.full_heads(row)), packing, static),
            SWITCH: lambda: attend(heads, packing, static, gate),
        }
        branches[CHUNKED] = branches[WINDOW]
        with jax.named_scope(AROUND_ATTENTION):
            mixed, disagreement = choose(row.kind, [branches[kind] for kind in row.kinds])
        routed = (row.kind == row.kinds.index(SWITCH)).astype(jnp.float32) if SWITCH in row.kinds else 0.0
        routing = Routing(logit * routed, gate * routed, disagreement)
        return self.output(mixed, x), routing, (k, v)


# XLA would give a projection the shape of the single heads that lie behind it, and copy what it gives for the kernels.
_kept_apart = jax.lax.optimization_barrier


def own_or(others: KeysValues | None, k: jax.Array | None, v: jax.Array | None) -> KeysValues:
    """The keys and values of a layer, or those of another where it has none."""
    found = others if k is None or v is None else (k, v)
    assert found is not None, "no layer before it has keys"
    return found


def choose(index: jax.Array | np.integer, branches: list[Any]) -> Any:
    """Run one branch; only the chosen one costs anything. An index that is known is followed when this is traced."""
    if len(branches) == 1:
        return branches[0]()
    return branches[index]() if isinstance(index, np.integer) else jax.lax.switch(index, branches)
