"""What a GPU kernel is given: its operands, and what is fixed when it is compiled."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax

from pallas_kernels.math.spec import AttentionSpec, PerHead


class Tile(NamedTuple):
    q_block: int
    kv_block: int
    num_warps: int
    num_stages: int


class Side(NamedTuple):
    """Queries or keys, [rows, length]; those of a tile are shaped to broadcast against each other."""

    pos: jax.Array
    segment_ids: jax.Array | None
    full: jax.Array | None = None  # int32, queries only


class Operands(NamedTuple):
    """The arguments of a kernel, or their block specs, or their references."""

    q: jax.Array  # [B, T, H, D]
    k: jax.Array  # [B, S, K, D]
    v: jax.Array
    queries: Side
    keys: Side
    heads: PerHead  # float32, and `full_heads` int32
    bounds: jax.Array  # [rows, variants, blocks, 10]
    dout: jax.Array | None = None  # [B, T, H, D]
    lse: jax.Array | None = None  # [B, H, T of whole blocks], in units of log 2
    delta: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class GpuStatic:
    """What is compiled into a kernel."""

    spec: AttentionSpec
    interpret: bool
    out_dtype: str = "float32"
    outside: bool = False  # attend to what `spec` does *not* see of the keys that full attention would


def query_grid(tile: Tile, q: jax.Array | jax.ShapeDtypeStruct) -> tuple[int, int, int]:
    """The programs for queries [B, T, H, D]: blocks of them, heads, rows of the batch."""
    return -(-q.shape[1] // tile.q_block), q.shape[2], q.shape[0]


def key_grid(tile: Tile, k: jax.Array | jax.ShapeDtypeStruct, heads: int) -> tuple[int, int, int]:
    """The programs for keys [B, S, K, D], of so many heads."""
    return -(-k.shape[1] // tile.kv_block), heads, k.shape[0]
