"""How a batch's rows lie where their tokens are split over devices."""

import numpy as np
import pytest
from jax.sharding import AbstractMesh
from tiny_models import make

import swa_jax.train.rows
from pallas_kernels.math.spec import segment_positions
from swa_jax.model.sequence_order import zigzag
from swa_jax.model.sharding import AXES, Partition
from swa_jax.train.rows import held_rows

BATCH = {"tokens": np.arange(32).reshape(2, 16), "segment_ids": np.array([[1] * 5 + [2] * 11, [1] * 12 + [0] * 4])}
SPLIT = Partition(AbstractMesh((1, 1, 1, 2, 1), AXES))
WINDOWS, FULL = make("ww"), make("FF", sliding_window=None)


@pytest.fixture(autouse=True)
def _nothing_to_lay_out(monkeypatch):
    monkeypatch.setattr(swa_jax.train.rows, "constrain", lambda x, *_: x)


def test_windows_beside_a_full_teacher_lie_in_zigzag_with_their_own_positions():
    rows = held_rows(BATCH, SPLIT, "auto", [WINDOWS, FULL])
    assert rows.partition.zigzag
    np.testing.assert_array_equal(rows.tokens, zigzag(BATCH["tokens"], 2))
    np.testing.assert_array_equal(rows.segment_ids, zigzag(BATCH["segment_ids"], 2))
    np.testing.assert_array_equal(rows.positions, zigzag(segment_positions(BATCH["segment_ids"]), 2))
    targets, nothing = rows.as_held((BATCH["tokens"][..., None] + 1, None))
    np.testing.assert_array_equal(targets[..., 0], rows.tokens + 1)
    assert nothing is None


@pytest.mark.parametrize(
    ("partition", "patterns", "dropping"),
    [(None, [FULL], False), (SPLIT, [WINDOWS], False), (SPLIT, [WINDOWS, FULL], True)],
)
def test_else_rows_keep_their_order(partition, patterns, dropping):
    """Dropout is drawn for the places of a row."""
    rows = held_rows(BATCH, partition, "auto", patterns, dropping=dropping)
    assert (rows.partition, rows.positions) == (partition, None)
    assert rows.tokens is BATCH["tokens"]
    assert rows.as_held(BATCH) is BATCH
