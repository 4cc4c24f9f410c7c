"""The visibility rule, held to masks written out by hand: rows are queries, columns are keys, `#` is visible."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import AttentionSpec, segment_positions
from pallas_kernels.math.spec import coordinates, visible


def picture(text):
    return np.array([[mark == "#" for mark in line] for line in text.split()])


CAUSAL = """
    #.......
    ##......
    ###.....
    ####....
    #####...
    ######..
    #######.
    ########
"""

PACKED = [1, 1, 1, 2, 2, 2, 2, 0]

MASKS = {
    "full": (AttentionSpec(), {}, CAUSAL),
    "full-bidirectional": (AttentionSpec(causal=False), {}, "######## " * 8),
    "window-1": (
        AttentionSpec(window=1),
        {},
        """
        #.......
        .#......
        ..#.....
        ...#....
        ....#...
        .....#..
        ......#.
        .......#
        """,
    ),
    "window-3": (
        AttentionSpec(window=3),
        {},
        """
        #.......
        ##......
        ###.....
        .###....
        ..###...
        ...###..
        ....###.
        .....###
        """,
    ),
    "window-7": (
        AttentionSpec(window=7),
        {},
        """
        #.......
        ##......
        ###.....
        ####....
        #####...
        ######..
        #######.
        .#######
        """,
    ),
    "window-8-is-full": (AttentionSpec(window=8), {}, CAUSAL),
    "window-bidirectional": (
        AttentionSpec(window=2, causal=False),
        {},
        """
        ##......
        ###.....
        .###....
        ..###...
        ...###..
        ....###.
        .....###
        ......##
        """,
    ),
    "sink-tokens": (
        AttentionSpec(window=2, num_sink_tokens=2),
        {},
        """
        #.......
        ##......
        ###.....
        ####....
        ##.##...
        ##..##..
        ##...##.
        ##....##
        """,
    ),
    "chunked": (
        AttentionSpec(window=3, chunked=True),
        {},
        """
        #.......
        ##......
        ###.....
        ...#....
        ...##...
        ...###..
        ......#.
        ......##
        """,
    ),
    "chunked-bidirectional-sink-tokens": (
        AttentionSpec(window=3, num_sink_tokens=1, causal=False, chunked=True),
        {},
        """
        ###.....
        ###.....
        ###.....
        #..###..
        #..###..
        #..###..
        #.....##
        #.....##
        """,
    ),
    "chunked-packed-counts-from-the-first-token-of-the-segment": (
        AttentionSpec(window=2, chunked=True),
        {"q_segment_ids": [[0, 1, 1, 1, 2, 2, 2, 2]], "full_from": [[9, 3]]},
        """
        ........
        .#......
        .##.....
        ...#....
        ....#...
        ....##..
        ......#.
        ....####
        """,
    ),
    "full-from": (
        AttentionSpec(window=2),
        {"full_from": [5]},
        """
        #.......
        ##......
        .##.....
        ..##....
        ...##...
        ######..
        #######.
        ########
        """,
    ),
    "packed": (
        AttentionSpec(),
        {"q_segment_ids": [PACKED]},
        """
        #.......
        ##......
        ###.....
        ...#....
        ...##...
        ...###..
        ...####.
        ........
        """,
    ),
    "packed-window-sinks-full-from": (
        AttentionSpec(window=1, num_sink_tokens=1),
        {"q_segment_ids": [PACKED], "full_from": [[2, 3]]},
        """
        #.......
        ##......
        ###.....
        ...#....
        ...##...
        ...#.#..
        ...####.
        ........
        """,
    ),
    "left-padded-sinks-count-from-the-first-real-token": (
        AttentionSpec(window=2, num_sink_tokens=1),
        {"q_segment_ids": [[0, 0, 1, 1, 1, 1, 1, 1]], "full_from": [5]},
        """
        ........
        ........
        ..#.....
        ..##....
        ..###...
        ..#.##..
        ..#..##.
        ..######
        """,
    ),
    "positions-with-padding-and-an-offset": (
        AttentionSpec(window=3, num_sink_tokens=1),
        {"q_positions": [[-1, 0, 1, 2, 3, 4, 5, 6]], "kv_positions": [[4, 5, 6, -1, 0, 1, 2, 3]]},
        """
        ........
        ....#...
        ....##..
        ....###.
        ....####
        #...#.##
        ##..#..#
        ###.#...
        """,
    ),
}


@pytest.mark.parametrize(("spec", "options", "expected"), MASKS.values(), ids=MASKS)
def test_mask(spec, options, expected):
    mask = spec.mask(8, **{name: jnp.asarray(value) for name, value in options.items()})
    np.testing.assert_array_equal(mask[0], picture(expected))


def test_a_full_head_sees_everything_causal():
    spec = AttentionSpec(window=2, num_sink_tokens=1, chunked=True)
    np.testing.assert_array_equal(spec.full.mask(8)[0], picture(CAUSAL))
    assert spec.full == AttentionSpec()


def test_the_scale_is_that_of_the_size_of_a_head_unless_it_is_given():
    assert AttentionSpec().scale_for(64) == 1 / 8
    assert AttentionSpec(scale=0.3).scale_for(64) == 0.3


def test_queries_of_a_chunk():
    mask = AttentionSpec(window=3).mask(2, 8, q_positions=jnp.array([[5, 6]]))
    np.testing.assert_array_equal(mask[0], picture("...###.. ....###."))


def test_rows_of_a_batch_differ():
    mask = AttentionSpec(window=1).mask(3, full_from=jnp.array([2, 9]))
    np.testing.assert_array_equal(mask[0], picture("#.. .#. ###"))
    np.testing.assert_array_equal(mask[1], picture("#.. .#. ..#"))


def test_padding_is_told_by_its_segment_or_its_position():
    """Either is enough for `visible` itself, whatever the window lets through."""
    for spec in (AttentionSpec(), AttentionSpec(causal=False), AttentionSpec(window=2, num_sink_tokens=9)):
        assert visible(spec, 3, 2, 1, 1)
        assert not visible(spec, 3, 2, 0, 0)
        assert not visible(spec, 3, -1)
        assert not visible(spec, -1, -1, full_rows=True)
        assert not visible(spec, -1, 2, full_rows=True)


def test_segment_positions_restart_with_each_run():
    ids = jnp.array([[0, 0, 5, 5, 5, 2, 2, 5], [1, 1, 1, 1, 0, 0, 0, 0]])
    expected = [[0, 1, 0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 0, 1, 2, 3]]
    np.testing.assert_array_equal(segment_positions(ids), expected)


def test_spec_is_hashable_and_equal_by_value():
    assert AttentionSpec(window=np.int64(4)) == AttentionSpec(window=4)
    assert len({AttentionSpec(window=4), AttentionSpec(window=4), AttentionSpec()}) == 2


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"window": 0}, "window is 0; it must be an integer from 1 to 2147483647 or None"),
        ({"window": 2.5}, "window is 2.5; it must be an integer"),
        ({"window": True}, "window is True; it must be an integer"),
        ({"window": 2**31}, "window is 2147483648; it must be an integer from 1 to 2147483647 or None"),
        ({"num_sink_tokens": -1}, "num_sink_tokens is -1; it must be an integer from 0 to"),
        ({"num_sink_tokens": None}, "num_sink_tokens is None"),
        ({"activation": "relu"}, "activation is 'relu'; it must be 'softmax' or 'sigmoid'"),
        ({"logit_softcap": 0}, "logit_softcap is 0; it must be a positive finite number or None"),
        ({"scale": float("nan")}, "scale is nan"),
        ({"scale": "auto"}, "scale is 'auto'; it must be a positive finite number or None"),
        ({"causal": 1}, "causal is 1; it must be True or False"),
        ({"chunked": 1, "window": 4}, "chunked is 1; it must be True or False"),
        ({"chunked": True}, "chunked is True, but window is None; it must be the length of a chunk"),
    ],
)
def test_spec_refuses(fields, sentence):
    with pytest.raises(ValueError, match=sentence):
        AttentionSpec(**fields)


@pytest.mark.parametrize("given", ["q_positions", "kv_positions"])
def test_positions_of_one_side_alone_are_no_indices(given):
    positions = jnp.arange(10, 14)[None]
    where = coordinates(4, 4, **{given: positions})
    assert where.q_order is where.q_pos
    assert where.kv_order is where.kv_pos
    side = where.q_order if given == "q_positions" else where.kv_order
    np.testing.assert_array_equal(side, positions)
