"""Tile sizes by kind of device: a small table of measured choices, and a rule for fitting them to a call."""

import dataclasses

import jax

# Long windows leave so little waste at their edges that the scheduled kernel serves them as well.
MAX_WINDOW_KERNEL = 2048


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How one call is cut up.

    Attributes:
      q_block, kv_block: tokens of a grid step.
      strip: query rows handled together inside a step; its tiles of logits live in registers and VMEM.
      tile: keys of one tile of a strip in the window kernel.
      sum_on_mxu: take the softmax's row sums from columns of ones next to V. Free where the matrix unit is 256 wide
        and head_dim fills half of it; elsewhere it costs a matmul.
    """

    q_block: int = 1024
    kv_block: int = 1024
    strip: int = 256
    tile: int = 256
    sum_on_mxu: bool = True


# v6e and v7x have matrix units 256 wide, the earlier ones 128.
_BY_GENERATION = {
    "v4": Tiles(strip=128, tile=128, sum_on_mxu=False),
    "v5": Tiles(strip=128, tile=128, sum_on_mxu=False),
    "v6": Tiles(),
    "7": Tiles(),
}


def device_kind() -> str:
    """The kind of device that the current trace is for."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    return jax.devices()[0].device_kind if abstract is None else abstract.device_kind


def choose_tiles(kind: str, q_length: int, kv_length: int, head_dim: int) -> Tiles:
    """The tiles for a call on a device of this kind: the table's, made to fit the lengths and VMEM."""
    tiles = next((tiles for name, tiles in _BY_GENERATION.items() if name in kind), Tiles())
    largest = 1024 if head_dim <= 128 else 512
    return dataclasses.replace(
        tiles,
        q_block=_fit(min(tiles.q_block, largest), q_length),
        kv_block=_fit(min(tiles.kv_block, largest), kv_length),
        sum_on_mxu=tiles.sum_on_mxu and head_dim <= 128,
    )


def _fit(block: int, length: int) -> int:
    """A short axis is one block of whole tiles: 128 tokens (the lanes of a register), or 16 (its sublanes) if fewer."""
    unit = 16 if length <= 128 else 128
    return min(block, -(-length // unit) * unit)
