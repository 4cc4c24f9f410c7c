"""Block-FP8 weights: every block of a matrix has a scale of its own, which import multiplies in.

A matrix X.weight [out, in] in float8_e4m3fn comes with X.weight_scale_inv, one number for each block of
`weight_block_size` rows and columns; the weight is the product of the two, despite the scale's name (DeepSeek-V3,
arXiv:2412.19437, section 3.3).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from swa_jax.checkpoint.safetensors_files import DTYPES, FP8, StoredTensor
from swa_jax.errors import CheckpointError

SUFFIX = "_scale_inv"


def split_scales(
    tensors: Mapping[str, StoredTensor], blocks: tuple[int, int]
) -> tuple[dict[str, StoredTensor], dict[str, StoredTensor]]:
    """The tensors without their scales, and the scales by the name of their tensor.

    Raises `CheckpointError` for a tensor without its scale, a scale without its tensor, and a scale of another shape
    or dtype.
    """
    scales = {name.removesuffix(SUFFIX): t for name, t in tensors.items() if name.endswith(SUFFIX)}
    rest = {name: tensor for name, tensor in tensors.items() if not name.endswith(SUFFIX)}
    for name, tensor in rest.items():
        if tensor.dtype == FP8 and name not in scales:
            raise CheckpointError(
                f"tensor '{name}' in {tensor.file.name} has dtype {FP8}, but no scale '{name}{SUFFIX}'"
            )
    for name, scale in scales.items():
        where = f"scale '{name}{SUFFIX}' in {scale.file.name}"
        if name not in rest or rest[name].dtype != FP8:
            raise CheckpointError(f"{where} belongs to no tensor of dtype {FP8}")
        shape = rest[name].shape
        expected = tuple(math.ceil(size / block) for size, block in zip(shape, blocks, strict=False))
        if len(shape) != 2 or scale.shape != expected:
            raise CheckpointError(
                f"{where} has shape {list(scale.shape)}; a tensor of shape {list(shape)} in blocks of {list(blocks)} "
                f"needs {list(expected)}"
            )
        if scale.dtype not in DTYPES:
            raise CheckpointError(f"{where} has dtype {scale.dtype}; supported: {', '.join(DTYPES)}")
    return rest, scales


def dequantised(
    tensors: Iterable[tuple[str, np.ndarray]],
    scales: Mapping[str, np.ndarray],
    blocks: tuple[int, int],
    dtype: np.dtype,
) -> Iterator[tuple[str, np.ndarray]]:
    """(name, array) with every tensor that has a scale multiplied by it, in f32, and rounded to `dtype` once.

    In memory are one tensor of each kind and a row of blocks in f32.
    """
    for name, array in tensors:
        yield name, _multiplied(array, scales[name], blocks, dtype) if name in scales else array


def _multiplied(array: np.ndarray, scale: np.ndarray, blocks: tuple[int, int], dtype: np.dtype) -> np.ndarray:
    out = np.empty(array.shape, dtype)
    rows, columns = blocks
    for i, row in enumerate(scale.astype(np.float32)):
        here = slice(i * rows, (i + 1) * rows)
        out[here] = array[here].astype(np.float32) * np.repeat(row, columns)[: array.shape[1]]
    return out
