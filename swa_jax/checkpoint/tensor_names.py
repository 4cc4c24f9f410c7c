"""Hugging Face's tensor names, and where each tensor lives in `swa_jax.model.decoder.Decoder`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from typing import NamedTuple

from swa_jax.families import renamed_tensors
from swa_jax.model.config import ModelConfig
from swa_jax.model.parameters import Parameter, parameters

# Buffers that old checkpoints stored and that are computed here, and layers for multi-token prediction: Hugging Face's
# classes leave both out too.
_LEFT_OUT = re.compile(r"(model\.layers\.\d+\.self_attn|model)\.rotary_emb\.inv_freq|mtp\..*")


class TensorName(NamedTuple):
    """One tensor of a checkpoint.

    Attributes:
      name: Hugging Face's name.
      shape: its shape there (linear maps are [out, in]).
      path: where it lives in the decoder; parameters of layers are stacked there over a leading axis L, those of
        experts also over an axis E.
      place: its index on these axes; () outside the layers.
      transposed: linear maps are [in, out] in the decoder.
    """

    name: str
    shape: tuple[int, ...]
    path: tuple[str, ...]
    place: tuple[int, ...]
    transposed: bool


def tensor_names(config: ModelConfig, *, routers: bool = False) -> list[TensorName]:
    """Every tensor of a model, those of one decoder parameter next to each other in layer order.

    `routers` adds the routers of switch layers, `model.layers.{i}.self_attn.router.proj.{weight,bias}`, which are ours.
    """
    return [tensor for parameter in hf_parameters(config, routers) for tensor in tensors_of(parameter)]


def hf_parameters(config: ModelConfig, routers: bool = False) -> list[Parameter]:
    """The parameters of a model with the names that its family has for them."""
    renamed = renamed_tensors(config)
    return [
        dataclasses.replace(row, hf_name=renamed.get(row.name, row.hf_name))
        for row in parameters(config, routers)
    ]


def tensors_of(parameter: Parameter) -> list[TensorName]:
    """The tensors of a checkpoint that hold one parameter: one, one for each layer, or one for each expert of each."""
    name, shape = parameter.hf_name, parameter.shape
    experts: Iterable[int | None] = [None]
    if "{expert}" in name:
        experts, shape = range(shape[0]), shape[1:]
    shape = shape[::-1] if parameter.transposed else shape

    def one(layer: int | None, *place: int | None) -> TensorName:
        filled = name.format(layer=layer, expert=place[-1] if place else None)
        known = tuple(index for index in place if index is not None)
        return TensorName(filled, shape, parameter.path, known, parameter.transposed)

    if parameter.layers is None:
        return [one(None)]
    return [one(layer, i, expert) for i, layer in enumerate(parameter.layers) for expert in experts]


def expected_tensors(config: ModelConfig, *, routers: bool = False) -> dict[str, tuple[int, ...]]:
    """The name and shape of every tensor a Hugging Face checkpoint of this model holds."""
    return {tensor.name: tensor.shape for tensor in tensor_names(config, routers=routers)}


def is_left_out(name: str) -> bool:
    """Whether a tensor is not read: a rotary buffer of an old checkpoint, or of a layer for multi-token prediction."""
    return _LEFT_OUT.fullmatch(name) is not None


def is_router(name: str) -> bool:
    return ".self_attn.router.proj." in name
