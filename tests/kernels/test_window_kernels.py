"""The TPU window kernels where the tests of every variant do not reach: bodies chosen at run time, bf16 sigmoid sums,
sink tokens over many blocks."""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import AttentionSpec, attention
from pallas_kernels.blocks import Tiles
from pallas_kernels.spec import coordinates, dense_mask
from pallas_kernels.tpu.tiles import Call as KernelCall
from pallas_kernels.tpu.window import is_crossed, packed_segments

from .suite import Call, Implementation, assert_matches_reference

TPU = Implementation("tpu", block=16)


@pytest.fixture(autouse=True)
def _blocks_of_16(monkeypatch):
    TPU.install(monkeypatch)


ROWS = np.array([[1] * 40 + [2] * 24 + [3] * 16, [1] * 64 + [2] * 12 + [0] * 4])


@pytest.mark.parametrize("window", [5, 11, 17, 32])
def test_a_step_is_crossed_where_its_window_is_cut_or_a_query_is_padding(window):
    where = coordinates(80, 80, q_segment_ids=ROWS)
    segments = packed_segments(KernelCall(AttentionSpec(window), Tiles(16, 16)), where)
    cut = np.asarray(
        dense_mask(AttentionSpec(window), where) != dense_mask(AttentionSpec(window), coordinates(80, 80))
    )
    expected = cut.any(axis=2).reshape(2, 5, 16).any(axis=2)
    crossed = [[bool(is_crossed(segments.crossed, b, i, 5)) for i in range(5)] for b in range(2)]
    np.testing.assert_array_equal(crossed, expected)
    assert 0 < expected.sum() < expected.size


@pytest.mark.slow
# Of the 16 combinations, the 8 in which any three of the four choices are met with every value.
@pytest.mark.parametrize(
    ("sigmoid", "bfloat16", "alibi", "packed"),
    [choice for choice in itertools.product([False, True], repeat=4) if sum(choice) % 2 == 0],
)
def test_many_blocks(sigmoid, bfloat16, alibi, packed):
    rows = tuple(map(tuple, ROWS.tolist())) if packed else None
    spec = AttentionSpec(21, activation="sigmoid" if sigmoid else "softmax")
    dtype, options = "bfloat16" if bfloat16 else "float32", ("alibi_slopes",) if alibi else ()
    assert_matches_reference(
        Call(spec, options, rows, q_length=80, kv_length=80, heads=2, kv_heads=1, dtype=dtype), TPU
    )


def test_keys_that_a_sigmoid_row_does_not_see_do_not_change_a_bit_of_it():
    learned, _ = Call(AttentionSpec(21, activation="sigmoid"), dtype="bfloat16").draw()
    spec = AttentionSpec(21, activation="sigmoid")

    def row(changed):
        arrays = {name: x.at[:, changed].multiply(100) if name != "q" else x for name, x in learned.items()}
        return np.asarray(attention(spec=spec, **arrays, implementation="tpu")[:, 30].astype(jnp.float32))

    np.testing.assert_array_equal(row(np.arange(0)), row(np.r_[0:10, 31:50]))
    assert not np.array_equal(row(np.arange(0)), row(np.arange(10, 11)))


@pytest.mark.slow
@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize(
    ("window", "num_sink_tokens", "options", "activation"),
    [
        (5, 3, (), "softmax"),
        (21, 9, ("full_heads", "alibi_slopes"), "softmax"),
        (21, 16, ("alibi_slopes", "sigmoid_bias"), "sigmoid"),
    ],
)
def test_sink_tokens_gather_gradients_from_every_block(
    kv_heads, window, num_sink_tokens, options, activation
):
    call = Call(
        AttentionSpec(window, num_sink_tokens, activation), options, heads=2, kv_heads=kv_heads, q_length=90
    )
    assert_matches_reference(dataclasses.replace(call, kv_length=90), TPU)
