"""Which KV blocks are visited, against brute force over every pair of tokens."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.schedule import make_schedule, visited
from pallas_kernels.spec import AttentionSpec, coordinates, dense_mask

FAST = settings(max_examples=40, deadline=None, derandomize=True, database=None)
BLOCKS = st.sampled_from([1, 3, 7])  # few shapes, since JAX compiles its operations for each
SIZES = st.sampled_from([1, 4, 9])


def blocks_with_a_visible_pair(spec, where, q_block, kv_block, *, outside=False):
    mask = np.asarray(dense_mask(spec, where))
    if outside:
        mask = np.asarray(dense_mask(dataclasses.replace(spec, window=None), where)) & ~mask
    rows, q_length, kv_length = mask.shape
    mask = mask.reshape(rows, q_length // q_block, q_block, kv_length // kv_block, kv_block)
    return mask.any(axis=(0, 2, 4))


@st.composite
def specs(draw, window=None):
    return AttentionSpec(
        window=draw(st.none() | st.integers(1, 40)) if window is None else window,
        num_sink_tokens=draw(st.integers(0, 9)),
        causal=draw(st.booleans()),
    )


@st.composite
def packed_rows(draw, length, rows=1):
    """Segment ids 1, 2, ... in runs, padding before or after."""
    table = []
    for _ in range(rows):
        runs = draw(st.lists(st.integers(1, length), min_size=1, max_size=6))
        row = [0] * draw(st.integers(0, length // 2))
        for i, run in enumerate(runs, start=1):
            row += [i] * run
        table.append((row + [0] * length)[:length])
    return jnp.asarray(table, jnp.int32)


@FAST
@given(spec=specs(), q_blocks=BLOCKS, kv_blocks=BLOCKS, sizes=st.sampled_from([(1, 1), (4, 6), (9, 4)]))
def test_default_positions_are_exact(spec, q_blocks, kv_blocks, sizes):
    where = coordinates(q_blocks * sizes[0], kv_blocks * sizes[1])
    np.testing.assert_array_equal(
        visited(spec, where, *sizes), blocks_with_a_visible_pair(spec, where, *sizes)
    )


@FAST
@given(data=st.data(), spec=specs(), blocks=BLOCKS, size=SIZES)
def test_packed_rows_are_exact(data, spec, blocks, size):
    segments = data.draw(packed_rows(blocks * size))
    where = coordinates(blocks * size, blocks * size, q_segment_ids=segments)
    np.testing.assert_array_equal(
        visited(spec, where, size, size), blocks_with_a_visible_pair(spec, where, size, size)
    )


@FAST
@given(data=st.data(), spec=specs(window=5), blocks=BLOCKS, size=SIZES)
def test_full_from_misses_nothing_and_is_exact_for_one_segment(data, spec, blocks, size):
    segments = data.draw(packed_rows(blocks * size))
    columns = max(1, int(segments.max()))
    full_from = data.draw(st.lists(st.integers(0, blocks * size), min_size=columns, max_size=columns))
    where = coordinates(
        blocks * size, blocks * size, q_segment_ids=segments, full_from=jnp.asarray([full_from])
    )
    table, needed = visited(spec, where, size, size), blocks_with_a_visible_pair(spec, where, size, size)
    assert not (needed & ~np.asarray(table)).any()
    if columns == 1:
        np.testing.assert_array_equal(table, needed)


@FAST
@given(data=st.data(), spec=specs(window=5), blocks=BLOCKS, size=SIZES, outside=st.booleans())
def test_nothing_visible_is_missed(data, spec, blocks, size, outside):
    """Any positions, several rows, queries other than keys."""
    length = blocks * size
    options = {}
    for side in "q", "kv":
        if data.draw(st.booleans()):
            positions = st.lists(st.integers(-1, 2 * length), min_size=length, max_size=length)
            options[f"{side}_positions"] = jnp.asarray(data.draw(st.lists(positions, min_size=2, max_size=2)))
    if data.draw(st.booleans()):
        options["q_segment_ids"] = data.draw(packed_rows(length, rows=2))
        options["kv_segment_ids"] = data.draw(packed_rows(length, rows=2))
    elif data.draw(st.booleans()):
        options["full_from"] = jnp.asarray(
            data.draw(st.lists(st.integers(0, length), min_size=2, max_size=2))
        )
    where = coordinates(length, length, **options)
    needed = blocks_with_a_visible_pair(spec, where, size, size, outside=outside)
    assert not (needed & ~np.asarray(visited(spec, where, size, size, outside=outside))).any()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [1, 4, 5, 9, 40])
def test_outside_the_window_is_exact_without_sink_tokens(window, causal):
    spec, where = AttentionSpec(window=window, causal=causal), coordinates(40, 40)
    np.testing.assert_array_equal(
        visited(spec, where, 5, 5, outside=True), blocks_with_a_visible_pair(spec, where, 5, 5, outside=True)
    )


def test_lists_name_each_visited_block_once_in_order():
    schedule = make_schedule(AttentionSpec(window=3, num_sink_tokens=1), coordinates(12, 12), 2, 2)
    visits = [
        list(map(int, row[:count])) for row, count in zip(schedule.blocks, schedule.counts, strict=True)
    ]
    assert visits == [[0], [0, 1], [0, 1, 2], [0, 2, 3], [0, 3, 4], [0, 4, 5]]


def test_a_windowed_schedule_grows_with_the_length_not_its_square():
    spec = AttentionSpec(window=512, num_sink_tokens=4)
    visits = [int(make_schedule(spec, coordinates(t, t), 128, 128).counts.sum()) for t in (8192, 16384)]
    assert visits[1] <= 2.1 * visits[0]
    assert visits[0] <= 6 * 8192 / 128
