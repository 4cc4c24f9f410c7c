"""Experts in MXFP4, as gpt-oss is published: 4-bit floats in blocks of 32 that share an 8-bit exponent.

OCP Microscaling Formats (MX) Specification 1.0: elements E2M1, scales E8M0 with bias 127. Every value is a bf16.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import ml_dtypes
import numpy as np

from swa_jax.base.errors import CheckpointError
from swa_jax.checkpoint.safetensors_files import StoredTensor, TensorReader

BLOCKS, SCALES = "_blocks", "_scales"
_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_VALUES = np.concatenate([_MAGNITUDES, -_MAGNITUDES])
_PAIRS = _VALUES[np.stack([np.arange(256) & 15, np.arange(256) >> 4], axis=1)]  # [256, 2]: a byte's low half first


class PackedTensor(NamedTuple):
    """The two tensors that hold one: blocks [E, out, in / 32, 16] and scales [E, out, in / 32], both of bytes."""

    blocks: StoredTensor
    scales: StoredTensor


def find_packed(found: Mapping[str, StoredTensor]) -> dict[str, PackedTensor]:
    """The packed tensors by the name of what they hold.

    Raises `CheckpointError` for blocks without scales, or of another shape or dtype.
    """
    packed = {}
    for name, blocks in found.items():
        if not name.endswith(BLOCKS):
            continue
        whole = name.removesuffix(BLOCKS)
        scales = found.get(whole + SCALES)
        if scales is None:
            raise CheckpointError(f"{blocks.file.name} holds '{name}', but the weights lack '{whole + SCALES}'")
        if (blocks.dtype, scales.dtype) != ("U8", "U8") or len(blocks.shape) != 4 or blocks.shape[3] != 16:
            raise CheckpointError(
                f"tensor '{name}' in {blocks.file.name} has dtype {blocks.dtype} and shape {list(blocks.shape)}; MXFP4 "
                "blocks are bytes (U8) [experts, out, in / 32, 16]"
            )
        if scales.shape != blocks.shape[:3]:
            raise CheckpointError(
                f"tensor '{whole + SCALES}' in {scales.file.name} has shape {list(scales.shape)}; its blocks ask for "
                f"{list(blocks.shape[:3])}"
            )
        packed[whole] = PackedTensor(blocks, scales)
    return packed


def with_unpacked(found: Mapping[str, StoredTensor], packed: Mapping[str, PackedTensor]) -> dict[str, StoredTensor]:
    """The tensors of a folder as they will be when read: bf16 [E, in, out] in place of blocks and scales."""
    parts = {whole + suffix for whole in packed for suffix in (BLOCKS, SCALES)}
    plain = {name: tensor for name, tensor in found.items() if name not in parts}
    for name, (blocks, _) in packed.items():
        experts, outputs, groups, size = blocks.shape
        plain[name] = blocks._replace(dtype="BF16", shape=(experts, 2 * groups * size, outputs))
    return plain


def unpacked(reader: TensorReader, name: str, packed: PackedTensor) -> Iterator[np.ndarray]:
    """bf16 [1, in, out] for each expert; one expert's numbers in f32 are in memory."""
    for expert in range(packed.blocks.shape[0]):
        codes = reader.rows(packed.blocks, expert, expert + 1)[0]
        exponents = reader.rows(packed.scales, expert, expert + 1)[0]
        if (exponents == 255).any():
            raise CheckpointError(
                f"tensor '{name}{SCALES}' in {packed.scales.file.name} holds the scale 255, which stands for no number"
            )
        yield _unpack(codes, exponents).T[None].astype(ml_dtypes.bfloat16, order="C")


def _unpack(codes: np.ndarray, exponents: np.ndarray) -> np.ndarray:
    """codes [out, in / 32, 16], exponents [out, in / 32] -> f32 [out, in]."""
    powers = exponents.astype(np.int32)[..., None, None] - 127
    with np.errstate(over="ignore"):  # what is no number is found where it is written
        scaled = np.ldexp(_PAIRS[codes], powers)  # [out, in / 32, 16, 2]
    return scaled.reshape(codes.shape[0], -1)
