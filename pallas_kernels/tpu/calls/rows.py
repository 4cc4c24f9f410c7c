"""Gathers chosen rows of head-major arrays, and adds results for these rows to where they came from.

The rows keep their order, so that a tile of chosen rows comes from a run of tokens. Both ways are products with a
matrix of 0 and 1 in the matrix unit, for each chunk of tokens and each tile that holds rows of it: no array is moved
from the kernels' layout, heads first, to that of a gather, tokens first.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.math.nonfinite import finite, is_finite, sees_non_finite
from pallas_kernels.math.spec import Coordinates
from pallas_kernels.tpu.tile.rotation import rotate_gradient_back, rotate_tile, table_blocks
from pallas_kernels.tpu.tile.tiles import (
    LANES,
    NN,
    Blocked,
    Call,
    LaunchGrid,
    LaunchHeads,
    Ref,
    dot,
    largest_divisor,
    launch,
    shape_like,
    split,
)

_CHUNK = 512  # tokens
_MXU = 256  # columns of the widest matrix unit, which several heads fill
_UNROLLED = 4
_SUM_ROWS = 8  # of ones beside the matrix: their product shows whether a number is not finite
_STEP_BYTES = 12 * 2**20  # of the blocks of a step, of which there are two buffers


class Chosen(NamedTuple):
    """Which rows of [B, T] are chosen, and the pairs of tiles and chunks that hold them."""

    rank: jax.Array  # [B, 1, T] int32: the place of a token among the chosen ones, -1 for the others
    tiles: jax.Array  # [B * pairs] int32, of each pair
    chunks: jax.Array  # [B * pairs] int32
    totals: jax.Array  # [B] int32: so many pairs; those behind them repeat the last one
    ends: jax.Array  # [B * chunks] int32: the chosen rows up to the end of each chunk


def choose(member: jax.Array, tile: int) -> Chosen:
    """The members of `member` [B, T] bool, in tiles of so many rows. Every chunk of tokens is in some pair."""
    batch, length = member.shape
    size = math.gcd(length, _CHUNK)
    place = jnp.cumsum(member, axis=1, dtype=jnp.int32)
    rank = jnp.where(member, place - 1, -1)
    ends = place[:, size - 1 :: size]  # [B, chunks]
    starts = ends - member.reshape(batch, -1, size).sum(axis=2, dtype=jnp.int32)
    first = starts // tile
    count = jnp.maximum(-(-ends // tile) - first, 1)
    through = jnp.cumsum(count, axis=1)
    number = jnp.arange(length // size + length // tile, dtype=jnp.int32)
    number = jnp.minimum(number, through[:, -1:] - 1)  # [B, pairs]
    chunk = (through[:, None] <= number[..., None]).sum(axis=2, dtype=jnp.int32)
    here = chunk[..., None] == jnp.arange(length // size)  # in place of gathers of single numbers
    tiles = number + jnp.where(here, (first - through + count)[:, None], 0).sum(axis=2)
    tiles = jnp.minimum(tiles, length // tile - 1)
    return Chosen(rank[:, None], tiles.reshape(-1), chunk.reshape(-1), through[:, -1], ends.reshape(-1))


def gather_rows(
    call: Call, chosen: Chosen, q: jax.Array, others: tuple[jax.Array, ...], tile: int, where: Coordinates
) -> tuple[jax.Array, ...]:
    """The chosen rows of queries, rotated, and of other arrays [B, H, T, D]: [B, H, T, D] each.

    What is behind the last tile of chosen rows is undefined.
    """
    arrays = q, *others
    grid = _RowsGrid(chosen, q, tile, len(arrays))
    tables = grid.tables(where)
    return launch(
        call,
        functools.partial(_gather_rows_kernel, grid, call, len(tables)),
        "rows_together",
        grid=LaunchGrid(grid.shape, LaunchHeads(1), chosen[1:]),
        inputs=[Blocked(chosen.rank, grid.of_ranks), *tables, *(Blocked(x, grid.of_chunks) for x in arrays)],
        outputs=[Blocked(shape_like(x.shape, x.dtype, x), grid.of_tiles) for x in arrays],
    )


def add_rows(call: Call, chosen: Chosen, dq: jax.Array, rows: jax.Array, tile: int, where: Coordinates) -> jax.Array:
    """dq [B, H, T, D] with `rows`, the gradients of what `gather_rows` made of the queries, added for their tokens."""
    grid = _RowsGrid(chosen, dq, tile, 2)
    tables = grid.tables(where)
    (result,) = launch(
        call,
        functools.partial(_add_rows, grid, call, len(tables)),
        "rows_added",
        grid=LaunchGrid(grid.shape, LaunchHeads(1), chosen[1:]),
        inputs=[
            Blocked(chosen.rank, grid.of_ranks),
            *tables,
            Blocked(dq, grid.of_chunks),
            Blocked(rows, grid.of_tiles),
        ],
        outputs=[Blocked(shape_like(dq.shape, dq.dtype, dq), grid.of_chunks)],
    )
    return result


def heads_a_step(num_heads: int, head_dim: int, dtype, arrays: int, tile: int, length: int) -> int:
    """The heads that there is room for, with so many arrays beside another."""
    rows = tile + math.gcd(length, _CHUNK)
    return largest_divisor(num_heads, _STEP_BYTES // (arrays * rows * max(head_dim, LANES) * jnp.dtype(dtype).itemsize))


def heads_abreast(heads: int, head_dim: int) -> int:
    """The heads of one product: as many as fill the matrix unit."""
    return math.gcd(heads, max(_MXU // head_dim, 1))


def heads_unrolled(heads: int, head_dim: int) -> int:
    """The heads that one piece of code serves."""
    abreast = heads_abreast(heads, head_dim)
    return abreast * math.gcd(heads // abreast, _UNROLLED)


class _RowsGrid:
    """A step has a chunk of tokens and a tile of rows, of as many heads as there is room for."""

    def __init__(self, chosen: Chosen, x: jax.Array, tile: int, arrays: int) -> None:
        batch, num_heads, length, head_dim = x.shape
        self.tile, self.chunk = tile, math.gcd(length, _CHUNK)
        self.pairs, self.chunks = len(chosen.tiles) // batch, length // self.chunk
        self.heads = heads = heads_a_step(num_heads, head_dim, x.dtype, arrays, tile, length)
        self.shape = batch, num_heads // heads, chosen.totals.max()

        def spec(block, index):
            """Of an array's block, by the row of the batch, the step's heads, its tile and its chunk."""

            def index_map(b, h, i, tiles, chunks, *_):
                place = b * self.pairs + i
                return index(b, h, tiles[place], chunks[place])

            return pl.BlockSpec(block, index_map)

        self.of_ranks = spec((None, 1, self.chunk), lambda b, h, tile, chunk: (b, 0, chunk))
        self.of_chunks = spec((None, heads, self.chunk, head_dim), lambda b, h, tile, chunk: (b, h, chunk, 0))
        self.of_tiles = spec((None, heads, tile, head_dim), lambda b, h, tile, chunk: (b, h, tile, 0))
        self.of_table = functools.partial(spec, (None, self.chunk, head_dim))

    def tables(self, where: Coordinates) -> list[Blocked]:
        """What the queries of a chunk are rotated by, if they come unrotated."""
        return table_blocks(where, lambda row: self.of_table(lambda b, h, tile, chunk: (row(b), chunk, 0)))

    def at(self, numbers: Ref) -> tuple[jax.Array, jax.Array]:
        """A number of this step's pair, and whether the pair before it has another."""
        i = pl.program_id(2)
        place = pl.program_id(0) * self.pairs + i
        here = numbers[place]
        return here, (i == 0) | (numbers[jnp.maximum(place - 1, 0)] != here)


def _gather_rows_kernel(grid: _RowsGrid, call: Call, num_tables: int, _order, *refs: Ref) -> None:
    (tiles, chunks, totals, ends), (rank,), tables, refs = split(refs, 4, 1, num_tables)
    arrays, results = refs[: len(refs) // 2], refs[len(refs) // 2 :]
    tile, is_first = grid.at(tiles)
    chunk = grid.at(chunks)[0]
    place = pl.program_id(0) * grid.chunks + chunk
    start, end = jnp.where(chunk == 0, 0, ends[jnp.maximum(place - 1, 0)]), ends[place]

    @pl.when(pl.program_id(2) < totals[pl.program_id(0)])
    def _():
        @pl.when(is_first)
        def begin():
            for out in results:
                out[...] = jnp.zeros_like(out)

        row = lax.broadcasted_iota(jnp.int32, (grid.tile, grid.chunk), 0)
        is_row = rank[...] - tile * grid.tile == row
        row = tile * grid.tile + lax.broadcasted_iota(jnp.int32, results[0].shape[1:], 0)
        mine = (row >= start) & (row < end)  # the rows that come from this chunk

        def write(out: Ref, h, found: jax.Array) -> None:
            out[h] = jnp.where(mine, found.astype(out.dtype), out[h])

        def rotated(value: jax.Array) -> jax.Array:
            return rotate_tile(call, value, *(table[...] for table in tables))

        for i, (source, out) in enumerate(zip(arrays, results, strict=True)):
            read = rotated if tables and i == 0 else _as_it_is
            _for_all_heads(grid.heads, is_row, source, out, read, write)


def _add_rows(grid: _RowsGrid, call: Call, num_tables: int, _order, *refs: Ref) -> None:
    (tiles, chunks, totals, _ends), (rank,), tables, (dq, rows, out) = split(refs, 4, 1, num_tables)
    tile, is_first = grid.at(tiles)[0], grid.at(chunks)[1]

    @pl.when(pl.program_id(2) < totals[pl.program_id(0)])
    def _():
        @pl.when(is_first)
        def begin():
            out[...] = dq[...]

        columns = jnp.broadcast_to(rank[...] - tile * grid.tile, (min(LANES, grid.tile), grid.chunk)).T
        columns = jnp.concatenate([columns] * -(-max(grid.tile, dq.shape[2]) // columns.shape[1]), axis=1)
        is_row = columns[:, : grid.tile] == lax.broadcasted_iota(jnp.int32, (grid.chunk, grid.tile), 1)
        columns = columns[:, : dq.shape[2]]
        mine = (columns >= 0) & (columns < grid.tile)  # the tokens whose rows are in this tile

        def write(out: Ref, h, found: jax.Array) -> None:
            if tables:
                found = rotate_gradient_back(call, found, *(table[...] for table in tables))
            found += dq[h].astype(jnp.float32)
            out[h] = jnp.where(mine, found.astype(out.dtype), out[h])

        _for_all_heads(grid.heads, is_row, rows, out, _as_it_is, write)


def _as_it_is(value: jax.Array) -> jax.Array:
    return value


def _for_all_heads(heads: int, is_row: jax.Array, source: Ref, out: Ref, read: Callable, write: Callable) -> None:
    """Calls `write` with the product of the matrix and the source's rows, as `read` has them, for each head."""
    num_rows, width = len(is_row), source.shape[2]
    abreast = heads_abreast(heads, width)
    matrix = jnp.where(is_row, 1.0, 0.0).astype(source.dtype)
    matrix = jnp.concatenate([matrix, jnp.ones_like(matrix[:_SUM_ROWS])])

    def add(i, sizes):
        first = i * abreast
        values = [read(source[first + j]) for j in range(abreast)]
        product = dot(matrix, jnp.concatenate(values, axis=1), NN)
        for j in range(abreast):
            found = product[:, j * width : (j + 1) * width]
            write(out, first + j, found[:num_rows])
            sizes += jnp.abs(found[num_rows:])
        return sizes

    nothing = jnp.zeros_like(source[0, :_SUM_ROWS].astype(jnp.float32))
    unrolled = heads_unrolled(heads, width) // abreast
    sizes = lax.fori_loop(0, heads // abreast, add, nothing, unroll=unrolled)

    # A number that is not finite has made NaN of rows that are not its own: all heads once more.
    @pl.when(jnp.any(~is_finite(sizes)))
    def again():
        @pl.loop(0, heads)
        def _(h):
            value = read(source[h])
            found = dot(matrix[:num_rows], finite(value), NN)
            write(out, h, jnp.where(sees_non_finite(is_row, value), jnp.nan, found))
