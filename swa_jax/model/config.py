"""The configuration of a decoder."""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike

from swa_jax.base.errors import ConfigError
from swa_jax.base.settings import check_choices, nearest
from swa_jax.model.rope_scaling import RopeScaling as RopeScaling
from swa_jax.model.rope_scaling import check_bounds as _check_bounds

RopeKind = Literal["global", "local", "none"]
ROPE_KINDS: tuple[RopeKind, ...] = get_args(RopeKind)
MlpKind = Literal["dense", "sparse"]
XIELU_SLOPE, XIELU_BETA = 0.8, 0.5  # of "xielu": the slopes where training begins, and what stays

# What a trained model may have: beyond it, numbers overflow, or a factor does nothing or everything.
_BOUNDS = {
    "rope_theta": (2, 1e12),
    "local_rope_theta": (2, 1e12),
    "rms_norm_eps": (1e-20, 0.5),
    "initializer_range": (0, 10),
    **dict.fromkeys(
        (
            "attention_scale", "attention_softcap", "logit_softcap", "embedding_multiplier", "residual_multiplier",
            "logit_multiplier", "expert_multiplier", "mixture_multiplier", "router_logit_softcap", "value_multiplier",
            "swiglu_limit", "swiglu_alpha",
        ),
        (1e-6, 1e6),
    ),
    **dict.fromkeys(("sigmoid_bias", "router_bias_init"), (-1e6, 1e6)),
    **dict.fromkeys(("max_position_embeddings", "vocab_size"), (1, 2**31 - 1)),
    "hidden_size_per_layer_input": (0, 2**31 - 1),
    "linear_conv_kernel_dim": (2, 1024),
}  # fmt: skip
# What layers with "global" rotary embeddings may have of their own; None: as the others.
GLOBAL_FIELDS = (
    "global_head_dim", "num_global_key_value_heads", "num_global_attention_heads", "global_partial_rotary_factor",
    "global_sink_logits",
)  # fmt: skip
MOST_EXPERTS = 1_000_000  # in all layers together


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """What a decoder computes, whatever family it is of; field names are Hugging Face's where it has one.

    `model_type` is for `config.json` alone: the decoder reads the other fields. `position_embedding`,
    `attention_activation` and the ALiBi fields are SWAT's (Eq. 4 and 5): "alirope" means balanced ALiBi and RoPE
    together. `alibi_negative_heads` + `alibi_positive_heads` must be all query heads.

    Attributes:
      rope_layers: the rotary embedding of each layer: "global" (`rope_theta`, `rope_scaling`), "local"
        (`local_rope_theta`, unscaled) or "none". It belongs to the layer's weights, so it stays as it is when a
        pattern makes the layer full or windowed. () means "global" in every layer.
      rope_interleaved: channels 2 c and 2 c + 1 rotate together (Cohere), not c and c + rotary_dim / 2.
      partial_rotary_factor: the share of a head's channels, from the first on, that is rotated (Phi-4-mini).
      norm_type, norm_bias: root mean square, or "layer": a LayerNorm (Cohere); with a bias (StarCoder2) or without.
      norm_placement: norms before attention and MLP ("pre"), on what they give, before it is added to the residual
        stream ("post", OLMo 2), or both ("sandwich", Gemma 2). "parallel": one norm before attention and MLP, which
        both read and whose outputs are added to the residual stream together (Cohere).
      norm_unit_offset: norms multiply with 1 + scale (Gemma).
      global_head_dim, num_global_key_value_heads, num_global_attention_heads, global_partial_rotary_factor,
        global_sink_logits: `head_dim` and so on of layers whose rotary embedding is "global" in a model that also has
        "local" ones (Gemma 4, Laguna, MiMo-V2); None: as in the others.
      v_head_dim, value_multiplier: the channels of a value where they are fewer than `head_dim`, and a factor on values
        (MiMo-V2). Values have `head_dim` channels from the projection to the output, the last of which are 0.
      attention_k_eq_v: "global" layers have no value projection: their keys, before norm and rotation, are the values.
      num_kv_shared_layers, use_double_wide_mlp: so many last layers have no keys and values, but read those of the last
        layer before them that has the same rotary embedding (Gemma 3n). Their MLPs may be twice as wide.
      v_norm: values are normed head by head, without a scale.
      hidden_size_per_layer_input, vocab_size_per_layer_input: the width of what each layer reads of a token besides,
        and the rows of its table (`layer_inputs`). 0: there is no such input.
      layer_scalar: what a layer gives is multiplied with a stored number, which training leaves as it is (Gemma 4).
      qk_norm, qk_norm_over: whether queries and keys are normed, and over what: each head on its own (Qwen3), or the
        whole projection at once (OLMo 2).
      attention_scale: the factor on q.k; None is 1 / sqrt(head_dim).
      attention_softcap, logit_softcap: c in c * tanh(x / c), on attention logits and on the output logits (Gemma 2).
      embedding_multiplier, residual_multiplier, logit_multiplier: factors on the embeddings, on what attention and MLP
        add to the residual stream, and on the output logits before their softcap (Granite, Gemma, Cohere).
      gated_mlp: MLPs compute down(hidden_act(gate) * up), or without a gate down(hidden_act(up)) (StarCoder2). "xielu",
        whose shape each layer learns, is for the second (Apertus).
      sink_logits: each head has a learned logit that enters the denominator of its softmax only (gpt-oss).
      attention_gate, attention_gate_act: what a head says is multiplied with a function of a projection of attention's
        input: one number a head, or one a channel (AFMoE). "none": it is not. "query": one a channel, from the second
        half of what the query projection gives each head (Qwen3.5).
      linear_layers: the numbers of the layers that mix tokens by Gated DeltaNet (`gated_delta`) and have no attention.
      linear_num_key_heads, linear_num_value_heads, linear_key_head_dim, linear_value_head_dim, linear_conv_kernel_dim:
        their heads, several of values to one of keys, the channels of a head, and the tokens of the convolution.
      num_experts, num_experts_per_tok, moe_intermediate_size: the experts of a layer's MLP, how many of them a token
        meets, and the width of one. 0 experts: dense MLPs of width `intermediate_size`.
      router_scores, router_choice_bias: what a router makes of its logits: probabilities, or each logit's own sigmoid.
        The experts with the greatest scores are chosen; with a choice bias, a number for each expert is added for that
        choice alone (DeepSeek-V3, arXiv:2412.19437, Eq. 16).
      expert_groups, expert_groups_per_tok: experts are chosen from the best of several groups of equal size; a group
        counts as much as its two best experts (DeepSeek-V3). 1 group: among all.
      router_logit_softcap: c in c * tanh(x / c), on a router's logits (Laguna).
      norm_topk_prob: the weights of a token's experts, which are their scores, are divided by their sum.
      expert_multiplier, mixture_multiplier: factors on those weights, and on what all experts give, the shared one
        included (Cohere 2 MoE takes the mean of both).
      shared_expert_intermediate_size: the width of an expert that every token meets; 0: there is none.
      mlp_layer_types: "dense" or "sparse" (experts) for each layer; () means that all are alike.
      experts_beside_mlp: layers with experts also have a dense MLP. What both give is normed and added; experts and
        their router read the residual stream, normed for each of them, and every expert has a learned factor (Gemma 4).
      fused_experts: the gate and up projections of all experts of a layer are one tensor, their columns by turns
        (gpt-oss).
      swiglu_limit, swiglu_alpha: MLPs compute (up + 1) * gate * sigmoid(alpha * gate), gate and up cut off at the limit
        (gpt-oss). None: they compute up * hidden_act(gate).
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    model_type: str = "llama"
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rope_layers: tuple[RopeKind, ...] = ()
    local_rope_theta: float = 10000.0
    rope_interleaved: bool = False
    partial_rotary_factor: float = 1.0
    attention_bias: bool = False  # on q, k, v
    attention_out_bias: bool = False  # on o (Llama's attention_bias sets both)
    mlp_bias: bool = False
    hidden_act: Literal["silu", "gelu_tanh", "xielu"] = "silu"
    gated_mlp: bool = True
    norm_type: Literal["rms", "layer"] = "rms"
    norm_bias: bool = False
    norm_placement: Literal["pre", "post", "sandwich", "parallel"] = "pre"
    norm_unit_offset: bool = False
    global_head_dim: int | None = None
    num_global_key_value_heads: int | None = None
    num_global_attention_heads: int | None = None
    global_partial_rotary_factor: float | None = None
    global_sink_logits: bool | None = None
    v_head_dim: int | None = None
    value_multiplier: float = 1.0
    attention_k_eq_v: bool = False
    num_kv_shared_layers: int = 0
    use_double_wide_mlp: bool = False
    v_norm: bool = False
    hidden_size_per_layer_input: int = 0
    vocab_size_per_layer_input: int = 0
    layer_scalar: bool = False
    qk_norm: bool = False
    qk_norm_over: Literal["head", "projection"] = "head"
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logit_multiplier: float = 1.0
    tie_word_embeddings: bool = False
    sink_logits: bool = False
    attention_gate: Literal["none", "head", "channel", "query"] = "none"
    attention_gate_act: Literal["sigmoid", "softplus"] = "sigmoid"
    linear_layers: tuple[int, ...] = ()
    linear_num_key_heads: int = 1
    linear_num_value_heads: int = 1
    linear_key_head_dim: int = 1
    linear_value_head_dim: int = 1
    linear_conv_kernel_dim: int = 4
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    router_scores: Literal["softmax", "sigmoid"] = "softmax"
    router_choice_bias: bool = False
    router_logit_softcap: float | None = None
    expert_groups: int = 1
    expert_groups_per_tok: int = 1
    norm_topk_prob: bool = False
    expert_multiplier: float = 1.0
    mixture_multiplier: float = 1.0
    shared_expert_intermediate_size: int = 0
    mlp_layer_types: tuple[MlpKind, ...] = ()
    experts_beside_mlp: bool = False
    fused_experts: bool = False
    swiglu_limit: float | None = None
    swiglu_alpha: float = 1.702
    initializer_range: float = 0.02
    attention_activation: Literal["softmax", "sigmoid"] = "softmax"
    position_embedding: Literal["rope", "alibi", "alirope", "none"] = "rope"
    alibi_negative_heads: int = 0
    alibi_positive_heads: int = 0
    slope_schedule: Literal["swat", "press", "reference"] = "swat"
    sigmoid_bias: float = 0.0
    router_bias_init: float = 0.0

    def __post_init__(self) -> None:
        check_choices(self)
        for name in (
            "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_theta",
            "local_rope_theta", "partial_rotary_factor", "attention_scale", "attention_softcap", "logit_softcap",
            "swiglu_limit", "global_head_dim", "num_global_key_value_heads", "num_global_attention_heads",
            "global_partial_rotary_factor", "v_head_dim", "linear_num_key_heads", "linear_num_value_heads",
            "linear_key_head_dim", "linear_value_head_dim",
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} must be above 0, got {value}")
        _check_bounds(self, _BOUNDS)
        alike = set(self.rope_layers) == {"global"}  # one spelling, so that equal models are equal
        object.__setattr__(self, "rope_layers", () if alike else tuple(self.rope_layers))
        if self.rope_layers and len(self.rope_layers) != self.num_hidden_layers:
            raise ConfigError(
                f"rope_layers has {len(self.rope_layers)} entries for {self.num_hidden_layers} layers: give one a layer"
            )
        for i, kind in enumerate(self.rope_layers):
            if kind not in ROPE_KINDS:
                raise ConfigError(f"rope_layers[{i}] is '{kind}'{nearest(kind, ROPE_KINDS)}")
        both = self.num_global_attention_heads, self.num_global_key_value_heads
        for word, heads, kv_heads in (("", None, None), ("global_", *both)):
            heads, kv_heads = heads or self.num_attention_heads, kv_heads or self.num_key_value_heads
            if heads % kv_heads:
                raise ConfigError(
                    f"num_{word}attention_heads ({heads}) must be a multiple of num_{word}key_value_heads ({kv_heads})"
                )
        if self.v_head_dim is not None and self.v_head_dim > self.head_dim:
            raise ConfigError(f"v_head_dim ({self.v_head_dim}) must be at most head_dim ({self.head_dim})")
        self._check_linear()
        self._check_shared()
        if self.hidden_size_per_layer_input and self.vocab_size_per_layer_input < 1:
            raise ConfigError("vocab_size_per_layer_input must be above 0 where layers have inputs of their own")
        alibi_heads = self.alibi_negative_heads + self.alibi_positive_heads
        if self.uses_alibi and alibi_heads != self.num_attention_heads:
            raise ConfigError(
                f"alibi_negative_heads ({self.alibi_negative_heads}) + alibi_positive_heads "
                f"({self.alibi_positive_heads}) must equal num_attention_heads ({self.num_attention_heads})"
            )
        if self.uses_rope:
            self._check_rope()
        if self.sink_logits and self.attention_activation != "softmax":
            raise ConfigError("sink_logits enter the denominator of a softmax: set attention_activation to softmax")
        if self.hidden_act == "xielu" and (self.gated_mlp or self.num_experts):
            raise ConfigError("hidden_act 'xielu' is for dense MLPs without a gate: set gated_mlp to false")
        self._check_experts()

    def refuse_linear(self, what: str) -> None:
        """Raise `ConfigError` for a model with linear layers, for which `what` is not made yet."""
        if self.linear_layers:
            raise ConfigError(
                f"{what} is not made yet for models with linear layers, such as {self.model_type}: import, patterns, "
                "generation, evaluation and selection of layers are"
            )

    def _check_linear(self) -> None:
        object.__setattr__(self, "linear_layers", tuple(sorted({*self.linear_layers})))
        for layer in self.linear_layers:
            if not 0 <= layer < self.num_hidden_layers:
                raise ConfigError(f"linear_layers names layer {layer}, the model has 0 to {self.num_hidden_layers - 1}")
        if self.linear_num_value_heads % self.linear_num_key_heads:
            raise ConfigError(
                f"linear_num_value_heads ({self.linear_num_value_heads}) must be a multiple of linear_num_key_heads "
                f"({self.linear_num_key_heads})"
            )
        if self.attention_gate == "query" and self.v_head_dim is not None:
            raise ConfigError("attention_gate 'query' gives a gate of head_dim channels: leave v_head_dim out")
        if self.linear_layers and (self.num_kv_shared_layers or self.heads_differ):
            raise ConfigError("linear_layers needs attention layers whose heads are alike, each with keys of its own")

    def _check_shared(self) -> None:
        layers, shared = self.num_hidden_layers, self.num_kv_shared_layers
        if not 0 <= shared <= layers:
            raise ConfigError(f"num_kv_shared_layers must be from 0 to num_hidden_layers ({layers}), got {shared}")
        kinds = self.rope_kinds_by_layer
        if shared and "none" in kinds:
            raise ConfigError("num_kv_shared_layers needs layers whose rotary embeddings are 'global' or 'local'")
        for kind in {*kinds[layers - shared :]} - {*kinds[: layers - shared]} if shared < layers else ():
            raise ConfigError(
                f"num_kv_shared_layers is {shared}, but none of the other layers has the rotary embedding '{kind}', so "
                "that there are no keys for those that have it: make it smaller"
            )

    def _check_rope(self) -> None:
        for factor in (self.partial_rotary_factor, self.global_partial_rotary_factor or 1.0):
            if factor > 1:
                raise ConfigError(f"partial_rotary_factor is a share of head_dim, at most 1; got {factor:g}")
        if self.rotary_dim < 2 or self.rotary_dim % 2:
            part = f" * partial_rotary_factor ({self.partial_rotary_factor:g})"
            raise ConfigError(
                f"head_dim ({self.head_dim}){part if self.partial_rotary_factor < 1 else ''} must be even for rotary "
                "embeddings"
            )
        if self.rope_scaling is not None and self.rope_scaling.rope_type == "longrope":
            for name in ("short_factor", "long_factor"):
                factors = getattr(self.rope_scaling, name)
                if len(factors) != self.rotary_dim // 2 or not all(1e-3 <= factor <= 1e4 for factor in factors):
                    raise ConfigError(
                        f"rope_scaling.{name} must have {self.rotary_dim // 2} numbers above 0, at most 1e4, one for "
                        f"each pair of channels that is rotated, got {str(list(factors))[:200]}"
                    )

    def _check_experts(self) -> None:
        kinds = tuple(self.mlp_layer_types)
        alike = kinds == ("sparse",) * self.num_hidden_layers  # one spelling, so that equal models are equal
        object.__setattr__(self, "mlp_layer_types", () if alike else kinds)
        if self.num_experts and not 1 <= self.num_experts_per_tok <= self.num_experts:
            raise ConfigError(
                f"num_experts_per_tok must be from 1 to num_experts ({self.num_experts}), "
                f"got {self.num_experts_per_tok}"
            )
        if self.num_experts and self.moe_intermediate_size < 1:
            raise ConfigError(f"moe_intermediate_size must be above 0, got {self.moe_intermediate_size}")
        if self.shared_expert_intermediate_size < 0:
            raise ConfigError(
                f"shared_expert_intermediate_size must be 0 or more, got {self.shared_expert_intermediate_size}"
            )
        self._check_groups()
        if self.num_experts * self.num_hidden_layers > MOST_EXPERTS:
            raise ConfigError(
                f"num_experts ({self.num_experts}) in {self.num_hidden_layers} layers: more than {MOST_EXPERTS} in all"
            )
        if self.num_experts < 0 or (self.num_experts == 0 and "sparse" in self.mlp_layer_types):
            raise ConfigError(
                f"num_experts must be above 0 for the experts that mlp_layer_types asks for, or 0 for none; "
                f"got {self.num_experts}"
            )
        if self.mlp_layer_types and len(self.mlp_layer_types) != self.num_hidden_layers:
            raise ConfigError(
                f"mlp_layer_types has {len(self.mlp_layer_types)} entries for {self.num_hidden_layers} layers: "
                "give one a layer"
            )
        for i, kind in enumerate(self.mlp_layer_types):
            if kind not in get_args(MlpKind):
                raise ConfigError(f"mlp_layer_types[{i}] is '{kind}'{nearest(kind, get_args(MlpKind))}")
        if self.num_experts and not self.sparse_layers:
            raise ConfigError("mlp_layer_types is 'dense' in every layer: set num_experts to 0")

    def _check_groups(self) -> None:
        groups, chosen = self.expert_groups, self.expert_groups_per_tok
        if not self.num_experts or groups == chosen == 1:
            return
        if not 1 <= chosen <= groups or self.num_experts % groups or self.num_experts < 2 * groups:
            raise ConfigError(
                f"expert_groups ({groups}) must cut num_experts ({self.num_experts}) into equal groups of at least 2, "
                f"and expert_groups_per_tok must be from 1 to expert_groups, got {chosen}"
            )
        if chosen * (self.num_experts // groups) < self.num_experts_per_tok:
            raise ConfigError(
                f"expert_groups_per_tok ({chosen}) of {self.num_experts // groups} experts each are fewer than "
                f"num_experts_per_tok ({self.num_experts_per_tok})"
            )

    def check_tokens(self, tokens: ArrayLike, name: str, *, batch: bool = False) -> None:
        """Raise `ConfigError` if an array of token ids, which `name` stands for, holds one that has no embedding, or is
        no batch [B, T] where one is asked for."""
        try:
            ids = np.asarray(tokens)
        except ValueError:
            raise ConfigError(f"{name} must hold sequences of one length: pad them, and give segment_ids") from None
        if not ids.ndim:
            raise ConfigError(f"{name} must be a list of token ids, got {tokens!r:.40}")
        if batch and ids.ndim != 2:
            one = f"; for one sequence write {name}[None]" if ids.ndim == 1 else ""
            raise ConfigError(f"{name} must be a batch of sequences, [B, T], got the shape {ids.shape}{one}")
        if not np.issubdtype(ids.dtype, np.integer) and ids.size:
            raise ConfigError(f"{name} must hold token ids, which are whole numbers, got {ids.dtype}")
        wrong = (ids < 0) | (ids >= self.vocab_size)
        if wrong.any():
            place = ", ".join(map(str, np.argwhere(wrong)[0]))
            raise ConfigError(
                f"{name} holds token {ids[wrong][0]} at [{place}], the model's vocabulary has ids 0 to "
                f"{self.vocab_size - 1}"
            )

    @property
    def rope_kinds_by_layer(self) -> tuple[RopeKind, ...]:
        every: tuple[RopeKind, ...] = ("global",)
        return self.rope_layers or every * self.num_hidden_layers

    @functools.cached_property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers that are not linear: those that a pattern speaks of."""
        return tuple(layer for layer in range(self.num_hidden_layers) if layer not in self.linear_layers)

    @property
    def linear_channels(self) -> int:
        """The channels of the convolution of a linear layer."""
        queries_and_keys = 2 * self.linear_num_key_heads * self.linear_key_head_dim
        return queries_and_keys + self.linear_num_value_heads * self.linear_value_head_dim

    @functools.cached_property
    def mlp_kinds(self) -> tuple[MlpKind, ...]:
        return self.mlp_layer_types or ("sparse" if self.num_experts else "dense",) * self.num_hidden_layers

    @property
    def has_mlps(self) -> bool:
        """Whether there is a dense MLP: in layers without experts, or beside them."""
        return "dense" in self.mlp_kinds or self.experts_beside_mlp

    @property
    def heads_differ(self) -> bool:
        """Whether layers with "global" rotary embeddings have heads of another kind than the others."""
        differ = any(getattr(self, name) is not None for name in GLOBAL_FIELDS)
        return bool(self.rope_layers) and (differ or self.attention_k_eq_v or self.num_kv_shared_layers > 0)

    @functools.cached_property
    def head_shapes(self) -> tuple[tuple[int, int], ...]:
        """The number of KV heads and the channels of a head, of each layer."""
        own = (self.num_key_value_heads, self.head_dim)
        other = (self.num_global_key_value_heads or own[0], self.global_head_dim or own[1])
        if not self.heads_differ:
            return (own,) * self.num_hidden_layers
        return tuple(other if kind == "global" else own for kind in self.rope_layers)

    @property
    def query_heads(self) -> tuple[int, ...]:
        """The number of query heads of each layer."""
        own = self.num_attention_heads
        other = self.num_global_attention_heads or own
        return tuple(other if kind == "global" and self.heads_differ else own for kind in self.rope_kinds_by_layer)

    @property
    def most_kv_heads(self) -> int:
        """The KV heads of a layer; the most of any where they differ."""
        return max(kv_heads for kv_heads, _ in self.head_shapes)

    @property
    def common_kv_heads(self) -> int:
        """The KV heads of every layer, for what chooses among them; `ConfigError` where layers have other numbers."""
        counts = sorted({kv_heads for kv_heads, _ in self.head_shapes})
        if len(counts) > 1:
            raise ConfigError(
                f"layers of this model have {' or '.join(map(str, counts))} KV heads: single heads are chosen where "
                "all layers have as many, so choose whole layers"
            )
        return counts[0]

    @functools.cached_property
    def kv_sources(self) -> tuple[int, ...]:
        """For each layer the one whose keys and values it reads: itself, or one before it; -1 where there is none, as
        in linear layers."""
        kinds, own = self.rope_kinds_by_layer, self.num_hidden_layers - self.num_kv_shared_layers
        last = {kind: layer for layer, kind in enumerate(kinds[:own])}
        sources = [layer if layer < own else last.get(kinds[layer], -1) for layer in range(len(kinds))]
        return tuple(-1 if layer in self.linear_layers else source for layer, source in enumerate(sources))

    @property
    def rotary_dim(self) -> int:
        """The channels of a head that rotary embeddings rotate."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def long_rope_after(self) -> int | None:
        """Rows and caches longer than this have LongRoPE's long frequencies; None: length changes nothing."""
        scaling = self.rope_scaling
        if not self.uses_rope or scaling is None or scaling.rope_type != "longrope":
            return None
        return scaling.original_max_position_embeddings or self.max_position_embeddings

    @property
    def uses_rope(self) -> bool:
        return self.position_embedding in ("rope", "alirope")

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """The layers whose MLP is a mixture of experts."""
        return tuple(layer for layer, kind in enumerate(self.mlp_kinds) if kind == "sparse")

    @property
    def dense_layers(self) -> tuple[int, ...]:
        return tuple(sorted({*range(self.num_hidden_layers)} - {*self.sparse_layers}))

    @property
    def uses_alibi(self) -> bool:
        return self.position_embedding in ("alibi", "alirope")

    def with_yarn(self, factor: float) -> ModelConfig:
        """The same model with its context stretched `factor` times by YaRN (arXiv:2309.00071); no weight changes.

        Raises:
          ConfigError: a factor that is not above 1, a model without RoPE, or one that scales its RoPE already.
        """
        if not factor > 1:
            raise ConfigError(f"YaRN stretches the context: its factor must be above 1, got {factor:g}")
        if not self.uses_rope:
            raise ConfigError(f"position_embedding is '{self.position_embedding}': YaRN needs rotary embeddings")
        if self.rope_scaling is not None:
            raise ConfigError(
                f"the model scales its rotary embeddings already ({self.rope_scaling.rope_type}, factor "
                f"{self.rope_scaling.factor:g}): change rope_scaling in its config.json instead"
            )
        original = self.max_position_embeddings
        scaling = RopeScaling("yarn", factor, original_max_position_embeddings=original)
        return dataclasses.replace(self, max_position_embeddings=round(original * factor), rope_scaling=scaling)
