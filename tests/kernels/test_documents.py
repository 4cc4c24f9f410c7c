"""Packed rows in the scheduled TPU kernels: which pairs of blocks are crossed, and attention over those."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import AttentionSpec
from pallas_kernels.math.spec import coordinates
from pallas_kernels.tpu.calls import launches
from pallas_kernels.tpu.schedule import documents, scheduled_backward, scheduled_forward
from pallas_kernels.tpu.schedule.documents import documents_of, read_bounds

from .suite import (
    PACKED,
    Call,
    Implementation,
    assert_matches_reference,
    assert_matches_routed,
    gates,
    packed_rows,
    quick_jit,
    seen_pairs,
)

FAST = settings(max_examples=60, deadline=None, derandomize=True, database=None)
ROWS = tuple(map(tuple, PACKED))
ONE_DOCUMENT = ((1,) * 50, (1,) * 41 + (0,) * 9)


@FAST
@given(ids=packed_rows(64, rows=2), block=st.sampled_from([8, 16]))
def test_bounds_are_those_of_every_pair_of_tokens(ids, block):
    where = coordinates(64, 64, q_segment_ids=ids)
    small = documents.small_block(block)
    found = quick_jit(documents_of, static_argnums=1)(where, block)
    table, rows = np.asarray(found.table), 64 // block
    seen = seen_pairs(AttentionSpec(), where)
    causal = np.tril(np.ones((64, 64), bool))
    assert found.per_row == block // small
    for batch in range(2):
        for size, places in (
            (block, [(row, None) for row in range(rows)]),
            (small, [(row, i) for row in range(rows) for i in range(block // small)]),
        ):
            for row, i in places:
                first, clean = map(int, read_bounds(table, batch, row, rows, found.per_row, i))
                start = row * block + (0 if i is None else i * small)
                queries = slice(start, start + size)
                by_column = seen[batch, queries].reshape(size, -1, size)
                columns = range(64 // size)
                visible = [c for c in columns if by_column[:, c].any()]
                assert first >= 64 // size if not visible else first == visible[0]
                alike = (by_column == causal[queries].reshape(size, -1, size)).all(axis=(0, 2))
                # From there on all columns are seen as in one document, and the one before is not.
                assert alike[clean:].all()
                if clean <= start // size and clean > 0:
                    assert not alike[clean - 1]


# ---- attention ----

FULL = AttentionSpec()
CALLS = {
    "full": Call(FULL, segments=ROWS),
    "one-document": Call(FULL, ("alibi_slopes",), segments=ONE_DOCUMENT),
    "sigmoid": Call(
        AttentionSpec(activation="sigmoid"), ("alibi_slopes", "sigmoid_bias"), segments=ROWS, heads=2, kv_heads=1
    ),
    "softcap": Call(AttentionSpec(logit_softcap=2.0), ("sink_logits",), segments=ROWS, heads=2, kv_heads=2),
}


@pytest.fixture
def tpu(monkeypatch) -> Implementation:
    """Blocks of 16, which are cut into small ones of 4 where an edge crosses."""
    return Implementation("tpu", block=16).install(monkeypatch)


@pytest.fixture(params=["keys-in-vmem", pytest.param("beyond-vmem", marks=pytest.mark.long)])
def residence(request, monkeypatch):
    if request.param == "beyond-vmem":
        monkeypatch.setattr(scheduled_forward, "fits_vmem", lambda *_: False)
        monkeypatch.setattr(scheduled_backward, "keys_at_once", lambda call, length, *_: (length, False))


@pytest.mark.usefixtures("residence")
@pytest.mark.parametrize(
    "name", ["full", *(pytest.param(name, marks=pytest.mark.long) for name in CALLS if name != "full")]
)
def test_attention_over_documents(tpu, name):
    assert_matches_reference(CALLS[name], tpu)


@pytest.mark.long
@pytest.mark.parametrize("window", [23, 33])
def test_a_window_longer_than_the_window_kernels_take(tpu, monkeypatch, window):
    """Its far edge and the edges of documents cross the same blocks."""
    monkeypatch.setattr(launches, "longest_window", lambda *_: 8)
    assert_matches_reference(Call(AttentionSpec(window), segments=ROWS, heads=2, kv_heads=1), tpu)


@pytest.mark.usefixtures("residence")
@pytest.mark.parametrize(
    ("segments", "window"),
    [
        (ROWS, 11),
        *(
            pytest.param(rows, window, marks=pytest.mark.long)
            for rows, window in ((ROWS, 3), (ROWS, 21), (ONE_DOCUMENT, 11))
        ),
    ],
)
def test_both_branches_over_documents(tpu, segments, window):
    call = Call(AttentionSpec(window), ("alibi_slopes",), segments, heads=2, kv_heads=1)
    assert_matches_routed(call, tpu, gates("soft"), gates("runs"))


@pytest.mark.long
def test_both_branches_of_sigmoid_over_documents(tpu):
    call = Call(AttentionSpec(11, activation="sigmoid"), ("sigmoid_bias",), ROWS, heads=2, kv_heads=1)
    assert_matches_routed(call, tpu, gates("soft"))
