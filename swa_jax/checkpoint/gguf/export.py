"""A checkpoint folder as a GGUF file for llama.cpp, of the architecture that `graphs` found."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter

from swa_jax.checkpoint.folder import Checkpoint
from swa_jax.checkpoint.gguf.graphs import Described
from swa_jax.checkpoint.gguf.weights import TensorPlace
from swa_jax.model.parameters import EMBEDDING, HEAD

F32 = np.dtype(np.float32)
KINDS = {F32: GGMLQuantizationType.F32, np.dtype(np.float16): GGMLQuantizationType.F16}
KINDS[np.dtype(ml_dtypes.bfloat16)] = GGMLQuantizationType.BF16
NO_SINK = -1e30  # a logit whose exponential is 0


def write_gguf(file: Path, described: Described, source: Checkpoint, metadata: Mapping[str, Any]) -> None:
    """Write a model as llama.cpp has it, one tensor at a time: matrices in their dtype, all else in f32.

    `metadata` is what the file says besides, such as its tokenizer.
    """
    parts = defaultdict[str, list[str]](list)  # our tensors by the file's tensor that they are in, from its first row
    for ours, place in sorted(described.places.items(), key=lambda item: item[1].first):
        parts[place.name].append(ours)

    def read(name: str) -> np.ndarray:
        if name not in source.tensors and name != HEAD:
            empty = NO_SINK if name.endswith("sinks") else 0
            return np.full(described.places[name].shape, empty, F32)
        [(_, array)] = source.read([name if name in source.tensors else EMBEDDING])
        return array

    def dtype(name: str) -> np.dtype:
        matrix = len(described.tensors[name].shape) > 1 and name.endswith(".weight") and "ffn_gate_inp" not in name
        return source.tensors.get(parts[name][0], source.tensors[EMBEDDING])[0] if matrix else F32

    def array(name: str) -> np.ndarray:
        if name in described.factors:
            return described.factors[name]
        found = [_in_file_order(described.places[ours], read(ours)) for ours in parts[name]]
        return np.ascontiguousarray(np.concatenate(found).reshape(described.tensors[name].shape), dtype(name))

    writer = GGUFWriter(file, described.architecture)
    for key, value in {**described.metadata, **metadata}.items():
        if key == "general.architecture":
            continue  # which the writer says itself
        plain = value.tolist() if isinstance(value, np.ndarray) else value
        writer.add_key_value(key, plain, GGUFValueType.UINT32 if type(plain) is int else GGUFValueType.get_type(plain))
    for name, tensor in described.tensors.items():
        size = math.prod(tensor.shape) * dtype(name).itemsize
        writer.add_tensor_info(name, tensor.shape, F32, size, KINDS[dtype(name)])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name in described.tensors:
        writer.write_tensor_data(array(name))
    writer.close()


def _in_file_order(place: TensorPlace, array: np.ndarray) -> np.ndarray:
    """A tensor of ours as the file has it: the inverse of `weights.read_place`, but for gpt-oss's experts."""
    if place.offset:
        array = array.astype(F32) - np.float32(place.offset)
    if place.heads:
        halves = array.reshape(place.heads, 2, -1, *array.shape[1:])
        return halves.swapaxes(1, 2).reshape(array.shape)
    return array
