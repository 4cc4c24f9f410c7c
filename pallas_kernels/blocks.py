"""Tile sizes by kind of device: a table of measured choices (`tiles.json`), and a rule behind it.

A row of the table holds for a chip, a pass, and head_dims and windows up to its own, and says where it comes from. A
call takes, of the rows for its chip and pass whose head_dim and window are not below its own, the one with the smallest
head_dim and then the smallest window; what no row covers, full attention among it, takes the rule's sizes. All of them
are then made to fit the lengths. A file of the same form, named by the environment variable PALLAS_KERNELS_TILES, comes
before it.
"""

import contextlib
import dataclasses
import functools
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.math.spec import ArgumentError

TABLE = Path(__file__).with_name("tiles.json")
FIELDS = {  # of a row, what it is found by and what it says
    "tpu": (("chip", "pass", "head_dim", "window"), ("block", "strip", "tile")),
    "gpu": (("capability", "pass", "head_dim", "itemsize"), ("q_block", "kv_block", "num_warps", "num_stages")),
}
Row = dict[str, Any]
_preferred: list[tuple[str, Row]] = []


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


def _device() -> Any:
    """The device that the current trace is for: that of the mesh, else the default one."""
    if (abstract := jax.sharding.get_abstract_mesh().abstract_device) is not None:
        return abstract
    default = jax.config.jax_default_device
    return jax.devices(default)[0] if default is None or isinstance(default, str) else default


def device_kind() -> str:
    """The kind of device that the current trace is for."""
    return _device().device_kind


def platform() -> str:
    """ "tpu", "gpu" or "cpu": what the current trace is for."""
    name = _device().platform
    return "gpu" if name in ("cuda", "rocm") else name


def on_tpu() -> bool:
    """Whether the current trace is for a TPU."""
    return platform() == "tpu"


def vmem_limit() -> int:
    """Bytes of VMEM that a kernel may take; the compiler keeps arrays in the rest. A v6e has 128 MiB, a core of a v5p
    or v7x 64."""
    return (64 if "v6" in device_kind() else 48) * 2**20


def choose_tiles(
    kind: str, q_length: int, kv_length: int, head_dim: int, *, window: int | None = None, scheduled: bool = False
) -> Tiles:
    """The tiles for a call on a device of this kind, made to fit the lengths.

    Args:
      window: of a call that the window kernel serves alone, to which the table's rows for the forward pass apply;
        None in any other call. The backward pass may change the tiles: `backward_tiles`.
      scheduled: the call is a scheduled kernel's, its positions the default ones. Larger blocks then visit no more
        tiles, and fill and drain the kernel's pipeline less often.
    """
    tiles = next((tiles for name, tiles in _BY_GENERATION.items() if name in kind), Tiles())
    block, sum_on_mxu = (1024, tiles.sum_on_mxu) if head_dim <= 128 else (512, False)
    if scheduled:  # wide heads on narrow matrix units would have too many tiles
        block = 2048 if head_dim <= (256 if tiles.tile >= 256 else 128) else 1024
    tiles = dataclasses.replace(tiles, q_block=block, kv_block=block, sum_on_mxu=sum_on_mxu)
    if row := _nearest(kind, "forward", head_dim, window):
        block = row["block"]
        tiles = dataclasses.replace(tiles, q_block=block, kv_block=block, strip=row["strip"], tile=row["tile"])
    return dataclasses.replace(tiles, q_block=_fit(tiles.q_block, q_length), kv_block=_fit(tiles.kv_block, kv_length))


def longest_window(kind: str, head_dim: int, dtype: jax.typing.DTypeLike) -> int:
    """The longest window that the window kernels take on a device of this kind.

    Their code, all unrolled, and the VMEM for its keys grow with it: too much for wide or float32 rows, and where tiles
    have 128 keys, of which there are four for one of 256.
    """
    tiles = next((tiles for name, tiles in _BY_GENERATION.items() if name in kind), Tiles())
    return 4096 if tiles.tile >= 256 and head_dim * jnp.dtype(dtype).itemsize <= 256 else 2048


def backward_tiles(tiles: Tiles, kind: str, head_dim: int, window: int | None) -> Tiles:
    """The tiles for the window kernel's backward pass, from those of the forward pass.

    The arrays are padded to blocks of the forward pass: a block that does not divide those is not taken.
    """
    row = _nearest(kind, "backward", head_dim, window)
    if row is None:
        return tiles
    block = tiles.q_block if tiles.q_block % row["block"] else row["block"]
    return dataclasses.replace(tiles, q_block=block, kv_block=block, strip=row["strip"], tile=row["tile"])


def _nearest(kind: str, which: str, head_dim: int, window: int | None) -> Row | None:
    if window is None:
        return None
    rows = [
        row
        for row in table_rows("tpu")
        if row["chip"] in kind and row["pass"] == which and row["head_dim"] >= head_dim and row["window"] >= window
    ]
    return min(rows, key=lambda row: (row["head_dim"], row["window"]), default=None)


def table_rows(platform: str) -> list[Row]:
    """The rows for "tpu" or "gpu", those that win a tie first.

    Raises:
      ArgumentError: the file that PALLAS_KERNELS_TILES names is no table of tiles.
    """
    own = os.environ.get("PALLAS_KERNELS_TILES")
    tables = [_read(Path(own))] if own else []
    preferred = [row for where, row in _preferred if where == platform]
    return preferred + [row for table in [*tables, _read(TABLE)] for row in table[platform]]


@contextlib.contextmanager
def preferring(platform: str, rows: Sequence[Row]) -> Iterator[None]:
    """Puts rows before all others while a call is traced: how a search tries tiles."""
    added = [(platform, row) for row in rows]
    _preferred[:0] = added
    try:
        yield
    finally:
        del _preferred[: len(added)]


@functools.cache
def _read(file: Path) -> dict[str, list[Row]]:
    try:
        table = json.loads(file.read_text())
        rows = {platform: table.get(platform, []) for platform in FIELDS}
        for platform, (key, value) in FIELDS.items():
            for row in rows[platform]:
                if missing := [name for name in (*key, *value) if name not in row]:
                    raise ValueError(f"a row for {platform} lacks {', '.join(missing)}: {row}")
    except (OSError, AttributeError, TypeError, ValueError) as error:
        raise ArgumentError(
            f"{file} is no table of tiles: {error}; `swa-jax bench attention --search --write` makes one."
        ) from error
    return rows


def _fit(block: int, length: int) -> int:
    """A short axis is one block of whole tiles: 128 tokens (the lanes of a register), or 16 (its sublanes) if fewer.

    Blocks above 1024 are halved where that leaves less padding.
    """
    unit = 16 if length <= 128 else 128
    while block > 1024 and -(-length // (block // 2)) * (block // 2) < -(-length // block) * block:
        block //= 2
    return min(block, -(-length // unit) * unit)
