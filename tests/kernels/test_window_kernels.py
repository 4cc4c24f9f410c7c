"""The TPU window kernels where the tests of every variant do not reach: bodies chosen at run time, bf16 sigmoid sums,
sink tokens over many blocks."""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import AttentionSpec, attention
from pallas_kernels.blocks import Tiles
from pallas_kernels.math.spec import coordinates
from pallas_kernels.tpu.calls import launches
from pallas_kernels.tpu.tile.tiles import Call as KernelCall
from pallas_kernels.tpu.window import sink_gradients
from pallas_kernels.tpu.window.geometry import Cut, oldest_rows, packed_segments
from pallas_kernels.tpu.window.packed_sinks import gather_sinks

from .suite import Call, Implementation, assert_matches_reference, quick_jit, seen_pairs

TPU = Implementation("tpu", block=16)


@pytest.fixture(autouse=True)
def _blocks_of_16(monkeypatch):
    TPU.install(monkeypatch)


segments_of = quick_jit(packed_segments, static_argnums=0)
gathered = quick_jit(gather_sinks, static_argnums=0)
ROWS = np.array([[1] * 40 + [2] * 24 + [3] * 16, [1] * 64 + [2] * 12 + [0] * 4])


@pytest.mark.parametrize("num_sink_tokens", [0, 3])
@pytest.mark.parametrize("window", [5, 17, 32])
def test_a_step_is_cut_where_some_query_does_not_see_what_one_document_would_show_it(window, num_sink_tokens):
    spec, where = AttentionSpec(window, num_sink_tokens), coordinates(80, 80, q_segment_ids=ROWS)
    cuts = np.asarray(segments_of(KernelCall(spec, Tiles(16, 16)), where).cuts).reshape(2, 5)
    in_window = AttentionSpec(window)
    packed, one = (seen_pairs(in_window, c) for c in (where, coordinates(80, 80)))
    expected = (packed != one).any(axis=2).reshape(2, 5, 16).any(axis=2)
    # So many of its sink tokens lie outside a query's window.
    beside, beside_one = (
        (seen_pairs(spec, c) & ~seen_pairs(in_window, c)).sum(axis=2) for c in (where, coordinates(80, 80))
    )
    expected |= (beside != beside_one).reshape(2, 5, 16).any(axis=2)
    np.testing.assert_array_equal(cuts != Cut.NO, expected)
    np.testing.assert_array_equal(cuts == Cut.WITH_SINKS, expected & (beside > 0).reshape(2, 5, 16).any(axis=2))
    assert 0 < expected.sum() < expected.size


def shortest_documents(window: int) -> np.ndarray:
    """Rows of the shortest documents that have sink tokens outside a window, at several places in the blocks."""
    return (np.arange(80) + np.arange(min(window, 7) + 1)[:, None]) // (window + 1) + 1


@pytest.mark.parametrize(("window", "num_sink_tokens"), [(2, 1), (9, 8), (40, 9)])
def test_the_rows_of_sink_tokens_are_those_outside_the_window(window, num_sink_tokens):
    """Rows, limits and gathered keys together name the keys that the dense mask shows beside the window."""
    ids = np.concatenate([ROWS, shortest_documents(window)])
    spec, where = AttentionSpec(window, num_sink_tokens), coordinates(80, 80, q_segment_ids=ids)
    call = KernelCall(spec, Tiles(16, 16))
    segments = segments_of(call, where)
    keys = np.broadcast_to(np.arange(80, dtype=np.float32)[:, None], (len(ids), 1, 80, 8))
    rows = np.asarray(gathered(call, keys, segments))[:, 0, :, 0]  # which keys they are
    rows = rows.reshape(len(ids), 5, -1)
    beside = seen_pairs(spec, where) & ~seen_pairs(AttentionSpec(window), where)
    limits = np.asarray(segments.queries)
    for b, q in itertools.product(range(len(ids)), range(80)):
        start, stop, distance = limits[b, 1:4, q]
        seen = rows[b, q // 16, start:stop].astype(int)
        np.testing.assert_array_equal(seen, np.flatnonzero(beside[b, q]))
        np.testing.assert_array_equal(distance - np.arange(start, stop), q - seen)  # for ALiBi
    assert beside.any()


@pytest.mark.parametrize(
    ("window", "num_sink_tokens", "options", "activation", "kv_heads"),
    [
        (7, 3, ("alibi_slopes",), "softmax", 1),  # several documents' sink tokens in a step
        (21, 16, (), "softmax", 2),  # each query head has keys of its own
        pytest.param(17, 3, ("alibi_slopes", "full_from"), "softmax", 1, marks=pytest.mark.slow),
        pytest.param(21, 3, ("alibi_slopes", "sigmoid_bias"), "sigmoid", 2, marks=pytest.mark.long),
        pytest.param(40, 9, ("full_heads", "sink_logits"), "softmax", 2, marks=pytest.mark.slow),
    ],
)
def test_sink_tokens_of_packed_rows(window, num_sink_tokens, options, activation, kv_heads):
    rows = tuple(map(tuple, np.concatenate([ROWS, [[1] * 80]]).tolist()))
    spec = AttentionSpec(window, num_sink_tokens, activation)
    assert_matches_reference(Call(spec, options, rows, 3, 80, 80, 2, kv_heads), TPU)


@pytest.mark.slow
def test_gradients_of_sink_tokens_of_one_head_after_the_other(monkeypatch):
    """As where the sink tokens of all KV heads would take too much memory."""
    monkeypatch.setattr(sink_gradients, "heads_at_once", lambda *_: 1)
    rows = tuple(map(tuple, ROWS.tolist()))
    assert_matches_reference(Call(AttentionSpec(7, 3), (), rows, 2, 80, 80, 4, 2), TPU)


def test_a_step_whose_sink_tokens_take_fewer_tiles_than_those_of_the_step_before(monkeypatch):
    """Two documents' take two tiles of 128, one document's take one."""
    of_256 = Implementation("tpu", block=256).install(monkeypatch)
    rows = (tuple([1] * 266 + [2] * 502),)
    assert_matches_reference(Call(AttentionSpec(130, 100), (), rows, 1, 768, 768, 2, 2), of_256)


def test_the_slots_of_a_document_follow_one_another():
    """So its gradients are added up in f32 before they are rounded once."""
    spec = AttentionSpec(5, 2)  # up to three documents a step
    segments = segments_of(KernelCall(spec, Tiles(16, 16)), coordinates(80, 80, q_segment_ids=ROWS))
    starts = np.asarray(segments.sinks).reshape(2, -1)
    assert (np.diff(starts, axis=1) >= 0).all()
    assert [sorted(set(row)) for row in starts.tolist()] == [[0, 40, 64], [0, 64]]


# Seeds 11 and 23 draw two documents in a step, 27 three, 0 one.
@pytest.mark.parametrize(
    "seed",
    [pytest.param(seed, marks=pytest.mark.slow if seed in (0, 11) else pytest.mark.long) for seed in (0, 11, 23, 27)],
)
def test_sink_tokens_of_documents_at_random_places(seed):
    """Kernels copy whole tiles that hold them, of one document a step or of two; a shorter window has them gathered."""
    rng = np.random.default_rng(seed)
    window, num_sink_tokens = int(rng.integers(6, 40)), int(rng.integers(1, 17))
    starts = np.sort(rng.integers(0, 96, (2, 4)), axis=1)
    rows = (np.arange(96) >= starts[:, :, None]).sum(axis=1) + 1
    spec = AttentionSpec(window, num_sink_tokens)
    call = Call(spec, (), tuple(map(tuple, rows.tolist())), 2, 96, 96, int(rng.choice([2, 4, 8])), 2)
    assert_matches_reference(call, TPU)


@pytest.mark.slow
# Of the 16 combinations, the 8 in which any three of the four choices are met with every value; packed rows first.
@pytest.mark.parametrize(
    ("sigmoid", "bfloat16", "alibi", "packed"),
    [
        pytest.param(*choice, marks=() if choice[3] else pytest.mark.long)
        for choice in itertools.product([False, True], repeat=4)
        if sum(choice) % 2 == 0
    ],
)
def test_many_blocks(sigmoid, bfloat16, alibi, packed):
    rows = tuple(map(tuple, ROWS.tolist())) if packed else None
    spec = AttentionSpec(21, activation="sigmoid" if sigmoid else "softmax")
    dtype, options = "bfloat16" if bfloat16 else "float32", ("alibi_slopes",) if alibi else ()
    assert_matches_reference(
        Call(spec, options, rows, q_length=80, kv_length=80, heads=2, kv_heads=1, dtype=dtype), TPU
    )


def test_keys_that_a_sigmoid_row_does_not_see_do_not_change_a_bit_of_it():
    call = Call(AttentionSpec(21, activation="sigmoid"), dtype="bfloat16")
    q, k, v = call.draw()[0].values()

    @quick_jit
    def row(factor):
        return attention(q, k * factor, v * factor, call.spec, implementation="tpu")[:, 30]

    def changed(tokens):
        factor = np.ones((50, 1, 1), jnp.bfloat16)
        factor[tokens] = 100
        return np.asarray(row(factor))

    np.testing.assert_array_equal(changed([]), changed(np.r_[0:10, 31:50]))
    assert not np.array_equal(changed([]), changed(10))


@pytest.mark.slow
@pytest.mark.parametrize("kv_heads", [pytest.param(1, marks=pytest.mark.long), 2])
@pytest.mark.parametrize(
    ("window", "num_sink_tokens", "options", "activation"),
    [
        (5, 3, (), "softmax"),
        (21, 9, ("full_heads", "alibi_slopes"), "softmax"),
        (21, 16, ("alibi_slopes", "sigmoid_bias"), "sigmoid"),
    ],
)
def test_sink_tokens_gather_gradients_from_every_block(kv_heads, window, num_sink_tokens, options, activation):
    call = Call(AttentionSpec(window, num_sink_tokens, activation), options, heads=2, kv_heads=kv_heads, q_length=90)
    assert_matches_reference(dataclasses.replace(call, kv_length=90), TPU)


def test_strips_longer_than_a_tile(monkeypatch):
    """So that the diagonal does not begin in a tile's corner."""
    monkeypatch.setattr(launches, "choose_tiles", lambda *_, **__: Tiles(32, 32, strip=16, tile=8))
    assert_matches_reference(Call(AttentionSpec(11), (), None, 1, 90, 90, 2, 1), Implementation("tpu"))


@pytest.mark.parametrize(
    ("window", "num_sink_tokens", "options", "packed", "group"),
    [
        (1, 0, (), False, 1),
        (100, 0, ("alibi_slopes",), False, 2),
        (129, 0, (), True, 2),
        (130, 5, (), False, 1),  # one key more than the rows before a block that 129 needs
        pytest.param(77, 3, ("full_heads",), True, 2, marks=pytest.mark.slow),
        pytest.param(129, 0, ("sigmoid_bias",), False, 2, marks=pytest.mark.slow),
    ],
)
def test_a_short_window_reads_the_last_rows_of_the_block_before(
    monkeypatch, window, num_sink_tokens, options, packed, group
):
    """Blocks of 256 queries, of whose predecessor 128 keys are fetched where the window needs no more."""
    of_256 = Implementation("tpu", block=256).install(monkeypatch)
    rows = (tuple([1] * 300 + [2] * 130 + [3] * 111 + [0] * 9),) if packed else None
    activation = "sigmoid" if "sigmoid_bias" in options else "softmax"
    assert_matches_reference(
        Call(AttentionSpec(window, num_sink_tokens, activation), options, rows, 1, 550, 550, 2, 2 // group), of_256
    )


@pytest.mark.parametrize(("window", "rows"), [(1, 256), (2, 128), (129, 128), (130, 256), (256, 256), (257, 256)])
def test_rows_of_the_oldest_block(window, rows):
    assert oldest_rows(KernelCall(AttentionSpec(window), Tiles(256, 256))) == rows
