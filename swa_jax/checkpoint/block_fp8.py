"""Block-FP8 weights: every block of a matrix has a scale of its own, which import multiplies in.

A matrix X.weight [out, in] in float8_e4m3fn comes with X.weight_scale_inv, one number for each block of
`weight_block_size` rows and columns; the weight is the product of the two, despite the scale's name (DeepSeek-V3,
arXiv:2412.19437, section 3.3).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from swa_jax.base.errors import CheckpointError
from swa_jax.checkpoint.safetensors_files import DTYPES, FP8, StoredTensor

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
    rows: np.ndarray, first: int, scale: np.ndarray, blocks: tuple[int, int], dtype: np.dtype
) -> np.ndarray:
    """Rows of a tensor, from row `first` on, multiplied by its scale, in f32, and rounded to `dtype` once."""
    out = np.empty(rows.shape, dtype)
    height, width = blocks
    row = 0
    while row < len(rows):
        block = (first + row) // height
        end = min((block + 1) * height - first, len(rows))
        factors = np.repeat(scale[block].astype(np.float32), width)[: rows.shape[1]]
        with np.errstate(over="ignore", invalid="ignore"):  # what is no number is found where it is written
            out[row:end] = rows[row:end].astype(np.float32) * factors
        row = end
    return out
