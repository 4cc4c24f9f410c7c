"""The mask planner: which tiles are visited, and how they are masked, against brute force over every pair of tokens."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.blocks import Tiles
from pallas_kernels.math.schedule import (
    Kind,
    bounds_of,
    fully_visible_by_row,
    kind_at,
    schedule_pairs,
    visited,
    visited_by_row,
)
from pallas_kernels.math.spec import AttentionSpec, coordinates
from pallas_kernels.tpu.schedule.pair_schedule import reach_of, seen_tiles
from pallas_kernels.tpu.tile.tiles import Call
from pallas_kernels.tpu.window.geometry import blocks_back, window_steps, window_tiles

from .suite import packed_rows, quick_jit, seen_pairs

FAST = settings(max_examples=40, deadline=None, derandomize=True, database=None)
BLOCKS = st.sampled_from([1, 5])  # few shapes, since JAX compiles its operations for each
SIZES = st.sampled_from([1, 7])


def blocks_with_a_visible_pair(spec, where, q_block, kv_block, *, outside=False):
    mask = seen_pairs(spec, where, outside=outside)
    rows, q_length, kv_length = mask.shape
    mask = mask.reshape(rows, q_length // q_block, q_block, kv_length // kv_block, kv_block)
    return mask.any(axis=(0, 2, 4))


@st.composite
def specs(draw, window=None, chunked=False):
    return AttentionSpec(
        window=draw(st.none() | st.integers(1, 40)) if window is None else window,
        num_sink_tokens=draw(st.integers(0, 9)),
        causal=draw(st.booleans()),
        chunked=chunked and draw(st.booleans()),
    )


@FAST
@given(spec=specs(), q_blocks=BLOCKS, kv_blocks=BLOCKS, sizes=st.sampled_from([(1, 1), (4, 6), (9, 4)]))
def test_default_positions_are_exact(spec, q_blocks, kv_blocks, sizes):
    where = coordinates(q_blocks * sizes[0], kv_blocks * sizes[1])
    np.testing.assert_array_equal(visited(spec, where, *sizes), blocks_with_a_visible_pair(spec, where, *sizes))


@FAST
@given(data=st.data(), spec=specs(), blocks=BLOCKS, size=SIZES)
def test_packed_rows_are_exact(data, spec, blocks, size):
    segments = data.draw(packed_rows(blocks * size))
    where = coordinates(blocks * size, blocks * size, q_segment_ids=segments)
    np.testing.assert_array_equal(visited(spec, where, size, size), blocks_with_a_visible_pair(spec, where, size, size))


@FAST
@given(data=st.data(), spec=specs(window=5), blocks=BLOCKS, size=SIZES)
def test_full_from_misses_nothing_and_is_exact_for_one_segment(data, spec, blocks, size):
    segments = data.draw(packed_rows(blocks * size))
    columns = max(1, int(segments.max()))
    full_from = data.draw(st.lists(st.integers(0, blocks * size), min_size=columns, max_size=columns))
    where = coordinates(blocks * size, blocks * size, q_segment_ids=segments, full_from=np.int32([full_from]))
    table, needed = visited(spec, where, size, size), blocks_with_a_visible_pair(spec, where, size, size)
    assert not (needed & ~np.asarray(table)).any()
    if columns == 1:
        np.testing.assert_array_equal(table, needed)


@FAST
@given(data=st.data(), spec=specs(window=5, chunked=True), blocks=BLOCKS, size=SIZES, outside=st.booleans())
def test_nothing_visible_is_missed_and_nothing_hidden_goes_without_a_mask(data, spec, blocks, size, outside):
    """Any positions, segments and full rows, queries other than keys; row by row."""
    length = blocks * size
    options = {}
    for side in "q", "kv":
        if data.draw(st.booleans()):
            scattered = st.lists(st.integers(-1, 2 * length), min_size=length, max_size=length)
            run = st.integers(-2, 2 * length).map(lambda start: [start + i for i in range(length)])
            options[f"{side}_positions"] = data.draw(st.lists(scattered | run, min_size=2, max_size=2).map(np.int32))
    if data.draw(st.booleans()):
        options["q_segment_ids"] = data.draw(packed_rows(length, rows=2))
        options["kv_segment_ids"] = data.draw(packed_rows(length, rows=2))
    elif data.draw(st.booleans()):
        options["full_from"] = data.draw(st.lists(st.integers(0, length), min_size=2, max_size=2).map(np.int32))
    where = coordinates(length, length, **options)
    mask = seen_pairs(spec, where, outside=outside)
    tiles = mask.reshape(len(mask), blocks, size, blocks, size)
    listed = np.asarray(visited_by_row(spec, where, size, size, outside=outside))
    assert not (tiles.any(axis=(2, 4)) & ~listed).any()
    whole = np.asarray(fully_visible_by_row(spec, where, size, size, outside=outside))
    assert not (whole & ~tiles.all(axis=(2, 4))).any()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [1, 4, 5, 9, 40])
def test_outside_the_window_is_exact_without_sink_tokens(window, causal):
    spec, where = AttentionSpec(window=window, causal=causal), coordinates(40, 40)
    np.testing.assert_array_equal(
        visited(spec, where, 5, 5, outside=True), blocks_with_a_visible_pair(spec, where, 5, 5, outside=True)
    )


def test_lists_name_each_visited_block_once_in_order():
    schedule = schedule_pairs(AttentionSpec(window=3, num_sink_tokens=1), coordinates(12, 12), 2, 2)
    visits = [row[:count].tolist() for row, count in zip(*map(np.asarray, schedule), strict=True)]
    assert visits == [[0], [0, 1], [0, 1, 2], [0, 2, 3], [0, 3, 4], [0, 4, 5]]


def test_a_windowed_schedule_grows_with_the_length_not_its_square():
    spec = AttentionSpec(window=512, num_sink_tokens=4)
    listed = quick_jit(schedule_pairs, static_argnums=(0, 2, 3))
    visits = [int(np.sum(listed(spec, coordinates(t, t), 128, 128).counts)) for t in (8192, 16384)]
    assert visits[1] <= 2.1 * visits[0]
    assert visits[0] <= 6 * 8192 / 128


def kind_by_force(window, outside, queries, keys) -> Kind:
    """From the distances of all pairs of a tile: nothing but the definition."""
    back = np.asarray(queries)[:, None] - np.asarray(keys)
    later, past = back < 0, back >= (np.inf if window is None else window)
    seen = ~later & (past if outside else ~past)
    if seen.all() or not seen.any():
        return Kind.FULL if seen.all() else Kind.NONE
    if outside:  # a key that comes later is as unseen as one inside the window, and hidden by the same comparison
        return Kind.EDGE
    return {(True, False): Kind.DIAGONAL, (False, True): Kind.EDGE}.get((later.any(), past.any()), Kind.BOTH)


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(
    window=st.none() | st.integers(1, 30),
    outside=st.booleans(),
    first=st.tuples(st.integers(0, 40), st.integers(0, 40)),
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 9)),
)
def test_kinds_by_distance_are_exact(window, outside, first, sizes):
    queries, keys = (range(a, a + n) for a, n in zip(first, sizes, strict=True))
    kind = kind_at(bounds_of(AttentionSpec(window), outside=outside), queries[0] - keys[-1], queries[-1] - keys[0])
    expected = kind_by_force(window, outside, queries, keys)
    # The band that a tile crosses may be narrower than the tile, so that no pair is seen and a mask hides them all.
    assert kind is expected or (expected is Kind.NONE and kind is not Kind.FULL)


@pytest.mark.parametrize("window", [1, 5, 8, 9, 16, 17, 33])
@pytest.mark.parametrize(("strip", "tile"), [(4, 4), (8, 4), (16, 8)])
def test_tiles_of_the_window_kernels_are_of_their_kind_and_miss_nothing(window, strip, tile):
    call = Call(AttentionSpec(window), Tiles(16, 16, strip=strip, tile=tile))
    steps = window_steps(call, num_steps=5)
    for step in range(5):
        present = steps[min(step, len(steps) - 1)][0]
        for start in range(0, 16, strip):
            queries = range(step * 16 + start, step * 16 + start + strip)
            covered = set()
            for one in window_tiles(call, start, present):
                keys = range(step * 16 + one.key, step * 16 + one.key + one.size)
                assert keys[0] == (step - blocks_back(call) + one.block) * 16 + one.offset
                assert one.kind is kind_by_force(window, False, queries, keys)
                assert one.offset + one.size <= 16
                covered |= set(keys)
            first = max(queries[0] - window + 1, 0)
            assert covered == set(range(first - first % tile, queries[-1] + 1))  # no whole tile of waste


@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3, 8, 9, 11, 21])
def test_tiles_of_a_walk_are_of_their_kind_and_miss_nothing(window, outside):
    call = Call(AttentionSpec(window), Tiles(8, 8, strip=4, tile=4), indexed=True, outside=outside)
    reach = reach_of(call, num_blocks=6)
    for distance in range(6):
        pairs = range(distance * 8, distance * 8 + 8), range(8)
        expected = kind_by_force(window, outside, *pairs)
        assert (distance in reach.plain) == (expected is Kind.FULL)
        assert (distance in reach.partly) == (expected not in (Kind.FULL, Kind.NONE))
        if distance not in reach.partly:
            continue
        for rows in (slice(0, 4), slice(4, 8)):
            queries = range(distance * 8 + rows.start, distance * 8 + rows.stop)
            found = {}
            for keys, masked in seen_tiles(call, distance, rows, tile=4):
                found |= dict.fromkeys(range(keys.start, keys.stop, 4), masked)
            for key in (0, 4):
                kind = kind_by_force(window, outside, queries, range(key, key + 4))
                assert found.get(key, False) == (kind not in (Kind.FULL, Kind.NONE))
                assert key in found or kind is Kind.NONE


def test_blocks_of_sink_tokens_alone_need_no_mask():
    where = coordinates(48, 48)
    full = fully_visible_by_row(AttentionSpec(9, 8), where, 8, 8)[0]
    assert full[2:, 0].all()  # beyond the window, and not later than any query
    assert not full[0, 0]
