"""Every parameter of the decoder, declared once: its place, shape, axes, initializer and Hugging Face name.

The modules are built from these rows, and everything else that knows parameters reads them: the tensor names of
checkpoints, the layout on a mesh, LoRA's targets and size, the count of operations, and the optimizer's groups.
The idea is that of `ArrayInfo` in jax-llm-examples.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn.initializers import Initializer

from swa_jax.model.config import XIELU_BETA, XIELU_SLOPE, ModelConfig
from swa_jax.model.draws import normal
from swa_jax.model.layer_stacks import layer_stacks

Axes = tuple[str | None, ...]  # by axis of an array, the dimension that `ShardingRules` may split, or None
ROUTERS = frozenset(("router", "expert_router"))  # modules whose parameters are f32 in a model of any dtype
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"  # Hugging Face's names


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One parameter of the decoder."""

    path: tuple[str, ...]  # its place in the decoder's tree
    shape: tuple[int, ...]  # of one layer, where `layers` are stacked
    axes: Axes  # those of `shape`
    init: Initializer  # draws it: `init(key, shape, dtype)`
    # Hugging Face's name, with `{layer}` for the layer's number, and `{expert}` where a checkpoint has a tensor for
    # each expert (the first axis of `shape`).
    hf_name: str
    layers: tuple[int, ...] | None = None  # that are stacked on an axis in front of `shape`; None: it is in no layer
    transposed: bool = False  # a linear map, [in, out] here and [out, in] in Hugging Face's checkpoints
    # A projection of a layer, [in, out] in its last two axes: every token is multiplied with it, weight decay and Muon
    # are for it, and LoRA can adapt it.
    matrix: bool = False
    output: bool = False  # the matrix, or the tied embedding, that makes logits
    experts_per_token: int | None = None  # of a parameter of experts, [E, ...]: how many of them a token meets
    stack: str = ""  # the name of its `LayerStack`, which is in `path`; "" where all layers are alike

    @property
    def role(self) -> str:
        """Its name in a model whose layers are all alike."""
        return ".".join(part for part in self.path if part != self.stack)

    @property
    def name(self) -> str:
        return ".".join(self.path)

    @property
    def projection(self) -> str | None:
        """The module that LoRA can adapt, such as "q_proj"; None for what is no projection [in, out], and for experts,
        the shared one included."""
        return self.path[-2] if self.matrix and "experts" not in self.path else None

    @property
    def stacked_shape(self) -> tuple[int, ...]:
        return self.shape if self.layers is None else (len(self.layers), *self.shape)

    @property
    def stacked_axes(self) -> Axes:
        return self.axes if self.layers is None else (None, *self.axes)

    @property
    def size(self) -> int:
        """Numbers in it, those of all layers."""
        return math.prod(self.stacked_shape)

    @property
    def active_size(self) -> int:
        """Numbers in it that one token meets."""
        return self.size if self.experts_per_token is None else self.size // self.shape[0] * self.experts_per_token


def parameters(config: ModelConfig, routed: bool = False) -> tuple[Parameter, ...]:
    """Every parameter of a model, in the order of its checkpoints; `routed` adds the routers of switch layers."""
    d, vocab, tied = config.hidden_size, config.vocab_size, config.tie_word_embeddings
    layer = [
        dataclasses.replace(
            row,
            path=("layers", *([like.name] if like.name else []), *row.path),
            layers=like.layers,
            stack=like.name,
            hf_name=f"model.layers.{{layer}}.{row.hf_name}",
        )
        for like in layer_stacks(config)
        for row in _layer(like.config, routed)
    ]
    draw = normal(config.initializer_range)
    return (
        Parameter(("embedding",), (vocab, d), ("vocab", "embed"), draw, EMBEDDING, output=tied),
        *_layer_inputs(config),
        *layer,
        *_norm("norm", "model.norm", d, config),
        *([] if tied else _linear("lm_head", "lm_head", (d, vocab), ("embed", "vocab"), config, output=True)),
    )


def _layer(config: ModelConfig, routed: bool) -> list[Parameter]:
    """The parameters of a layer, in a model whose layers are all alike."""
    rows = [*_norms(config), *(_gated_delta(config) if config.linear_layers else _attention(config, routed))]
    if config.has_mlps:
        rows += _mlp(config)
    if config.num_experts:
        rows += _experts(config)
    if width := config.hidden_size_per_layer_input:
        d, path = config.hidden_size, "input_reader"
        rows += _projection(f"{path}.gate", "per_layer_input_gate", (d, width), ("embed", None), False, config)
        rows += _projection(f"{path}.projection", "per_layer_projection", (width, d), (None, "embed"), False, config)
        rows += _norm(f"{path}.norm", "post_per_layer_input_norm", d, config)
    if config.layer_scalar:
        rows.append(Parameter(("layer_scalar",), (1,), (None,), nnx.initializers.ones, "layer_scalar"))
    return rows


def _layer_inputs(config: ModelConfig) -> list[Parameter]:
    """What makes the inputs of single layers."""
    if not config.hidden_size_per_layer_input:
        return []
    d, path = config.hidden_size, "layer_inputs"
    width = config.num_hidden_layers * config.hidden_size_per_layer_input
    draw, table = normal(config.initializer_range), (config.vocab_size_per_layer_input, width)
    hf_name = "model.embed_tokens_per_layer.weight"
    projection = "model.per_layer_model_projection"
    return [
        Parameter((path, "embedding"), table, ("vocab", "embed"), draw, hf_name),
        *_linear(f"{path}.projection", projection, (d, width), ("embed", None), config, matrix=True),
        *_norm(f"{path}.norm", "model.per_layer_projection_norm", config.hidden_size_per_layer_input, config),
    ]


def _norms(config: ModelConfig) -> list[Parameter]:
    """The norms round attention and MLP. "post_attention_layernorm" is the name of the norm before the MLP in families
    that have none on what attention gives, and of that one in the others."""
    rows: dict[str, str] = {}
    if config.norm_placement in ("pre", "sandwich"):
        rows |= {"input_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}
    if config.norm_placement == "parallel":
        rows["input_norm"] = "input_layernorm"
    if config.norm_placement in ("post", "sandwich"):
        rows |= {"attention_out_norm": "post_attention_layernorm", "mlp_out_norm": "post_feedforward_layernorm"}
    if config.norm_placement == "sandwich":
        rows["post_attention_norm"] = "pre_feedforward_layernorm"
    if config.experts_beside_mlp and config.num_experts:
        rows |= {
            "mlp_alone_norm": "post_feedforward_layernorm_1",
            "experts_norm": "pre_feedforward_layernorm_2",
            "experts_out_norm": "post_feedforward_layernorm_2",
        }
    return [row for path, name in rows.items() for row in _norm(path, name, config.hidden_size, config)]


def _attention(config: ModelConfig, routed: bool) -> list[Parameter]:
    d, size = config.hidden_size, config.head_dim
    queries, keys = config.num_attention_heads * size, config.num_key_value_heads * size
    said, values = (
        heads * (config.v_head_dim or size) for heads in (config.num_attention_heads, config.num_key_value_heads)
    )
    bias, out_bias = config.attention_bias, config.attention_out_bias
    has_keys = not config.num_kv_shared_layers
    rows = []
    for name, shape, axes, has_bias, is_there in (
        ("q_proj", (d, queries * (1 + (config.attention_gate == "query"))), ("embed", "heads"), bias, True),
        ("k_proj", (d, keys), ("embed", "kv_heads"), bias, has_keys),
        ("v_proj", (d, values), ("embed", "kv_heads"), bias, has_keys and not config.attention_k_eq_v),
        ("o_proj", (said, d), ("heads", "embed"), out_bias, True),
    ):
        if is_there:
            rows += _projection(f"attention.{name}", f"self_attn.{name}", shape, axes, has_bias, config)
    if config.qk_norm:
        by_head = config.qk_norm_over == "head"
        for name, whole in (("q_norm", queries), ("k_norm", keys))[: 1 + has_keys]:
            rows += _norm(f"attention.{name}", f"self_attn.{name}", size if by_head else whole, config)
    if config.attention_gate in ("head", "channel"):
        width = config.num_attention_heads if config.attention_gate == "head" else said
        rows += _projection("attention.g_proj", "self_attn.g_proj", (d, width), ("embed", "heads"), False, config)
    if config.sink_logits:
        draw = normal(config.initializer_range)
        heads = (config.num_attention_heads,)
        rows.append(Parameter(("attention", "sink_logits"), heads, ("heads",), draw, "self_attn.sinks"))
    if routed:
        path, first = "router.proj", nnx.initializers.constant(config.router_bias_init)
        rows += _linear(f"attention.{path}", f"self_attn.{path}", (d, 1), (None, None), config, bias_init=first)
    return rows


def _gated_delta(config: ModelConfig) -> list[Parameter]:
    """The mixer of a linear layer, which lies whole on every device of a mesh's `tensor`."""
    d, heads, path = config.hidden_size, config.linear_num_value_heads, "gated_delta"
    said, rows = heads * config.linear_value_head_dim, []
    for name, width in (("qkv", config.linear_channels), ("z", said), ("b", heads), ("a", heads)):
        place, hf_name = f"{path}.in_proj_{name}", f"linear_attn.in_proj_{name}"
        rows += _projection(place, hf_name, (d, width), ("embed", None), False, config)
    rows += _projection(f"{path}.out_proj", "linear_attn.out_proj", (said, d), (None, "embed"), False, config)
    ones, draw = nnx.initializers.ones, normal(config.initializer_range)
    for name, shape, init, hf_name in (
        ("conv", (config.linear_channels, 1, config.linear_conv_kernel_dim), draw, "conv1d.weight"),
        ("A_log", (heads,), _log_rates, "A_log"),
        ("dt_bias", (heads,), ones, "dt_bias"),
        ("norm_scale", (config.linear_value_head_dim,), ones, "norm.weight"),
    ):
        rows.append(Parameter((path, name), shape, (None,) * len(shape), init, f"linear_attn.{hf_name}"))
    return rows


def _log_rates(key: jax.Array, shape: Any, dtype: Any = jnp.float32, *_: Any, **__: Any) -> jax.Array:
    """Logarithms of rates of decay, as Hugging Face's class draws them."""
    return jnp.log(jax.random.uniform(key, shape, jnp.float32, 0.01, 16)).astype(dtype)


def _mlp(config: ModelConfig) -> list[Parameter]:
    rows = _mlp_at("mlp", "mlp", config.intermediate_size, config)
    if config.hidden_act == "xielu":
        for name, first in (("alpha_p", XIELU_SLOPE), ("alpha_n", XIELU_SLOPE - XIELU_BETA)):
            draw = nnx.initializers.constant(math.log(math.expm1(first)))
            rows.append(Parameter(("mlp", "act", name), (1,), (None,), draw, f"mlp.act_fn.{name}"))
    return rows


def _mlp_at(path: str, hf_name: str, f: int, config: ModelConfig) -> list[Parameter]:
    """An MLP of width f."""
    d, rows = config.hidden_size, []
    for name, shape, axes in (
        *([("gate_proj", (d, f), ("embed", "mlp"))] if config.gated_mlp else []),
        ("up_proj", (d, f), ("embed", "mlp")),
        ("down_proj", (f, d), ("mlp", "embed")),
    ):
        rows += _projection(f"{path}.{name}", f"{hf_name}.{name}", shape, axes, config.mlp_bias, config)
    return rows


def _experts(config: ModelConfig) -> list[Parameter]:
    """The MLPs of experts, stacked, the router that chooses among them, and the expert that all tokens meet."""
    d, f, count = config.hidden_size, config.moe_intermediate_size, config.num_experts
    zeros = nnx.initializers.zeros if config.mlp_bias else None
    draw = normal(config.initializer_range)
    beside = config.experts_beside_mlp
    router = "mlp.router" if config.fused_experts else "router.proj" if beside else "mlp.gate"
    rows = _linear("experts.expert_router", router, (d, count), (None, None), config, bias_init=zeros)
    numbers: list[tuple[str, str, int, Initializer]] = []
    if config.router_choice_bias:
        numbers.append(("choice_bias", f"{router}.e_score_correction_bias", count, nnx.initializers.zeros))
    if beside:
        numbers.append(("input_scale", "router.scale", d, nnx.initializers.ones))
        numbers.append(("expert_scale", "router.per_expert_scale", count, nnx.initializers.ones))
    for name, hf_name, size, first in numbers:
        rows.append(Parameter(("experts", "expert_router", name), (size,), (None,), first, hf_name))
    up = {"gate_up_proj": 2 * f} if config.fused_experts else {"gate_proj": f, "up_proj": f}
    shapes = {name: ((d, width), ("embed", "mlp")) for name, width in up.items()}
    for name, (shape, axes) in (shapes | {"down_proj": ((f, d), ("mlp", "embed"))}).items():
        hf_name = f"mlp.experts.{name}" if config.fused_experts else f"mlp.experts.{{expert}}.{name}.weight"
        path, met = ("experts", name), config.num_experts_per_tok
        kernel = Parameter((*path, "kernel"), (count, *shape), ("expert", *axes), draw, hf_name, experts_per_token=met)
        rows.append(dataclasses.replace(kernel, transposed=not config.fused_experts, matrix=True))
        if config.mlp_bias:
            bias = f"{hf_name}_bias" if config.fused_experts else f"{hf_name.removesuffix('weight')}bias"
            outputs = None if axes[1] == "embed" else axes[1]
            whole, zero = (count, shape[1]), nnx.initializers.zeros
            rows.append(Parameter((*path, "bias"), whole, ("expert", outputs), zero, bias, experts_per_token=met))
    if (width := config.shared_expert_intermediate_size) > 0:
        rows += _mlp_at("experts.shared_expert", "mlp.shared_experts", width, config)
    return rows


def _norm(path: str, hf_name: str, size: int, config: ModelConfig) -> list[Parameter]:
    place, zeros = tuple(path.split(".")), nnx.initializers.zeros
    first = zeros if config.norm_unit_offset else nnx.initializers.ones
    scale = Parameter((*place, "scale"), (size,), (None,), first, f"{hf_name}.weight")
    if not config.norm_bias:
        return [scale]
    return [scale, Parameter((*place, "bias"), (size,), (None,), zeros, f"{hf_name}.bias")]


def _projection(
    path: str, hf_name: str, shape: tuple[int, int], axes: Axes, bias: bool, config: ModelConfig
) -> list[Parameter]:
    zeros = nnx.initializers.zeros if bias else None
    return _linear(path, hf_name, shape, axes, config, bias_init=zeros, matrix=True)


def _linear(
    path: str,
    hf_name: str,
    shape: tuple[int, int],
    axes: Axes,
    config: ModelConfig,
    *,
    bias_init: Initializer | None = None,
    matrix: bool = False,
    output: bool = False,
) -> list[Parameter]:
    """A linear map [in, out], and its bias [out] if there is one."""
    place, draw = tuple(path.split(".")), normal(config.initializer_range)
    kernel = Parameter(
        (*place, "kernel"), shape, axes, draw, f"{hf_name}.weight", transposed=True, matrix=matrix, output=output
    )
    if bias_init is None:
        return [kernel]
    # Activations keep their `embed` dimension whole, and so do the biases that are added to them.
    outputs = None if axes[1] == "embed" else axes[1]
    return [kernel, Parameter((*place, "bias"), shape[1:], (outputs,), bias_init, f"{hf_name}.bias")]


def low_rank(parameter: Parameter, rank: int) -> tuple[Parameter, Parameter]:
    """LoRA's factors of a projection [in, out]: `lora_a` [in, rank] and `lora_b` [rank, out].

    They lie on a mesh as the projection's ends do; the rank is whole. `lora_a` is drawn as PEFT draws it (Kaiming
    uniform with a = sqrt(5): within 1 / sqrt(in)), `lora_b` is zero.
    """
    (inputs, outputs), (of_inputs, of_outputs) = parameter.shape, parameter.axes
    bound = 1 / math.sqrt(inputs)

    def draw(key: jax.Array, shape: Any, dtype: Any = jnp.float32, out_sharding: Any = None) -> jax.Array:
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    def factor(letter: str, shape: tuple[int, int], axes: Axes, init: Initializer) -> Parameter:
        path = (*parameter.path[:-1], f"lora_{letter.lower()}")
        name = f"{parameter.hf_name.removesuffix('.weight')}.lora_{letter}.weight"
        return Parameter(path, shape, axes, init, name, layers=parameter.layers, transposed=True)

    a = factor("A", (inputs, rank), (of_inputs, None), draw)
    return a, factor("B", (rank, outputs), (None, of_outputs), nnx.initializers.zeros)


def declared(config: ModelConfig) -> dict[str, Parameter]:
    """What a model may have, routers included, by name: "layers.attention.q_proj.kernel" and so on."""
    return {parameter.name: parameter for parameter in parameters(config, routed=True)}


def map_parameters[R](function: Callable[[Parameter | None, Any], R], tree: Any, rows: Mapping[str, Parameter]) -> Any:
    """`function(row, leaf)` for every leaf of a JAX tree. A leaf whose path ends with a parameter's has that row: the
    parameter, or what stands for it, such as an optimizer's moment. Other leaves have None."""

    def one(path: tuple[Any, ...], leaf: Any) -> R:
        names = [str(getattr(key, "key", getattr(key, "name", key))) for key in path]
        names = [name for name in names if name not in ("value", "raw_value")]
        ends = (".".join(names[start:]) for start in range(len(names)))  # the longest first
        return function(next((rows[end] for end in ends if end in rows), None), leaf)

    return jax.tree_util.tree_map_with_path(one, tree)
