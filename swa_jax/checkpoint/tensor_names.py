"""Hugging Face's tensor names, and where each tensor lives in `swa_jax.model.decoder.Decoder`."""

from __future__ import annotations

import re
from typing import NamedTuple

from swa_jax.model.config import ModelConfig

# Buffers that old checkpoints stored and that are computed here.
_BUFFER = re.compile(r"(model\.layers\.\d+\.self_attn|model)\.rotary_emb\.inv_freq")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class TensorName(NamedTuple):
    """One tensor of a checkpoint.

    Attributes:
      name: Hugging Face's name.
      shape: its shape there (linear maps are [out, in]).
      path: where it lives in the decoder; parameters of layers are stacked there over a leading axis L.
      layer: its index on that axis, None outside the layers.
      transposed: linear maps are [in, out] in the decoder.
    """

    name: str
    shape: tuple[int, ...]
    path: tuple[str, ...]
    layer: int | None
    transposed: bool


def tensor_names(config: ModelConfig, *, routers: bool = False) -> list[TensorName]:
    """Every tensor of a model, those of one decoder parameter next to each other in layer order.

    `routers` adds the routers of switch layers, `model.layers.{i}.self_attn.router.proj.{weight,bias}`, which are ours.
    """
    d, f, v = config.hidden_size, config.intermediate_size, config.vocab_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    table = [TensorName(EMBEDDING, (v, d), ("embedding",), None, False)]

    def norm(name: str, size: int, path: tuple[str, ...]) -> None:
        each_layer(f"{name}.weight", (size,), (*path, "scale"), False)

    def linear(name: str, shape: tuple[int, int], bias: bool, path: tuple[str, ...]) -> None:
        each_layer(f"{name}.weight", shape, (*path, "kernel"), True)
        if bias:
            each_layer(f"{name}.bias", shape[:1], (*path, "bias"), False)

    def each_layer(name: str, shape: tuple[int, ...], path: tuple[str, ...], transposed: bool) -> None:
        for i in range(config.num_hidden_layers):
            table.append(TensorName(f"model.layers.{i}.{name}", shape, ("layers", *path), i, transposed))

    if config.norm_placement == "pre":
        norm("input_layernorm", d, ("input_norm",))
        norm("post_attention_layernorm", d, ("post_attention_norm",))
    else:
        norm("post_attention_layernorm", d, ("attention_out_norm",))
        norm("post_feedforward_layernorm", d, ("mlp_out_norm",))
    if config.norm_placement == "sandwich":
        norm("input_layernorm", d, ("input_norm",))
        norm("pre_feedforward_layernorm", d, ("post_attention_norm",))
    for name, shape, bias in (
        ("q_proj", (queries, d), config.attention_bias),
        ("k_proj", (keys, d), config.attention_bias),
        ("v_proj", (keys, d), config.attention_bias),
        ("o_proj", (d, queries), config.attention_out_bias),
    ):
        linear(f"self_attn.{name}", shape, bias, ("attention", name))
    if config.qk_norm:
        by_head = config.qk_norm_over == "head"
        norm("self_attn.q_norm", config.head_dim if by_head else queries, ("attention", "q_norm"))
        norm("self_attn.k_norm", config.head_dim if by_head else keys, ("attention", "k_norm"))
    if routers:
        linear("self_attn.router.proj", (1, d), True, ("attention", "router", "proj"))
    for name, shape in (("gate_proj", (f, d)), ("up_proj", (f, d)), ("down_proj", (d, f))):
        linear(f"mlp.{name}", shape, config.mlp_bias, ("mlp", name))
    table.append(TensorName("model.norm.weight", (d,), ("norm", "scale"), None, False))
    if not config.tie_word_embeddings:
        table.append(TensorName(HEAD, (v, d), ("lm_head", "kernel"), None, True))
    return table


def expected_tensors(config: ModelConfig, *, routers: bool = False) -> dict[str, tuple[int, ...]]:
    """The name and shape of every tensor a Hugging Face checkpoint of this model holds."""
    return {tensor.name: tensor.shape for tensor in tensor_names(config, routers=routers)}


def is_buffer(name: str) -> bool:
    """Whether a tensor is a rotary buffer of an old checkpoint: computed here, so not read."""
    return _BUFFER.fullmatch(name) is not None


def is_router(name: str) -> bool:
    return ".self_attn.router.proj." in name
