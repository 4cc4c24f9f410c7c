"""The check that weights are numbers, made while they are written."""

from __future__ import annotations

import numpy as np

from swa_jax.base.errors import CheckpointError

CHECKED_AT_ONCE = 1 << 16  # numbers, which the processor's cache holds


def check_finite(array: np.ndarray, name: str, file: str) -> None:
    """Raise `CheckpointError` if a part of tensor `name` in `file` is NaN or infinite."""
    if not _are_finite(array):
        raise CheckpointError(
            f"tensor '{name}' in {file} holds NaN or infinity, which no trained weight is: the file is damaged, or the "
            "training of this model failed"
        )


def _are_finite(array: np.ndarray) -> bool:
    """Floats whose exponent has all bits set are infinite or no number."""
    bits = array.reshape(-1).view({2: np.uint16, 4: np.uint32}[array.itemsize])
    mask = bits.dtype.type({"float16": 0x7C00, "bfloat16": 0x7F80, "float32": 0x7F800000}[array.dtype.name])
    return all((bits[i : i + CHECKED_AT_ONCE] & mask).max() != mask for i in range(0, bits.size, CHECKED_AT_ONCE))
