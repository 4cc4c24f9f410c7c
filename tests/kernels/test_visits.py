"""Loop bounds against the tables they come from."""

import dataclasses
import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.gpu.loop_bounds import LoopBounds, loop_bounds
from pallas_kernels.math.schedule import fully_visible_by_row, visited_by_row
from pallas_kernels.math.spec import AttentionSpec, coordinates

from .suite import packed_rows, quick_jit

listed = quick_jit(loop_bounds)
FAST = settings(max_examples=60, deadline=None, derandomize=True, database=None)


@functools.partial(quick_jit, static_argnums=(0, 1, 2))
def bounds_of(spec, length, by_key=False):
    """Of rows with default positions, in blocks of 4."""
    where = coordinates(length, length)
    tables = (by_row(spec, where, 4, 4) for by_row in (visited_by_row, fully_visible_by_row))
    return loop_bounds(*(x.swapaxes(1, 2) if by_key else x for x in tables))


def visits(bounds) -> tuple[list[int], list[int]]:
    """The masked and the whole visits of one row of bounds, as a kernel would run through them."""
    entries = np.asarray(bounds).tolist()
    bounds = LoopBounds.read(lambda i: entries[i])
    return [int(bounds.block(i)) for i in range(bounds.num_masked)], list(range(*bounds.whole))


def runs(row) -> int:
    return int((np.diff(np.concatenate([[0], row])) == 1).sum())


@FAST
@given(data=st.data(), length=st.sampled_from([1, 2, 5, 12]))
def test_every_visit_once_and_nothing_else(data, length):
    flags = st.lists(st.booleans(), min_size=length, max_size=length)
    table = np.array(data.draw(flags))
    whole = np.array(data.draw(flags))
    masked, unmasked = visits(np.asarray(listed(table, whole)))
    seen = masked + unmasked
    assert len(seen) == len(set(seen))
    assert table[unmasked].all()
    assert whole[unmasked].all()
    assert set(np.flatnonzero(table)) <= set(seen)
    if runs(table) <= 2:
        assert set(seen) == set(np.flatnonzero(table))
    if (whole & table).any():
        assert unmasked[-1] == np.flatnonzero(whole & table)[-1]


def test_no_visits():
    none = np.zeros((3, 5), bool)
    for row in np.asarray(listed(none, none)):
        assert visits(row) == ([], [])


def test_window_with_sink_tokens():
    """12 blocks of 4: the last query block sees the sink tokens' block and a window of 16, whose middle is whole."""
    spec = AttentionSpec(window=16, num_sink_tokens=4)
    assert visits(bounds_of(spec, 48)[0, 11]) == ([0, 7, 11], [8, 9, 10])


@st.composite
def calls(draw):
    """A spec and coordinates of packed rows of up to 6 blocks of 4."""
    window = draw(st.none() | st.integers(1, 20))
    spec = AttentionSpec(
        window=window,
        num_sink_tokens=draw(st.integers(0, 6)),
        causal=draw(st.booleans()),
        chunked=window is not None and draw(st.booleans()),
    )
    length = 4 * draw(st.sampled_from([1, 3, 6]))  # few shapes, since JAX compiles its operations for each
    options = {}
    if draw(st.booleans()):
        options["q_segment_ids"] = draw(packed_rows(length))
    if spec.window is not None and draw(st.booleans()):
        options["full_from"] = np.int32([draw(st.lists(st.integers(0, length), min_size=6, max_size=6))])
    return spec, coordinates(length, length, **options)


@FAST
@given(call=calls())
def test_default_positions_need_no_more_than_two_runs(call):
    """So that no block outside the schedule is visited, by queries or (causally) by keys."""
    spec, where = call
    spec = dataclasses.replace(spec, causal=True)
    table = visited_by_row(spec, where, 4, 4)
    assert max(map(runs, np.asarray(table)[0])) <= 2


@pytest.mark.parametrize("by_key", [False, True])
def test_the_visits_of_a_window_do_not_grow_with_the_length(by_key):
    spec = AttentionSpec(window=8)
    for length in (32, 128):
        assert max(len(set().union(*visits(row))) for row in bounds_of(spec, length, by_key)[0]) == 3
