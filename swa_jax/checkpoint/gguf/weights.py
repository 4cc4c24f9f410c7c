"""Our tensors in a GGUF file: under which names, in which order of rows, and their values, a part at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import ml_dtypes
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, TENSOR_NAMES, GGMLQuantizationType
from gguf.constants import MODEL_TENSOR as T
from gguf.quants import dequantize

from swa_jax.base.errors import CheckpointError
from swa_jax.checkpoint.gguf.header import GgufTensor
from swa_jax.checkpoint.safetensors_files import BYTES, PART_BYTES, StoredTensor, TensorReader
from swa_jax.checkpoint.tensor_names import TensorName, hf_parameters, tensors_of
from swa_jax.model.config import ModelConfig
from swa_jax.model.parameters import Parameter

# The modules of a layer, and those outside, by the `gguf` package's names of tensors. The first that a file has is
# taken: where there is one norm between attention and MLP, some architectures call it by another's name.
NAMES: dict[str, tuple[T, ...]] = {
    "embedding": (T.TOKEN_EMBD,),
    "norm": (T.OUTPUT_NORM,),
    "lm_head": (T.OUTPUT,),
    "layer_inputs.embedding": (T.PER_LAYER_TOKEN_EMBD,),
    "layer_inputs.projection": (T.PER_LAYER_MODEL_PROJ,),
    "layer_inputs.norm": (T.PER_LAYER_PROJ_NORM,),
    "input_reader.gate": (T.PER_LAYER_INP_GATE,),
    "input_reader.projection": (T.PER_LAYER_PROJ,),
    "input_reader.norm": (T.PER_LAYER_POST_NORM,),
    "layer_scalar": (T.LAYER_OUT_SCALE,),
    "input_norm": (T.ATTN_NORM,),
    "post_attention_norm": (T.FFN_NORM, T.ATTN_POST_NORM),
    "attention_out_norm": (T.ATTN_POST_NORM,),
    "mlp_out_norm": (T.FFN_POST_NORM,),
    "mlp_alone_norm": (T.FFN_POST_NORM_1,),
    "experts_norm": (T.FFN_PRE_NORM_2,),
    "experts_out_norm": (T.FFN_POST_NORM_2,),
    "attention.q_proj": (T.ATTN_Q,),
    "attention.k_proj": (T.ATTN_K,),
    "attention.v_proj": (T.ATTN_V,),
    "attention.o_proj": (T.ATTN_OUT,),
    "attention.q_norm": (T.ATTN_Q_NORM,),
    "attention.k_norm": (T.ATTN_K_NORM,),
    "attention.g_proj": (T.ATTN_GATE,),
    "attention.sink_logits": (T.ATTN_SINKS,),
    "mlp.gate_proj": (T.FFN_GATE,),
    "mlp.up_proj": (T.FFN_UP,),
    "mlp.down_proj": (T.FFN_DOWN,),
    "experts.expert_router": (T.FFN_GATE_INP,),
    "experts.expert_router.choice_bias": (T.FFN_EXP_PROBS_B,),
    "experts.expert_router.input_scale": (T.FFN_GATE_INP,),
    "experts.expert_router.expert_scale": (T.FFN_DOWN_EXP,),
    "experts.shared_expert.gate_proj": (T.FFN_GATE_SHEXP,),
    "experts.shared_expert.up_proj": (T.FFN_UP_SHEXP,),
    "experts.shared_expert.down_proj": (T.FFN_DOWN_SHEXP,),
    "experts.gate_proj": (T.FFN_GATE_EXP,),
    "experts.up_proj": (T.FFN_UP_EXP,),
    "experts.down_proj": (T.FFN_DOWN_EXP,),
    "experts.gate_up_proj": (T.FFN_GATE_EXP,),  # and FFN_UP_EXP, whose columns stand between
}
# Modules whose rows a file may hold below each other, in this order: Phi-3's, and what llama.cpp joins when asked to.
JOINED: tuple[tuple[T, tuple[str, ...]], ...] = (
    (T.ATTN_QKV, ("attention.q_proj", "attention.k_proj", "attention.v_proj")),
    (T.FFN_UP, ("mlp.gate_proj", "mlp.up_proj")),
    (T.FFN_GATE_UP_EXP, ("experts.gate_proj", "experts.up_proj")),
    (T.FFN_UP_SHEXP, ("experts.shared_expert.gate_proj", "experts.shared_expert.up_proj")),
)
SUFFIXES = {"bias": "bias", "choice_bias": "bias", "input_scale": "scale", "expert_scale": "scale"}  # else "weight"
# No parts of a module.
ALONE = ("embedding", "sink_logits", "choice_bias", "input_scale", "expert_scale", "layer_scalar")
PERMUTED = ("attention.q_proj", "attention.k_proj")
EXACT = {  # the narrowest dtype of ours that has every value of a type
    GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
    GGMLQuantizationType.MXFP4: np.dtype(ml_dtypes.bfloat16),
    GGMLQuantizationType.F16: np.dtype(np.float16),
}


class TensorPlace(NamedTuple):
    """Where a tensor of ours is in the file: rows of a tensor whose axes but the last are taken as one."""

    name: str  # in the file
    tensor: GgufTensor
    shape: tuple[int, ...]  # ours
    first: int = 0  # its first row in the file
    between: GgufTensor | None = None  # whose columns stand between this one's, for gpt-oss's joined experts
    transposed: bool = False  # the matrix of each expert is the other way round in the file
    heads: int = 0  # rows are in llama.cpp's order within each of so many heads; 0: they are in ours
    offset: float = 0.0  # to add to every number


def model_dtype(tensors: Mapping[str, GgufTensor]) -> np.dtype:
    """What all weights become: bf16 or f16 if that holds every matrix as it is in the file, else f32.

    Vectors do not count: llama.cpp stores them in f32, whatever the model was trained in.
    """
    found = {EXACT.get(t.kind, np.dtype(np.float32)) for t in tensors.values() if len(t.shape) > 1}
    return found.pop() if len(found) == 1 else np.dtype(np.float32)


def check_kinds(tensors: Mapping[str, GgufTensor]) -> None:
    """Raise `CheckpointError` for a quantisation that the `gguf` package cannot undo, and for one of a vector."""
    known: set[GGMLQuantizationType] = set()
    for name, tensor in tensors.items():
        block, size = GGML_QUANT_SIZES[tensor.kind]
        if tensor.kind not in known:
            try:
                dequantize(np.zeros((1, size), np.uint8), tensor.kind)
            except NotImplementedError:
                raise CheckpointError(
                    f"tensor '{name}' in {tensor.file.name} is of type {tensor.kind.name}, which the package gguf "
                    "cannot make numbers of again; take a file of another quantisation, such as Q8_0 or Q4_K_M"
                ) from None
            known.add(tensor.kind)
        if len(tensor.shape) == 1 and block != 1:
            raise CheckpointError(
                f"tensor '{name}' in {tensor.file.name} is a vector of type {tensor.kind.name}; supported: numbers of "
                "16 or 32 bits for vectors"
            )


# ---- finding ----


def find_places(
    config: ModelConfig, tensors: Mapping[str, GgufTensor], permuted: bool, file: object
) -> dict[str, TensorPlace]:
    """Our tensors by Hugging Face's names, in the order in which they lie in the file.

    Raises `CheckpointError` for tensors that are missing, misshapen, or of no use to the model.
    """
    parameters = hf_parameters(config)
    widths = {module_of(row): row.shape[-1] for row in parameters if row.path[-1] == "kernel"}
    places: dict[str, TensorPlace] = {}
    for row in parameters:
        for ours in tensors_of(row):
            place = _find(config, row, ours, tensors, widths)
            if place is None:
                name = stored_name(NAMES[module_of(row)][0], row, ours)
                raise CheckpointError(
                    f"{file} lacks tensor '{name}', which a {config.model_type} model of these hyperparameters has"
                )
            if permuted and module_of(row) in PERMUTED:
                place = place._replace(heads=ours.shape[0] // config.head_dim)
            if config.norm_unit_offset and row.path[-1] == "scale":  # llama.cpp stores 1 + scale
                place = place._replace(offset=-1.0)
            places[ours.name] = place
    used = {id(tensor) for place in places.values() for tensor in (place.tensor, place.between)}
    for name, tensor in tensors.items():
        if id(tensor) not in used:
            raise CheckpointError(
                f"{file} holds tensor '{name}', which a {config.model_type} model of these hyperparameters does not "
                "have"
            )
    return dict(sorted(places.items(), key=lambda item: _order(item[1])))


def _order(place: TensorPlace) -> tuple[str, int, int]:
    return place.tensor.file.name, place.tensor.start, place.first


def module_of(row: Parameter) -> str:
    """Its name in `NAMES`: the end of its path, wherever layers of its kind are stacked."""
    path = row.path if row.path[-1] in ALONE else row.path[:-1]
    ends = (".".join(path[i:]) for i in range(len(path)))
    return next(end for end in ends if end in NAMES)


def stored_name(tensor: T, row: Parameter, ours: TensorName) -> str:
    layer = None if row.layers is None else row.layers[ours.place[0]]
    return f"{TENSOR_NAMES[tensor].format(bid=layer)}.{SUFFIXES.get(row.path[-1], 'weight')}"


def _find(
    config: ModelConfig, row: Parameter, ours: TensorName, tensors: Mapping[str, GgufTensor], widths: Mapping[str, int]
) -> TensorPlace | None:
    """One of our tensors, alone or in a joined one; raises `CheckpointError` for another shape."""
    module = module_of(row)
    expert = ours.place[1] if len(ours.place) > 1 else None
    stack = () if expert is None else (config.num_experts,)
    for joined, parts in JOINED:
        name = stored_name(joined, row, ours)
        alone = not widths.keys() >= {*parts} or stored_name(NAMES[parts[0]][0], row, ours) in tensors
        if module not in parts or name not in tensors or alone:
            continue
        rows = sum(widths[part] for part in parts)
        _check_shape(name, tensors[name], (*stack, rows, *ours.shape[1:]))
        first = sum(widths[part] for part in parts[: parts.index(module)])
        return TensorPlace(name, tensors[name], ours.shape, first + (expert or 0) * rows)
    name = next((name for kind in NAMES[module] if (name := stored_name(kind, row, ours)) in tensors), "")
    if not name:
        return None
    tensor = tensors[name]
    if not (config.fused_experts and module.startswith("experts.") and module != "experts.expert_router"):
        _check_shape(name, tensor, (*stack, *ours.shape))
        return TensorPlace(name, tensor, ours.shape, (expert or 0) * ours.shape[0])
    transposed, shape = len(ours.shape) == 3, ours.shape
    if module == "experts.down_proj":
        _check_shape(name, tensor, (shape[0], shape[2], shape[1]) if transposed else shape)
        return TensorPlace(name, tensor, shape, transposed=transposed)
    other = stored_name(T.FFN_UP_EXP, row, ours)
    if other not in tensors:
        return None
    half = (shape[0], shape[2] // 2, shape[1]) if transposed else (shape[0], shape[1] // 2)
    for each in (name, other):
        _check_shape(each, tensors[each], half)
    return TensorPlace(name, tensor, shape, between=tensors[other], transposed=transposed)


def _check_shape(name: str, tensor: GgufTensor, expected: tuple[int, ...]) -> None:
    if tensor.shape != expected:
        raise CheckpointError(
            f"tensor '{name}' in {tensor.file.name} has shape {list(tensor.shape)}, the hyperparameters ask for "
            f"{list(expected)}"
        )


# ---- reading ----


def read_place(reader: TensorReader, place: TensorPlace, dtype: np.dtype) -> Iterator[np.ndarray]:
    """A tensor of ours in parts along its first axis; a part in f32 and what it is made of are in memory."""
    with np.errstate(over="ignore", invalid="ignore"):  # what is no number is found where it is written
        for part in _by_expert(reader, place) if place.transposed or place.between else _by_rows(reader, place):
            yield np.ascontiguousarray((part + np.float32(place.offset)) if place.offset else part).astype(dtype)


def read_whole(reader: TensorReader, tensor: GgufTensor) -> np.ndarray:
    """A small tensor, f32."""
    return _rows(reader, tensor, 0, math.prod(tensor.shape[:-1]) or 1).reshape(tensor.shape)


def _by_rows(reader: TensorReader, place: TensorPlace) -> Iterator[np.ndarray]:
    """Rows of a matrix or numbers of a vector."""
    tensor, total = place.tensor, place.shape[0]
    if len(place.shape) == 1:
        vector = _rows(reader, tensor, 0, math.prod(tensor.shape[:-1])).reshape(-1)
        yield _in_our_order(vector[place.first : place.first + total], place.heads)
        return
    step = max(1, PART_BYTES // (4 * tensor.shape[-1]))
    if place.heads:  # whole heads
        step = max(1, step // (size := total // place.heads)) * size
    for row in range(0, total, step):
        last = min(row + step, total)
        part = _rows(reader, tensor, place.first + row, place.first + last)
        yield _in_our_order(part, place.heads * (last - row) // total)


def _by_expert(reader: TensorReader, place: TensorPlace) -> Iterator[np.ndarray]:
    rows = math.prod(place.tensor.shape[1:-1])
    for expert in range(place.shape[0]):
        tensors = (place.tensor,) if place.between is None else (place.tensor, place.between)
        found = [_rows(reader, tensor, expert * rows, (expert + 1) * rows) for tensor in tensors]
        columns = [part.T if place.transposed else part for part in found]  # [in, out], or [1, out]
        yield np.stack(columns, axis=-1).reshape(1, *place.shape[1:])


def _rows(reader: TensorReader, tensor: GgufTensor, first: int, last: int) -> np.ndarray:
    """Rows of a tensor, its axes but the last taken as one: f32 [rows, width]."""
    count = math.prod(tensor.shape[:-1])
    stored = StoredTensor(tensor.file, BYTES, (count, tensor.row_bytes), tensor.start)
    numbers: np.ndarray = dequantize(reader.rows(stored, first, last), tensor.kind)
    return numbers


def _in_our_order(rows: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp has the channels of a head that rotate together side by side; between ours is half a head."""
    if not heads:
        return rows
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)
