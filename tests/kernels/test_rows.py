"""Chosen rows put together and apart again, against plain indexing."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import AttentionSpec
from pallas_kernels.blocks import Tiles
from pallas_kernels.math.rotary import Rotation, rotate
from pallas_kernels.math.spec import coordinates
from pallas_kernels.tpu.calls.rows import add_rows, choose, gather_rows
from pallas_kernels.tpu.tile.rotation import left_to_kernels
from pallas_kernels.tpu.tile.tiles import Call

from .suite import quick_jit
from .tolerances import VALUE_TOLERANCE

CALL = Call(AttentionSpec(64), Tiles(128, 128, strip=128, tile=128), interpret=True)
TILE, HEADS, HEAD_DIM = 32, 3, 16


def members(length: int, kind: str) -> np.ndarray:
    rng = np.random.default_rng(length)
    if kind == "drawn":
        return rng.random((2, length)) < [[0.13], [0.6]]
    if kind == "runs":  # whole chunks without a member, and whole ones of members
        return np.repeat(rng.random((2, length // 16)) < 0.4, 16, axis=1)
    return np.full((2, length), kind == "all")


def drawn(length: int, dtype: str, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(2, HEADS, length, HEAD_DIM)).astype(jnp.dtype(dtype))


# Compiled once for each length.
listed = quick_jit(choose, static_argnums=1)


@quick_jit
def gather(chosen, q, x):
    return gather_rows(CALL, chosen, q, (x,), TILE, coordinates(q.shape[2], q.shape[2]))


@quick_jit
def add(chosen, dq, rows):
    return add_rows(CALL, chosen, dq, rows, TILE, coordinates(dq.shape[2], dq.shape[2]))


@pytest.mark.parametrize("kind", ["drawn", "runs", "all", "none"])
@pytest.mark.parametrize(("length", "dtype"), [(64, "float32"), (1024, "bfloat16")])
def test_rows_are_those_of_plain_indexing(kind, length, dtype):
    member = members(length, kind)
    chosen = listed(member, TILE)
    arrays = drawn(length, dtype, 0), drawn(length, dtype, 1)
    gathered = gather(chosen, *arrays)
    for x, rows in zip(arrays, map(np.asarray, gathered), strict=True):
        for b in range(2):
            (index,) = np.nonzero(member[b])
            np.testing.assert_array_equal(rows[b, :, : len(index)], x[b][:, index])
            rest = -len(index) % TILE
            np.testing.assert_array_equal(rows[b, :, len(index) :][:, :rest], 0)
    more = drawn(length, dtype, 2)
    added = np.asarray(add(chosen, arrays[0], more))
    for b in range(2):
        (index,) = np.nonzero(member[b])
        expected = np.array(arrays[0][b])
        expected[:, index] += more[b, :, : len(index)]
        np.testing.assert_array_equal(added[b], expected)


@pytest.mark.parametrize("rows_of_tables", [1, 2])
def test_queries_are_rotated_on_the_way_and_their_gradients_rotated_back(rows_of_tables):
    """Heads of 128, which fill a register; rotated queries carry the scale as those do that XLA rotates."""
    length, head_dim, distance = 1024, 128, 64  # two chunks
    member, rng = members(length, "drawn"), np.random.default_rng(0)
    chosen = listed(member, TILE)
    q, dq, more = rng.normal(size=(3, 2, 2, length, head_dim)).astype(np.float32)
    angles = np.tile(rng.uniform(0, 6, size=(rows_of_tables, length, distance)), 2)
    signed = np.sin(angles) * np.repeat([-1, 1], distance)
    rotation = Rotation(*(jnp.asarray(x, jnp.float32) for x in (np.cos(angles), signed)), distance)
    call = dataclasses.replace(CALL, spec=AttentionSpec(64, scale=0.3))
    call, where = left_to_kernels(call, coordinates(length, length), rotation)

    def rotated(q):
        return call.query_factor * rotate(q.swapaxes(1, 2), rotation).swapaxes(1, 2)

    tolerance = VALUE_TOLERANCE["float32"]

    @quick_jit
    def gathered(q):
        return rotated(q), gather_rows(call, chosen, q, (dq,), TILE, where)

    expected, (found, others) = jax.tree.map(np.asarray, gathered(q))
    for b in range(2):
        (index,) = np.nonzero(member[b])
        np.testing.assert_allclose(found[b, :, : len(index)], expected[b][:, index], atol=tolerance)
        np.testing.assert_array_equal(others[b, :, : len(index)], dq[b][:, index])
    spread = np.zeros_like(q)
    for b in range(2):
        (index,) = np.nonzero(member[b])
        spread[b, :, index] = more[b, :, : len(index)].swapaxes(0, 1)

    @quick_jit
    def added(dq, more, spread):
        return add_rows(call, chosen, dq, more, TILE, where), dq + jax.vjp(rotated, q)[1](spread)[0]

    np.testing.assert_allclose(*added(dq, more, spread), atol=tolerance)


def test_every_chunk_is_visited_and_no_pair_twice():
    for kind in ("drawn", "runs", "all", "none"):
        member = members(1024, kind)
        chosen = listed(member, TILE)
        for b, total in enumerate(np.asarray(chosen.totals)):
            pairs = np.stack([np.asarray(x).reshape(2, -1)[b, :total] for x in (chosen.tiles, chosen.chunks)])
            assert {*pairs[1]} == {0, 1}  # chunks of 512
            assert len({*map(tuple, pairs.T)}) == total
            assert np.all(np.diff(pairs, axis=1) >= 0)
            row = np.cumsum(member[b]) - 1
            needed = {(row[t] // TILE, t // 512) for t in np.nonzero(member[b])[0]}
            assert needed <= {*map(tuple, pairs.T.tolist())}


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_stays_in_its_row(bad):
    member = members(1024, "drawn")
    chosen = listed(member, TILE)
    (index,) = np.nonzero(member[0])
    ignored = int(np.nonzero(~member[0])[0][3])
    x = drawn(1024, "bfloat16", 0)
    expected = x[0][:, index].astype(np.float32)
    expected[2, 40, 5] = np.nan
    x[0, 1, ignored, 2] = x[0, 2, index[40], 5] = bad
    rows = np.asarray(gather(chosen, x, x)[0], np.float32)
    np.testing.assert_array_equal(rows[0, :, : len(index)], expected)
    # Back again: a row that is not finite stays in its token.
    more = drawn(1024, "bfloat16", 1)
    more[0, 1, 7, 3] = bad
    found = np.asarray(add(chosen, np.zeros_like(x), more), np.float32)
    hit = np.zeros(found.shape, bool)
    hit[0, 1, index[7], 3] = True
    np.testing.assert_array_equal(~np.isfinite(found), hit)
