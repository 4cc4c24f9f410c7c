"""Hugging Face's tensor names, and where each tensor lives in `swa_jax.model.decoder.Decoder`."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from swa_jax.checkpoint.families import family_of
from swa_jax.model.config import ModelConfig
from swa_jax.model.parameters import Parameter, parameters

# Buffers that old checkpoints stored and that are computed here, and layers for multi-token prediction: Hugging Face's
# classes leave both out too.
_LEFT_OUT = re.compile(r"(model\.layers\.\d+\.self_attn|model)\.rotary_emb\.inv_freq|(model\.)?mtp\..*")
_KEYS_OF_A_LAYER = re.compile(r"model\.layers\.(\d+)\.self_attn\.[kv]_(?:proj|norm)\..*")


class TensorName(NamedTuple):
    """One tensor of a checkpoint.

    Parameters of layers are stacked in the decoder over a leading axis L, those of experts also over an axis E.
    """

    name: str  # Hugging Face's
    shape: tuple[int, ...]  # there: linear maps are [out, in]
    path: tuple[str, ...]  # where it lives in the decoder
    place: tuple[int, ...]  # its index on the stacked axes; () outside the layers
    transposed: bool  # a linear map, which is [in, out] in the decoder


def tensor_names(config: ModelConfig, *, routers: bool = False) -> list[TensorName]:
    """Every tensor of a model, those of one decoder parameter next to each other in layer order.

    `routers` adds the routers of switch layers, `model.layers.{i}.self_attn.router.proj.{weight,bias}`, which are ours.
    """
    return [tensor for parameter in hf_parameters(config, routers) for tensor in tensors_of(parameter)]


def hf_parameters(config: ModelConfig, routers: bool = False) -> list[Parameter]:
    """The parameters of a model with the names that its family has for them."""
    renamed = family_of(config).tensor_names
    return [dataclasses.replace(row, hf_name=renamed.get(row.role, row.hf_name)) for row in parameters(config, routers)]


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
    """The name and shape of every tensor of our checkpoint folders."""
    return {tensor.name: tensor.shape for tensor in tensor_names(config, routers=routers)}


# ---- tensors that a family joins ----
#
# Our folders hold every parameter as a tensor of its own. Some families' checkpoints hold several below each other.


def joined_parts(config: ModelConfig) -> dict[str, list[TensorName]]:
    """{tensor of a Hugging Face checkpoint of this model: the tensors that it joins, from the first row on}.

    Of experts it joins those of the first expert, then those of the second, and so on.
    """
    rows = {(row.role, row.stack): row for row in hf_parameters(config)}
    stacks = dict.fromkeys(stack for _, stack in rows)
    found = {}
    for (name, parts), stack in itertools.product(family_of(config).joined.items(), stacks):
        whole = [rows[part, stack] for part in parts if (part, stack) in rows]
        layers = whole[0].layers if whole else None
        each = [tensors_of(row) for row in whole]
        for i, layer in enumerate(layers or ()):
            experts = len(each[0]) // len(layers or ())  # 1 where the tensors are of no experts
            numbers = range(i * experts, (i + 1) * experts)
            found[name.format(layer=layer)] = [tensors[number] for number in numbers for tensors in each]
    return found


def joined_shape(parts: Sequence[TensorName]) -> tuple[int, ...]:
    """The shape of a tensor that joins others; of experts it has one more axis, in front."""
    rows, columns = sum(part.shape[0] for part in parts), parts[0].shape[1:]
    experts = len({part.place for part in parts}) if len(parts[0].place) == 2 else None
    return (rows, *columns) if experts is None else (experts, rows // experts, *columns)


def hf_tensors(config: ModelConfig, *, routers: bool = False) -> dict[str, tuple[int, ...]]:
    """The name and shape of every tensor of a Hugging Face checkpoint of this model, in the order of the parameters."""
    joined = joined_parts(config)
    whole = {part.name: name for name, parts in joined.items() for part in parts}
    found: dict[str, tuple[int, ...]] = {}
    for tensor in tensor_names(config, routers=routers):
        if (name := whole.get(tensor.name)) is None:
            found[tensor.name] = tensor.shape
        elif name not in found:
            found[name] = joined_shape(joined[name])
    return found | dict.fromkeys(constants_of(config), ())


def constants_of(config: ModelConfig) -> dict[str, float]:
    """The numbers of a Hugging Face checkpoint that no training changes, by the names of their tensors."""
    layers = range(config.num_hidden_layers)
    return {name.format(layer=layer): value for name, value in family_of(config).constants.items() for layer in layers}


def join_tensors(
    names: Sequence[str],
    joined: Mapping[str, Sequence[TensorName]],
    read: Callable[[list[str]], Iterable[tuple[str, np.ndarray]]],
    constants: Mapping[str, np.ndarray],
) -> Iterator[tuple[str, np.ndarray]]:
    """(name, array) of the named tensors of a Hugging Face checkpoint, in that order; `read` reads our folder's, which
    lacks the `constants`."""
    parts = {name: [part.name for part in joined.get(name, ())] or [name] for name in names}
    parts |= {name: [] for name in constants}
    arrays = (array for _, array in read([part for name in names for part in parts[name]]))
    for name in names:
        if name in constants:
            yield name, constants[name]
            continue
        found = [next(arrays) for _ in parts[name]]
        yield name, np.concatenate(found).reshape(joined_shape(joined[name])) if name in joined else found[0]


def is_left_out(name: str, config: ModelConfig) -> bool:
    """Whether a tensor is not read: a rotary buffer of an old checkpoint, of a layer for multi-token prediction, or of
    the keys and values of a layer that reads those of another."""
    own = _KEYS_OF_A_LAYER.fullmatch(name)
    read_elsewhere = own is not None and dict(enumerate(config.kv_sources)).get(int(own[1])) != int(own[1])
    return read_elsewhere or _LEFT_OUT.fullmatch(name) is not None


def is_router(name: str) -> bool:
    return ".self_attn.router.proj." in name
