"""Full rows in few blocks of queries: which blocks are visited, and that all others stay as they are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import AttentionSpec, attention
from pallas_kernels.blocks import Tiles
from pallas_kernels.math.spec import coordinates
from pallas_kernels.tpu.calls import launches, passes
from pallas_kernels.tpu.schedule import pair_schedule
from pallas_kernels.tpu.schedule.row_list import list_rows

from .suite import quick_jit, seen_pairs, with_gradients
from .tolerances import assert_both_close

LENGTH, BLOCK = 256, 64
FORWARD, BACKWARD, KEYS = 16, 32, 32  # blocks beyond the window


@pytest.fixture(autouse=True)
def schedules(monkeypatch):
    """The lists of blocks that were made; blocks are small, so that there are many."""
    made = []

    def noted(call, where):
        made.append(list_rows(call, where))
        return made[-1]

    tiles = Tiles(BLOCK, BLOCK, strip=32, tile=32)
    monkeypatch.setattr(launches, "choose_tiles", lambda *_, **__: tiles)
    monkeypatch.setattr(launches, "_LISTED_FORWARD", FORWARD)
    monkeypatch.setattr(launches, "_LISTED_BACKWARD", BACKWARD)
    monkeypatch.setattr(launches, "_OUTSIDE_BLOCK", KEYS)
    monkeypatch.setattr(pair_schedule, "list_rows", noted)
    return made


def rows_of_documents(seed: int, batch: int = 2) -> tuple[np.ndarray, np.ndarray]:
    """Segment ids [B, T] of documents of random lengths, and from which position on each is full [B, segments]."""
    rng = np.random.default_rng(seed)
    ids = np.zeros((batch, LENGTH), np.int32)
    for row in ids:
        ends = np.sort(rng.integers(1, LENGTH, rng.integers(0, 5)))
        row[:] = 1 + np.searchsorted(ends, np.arange(LENGTH), side="right")
        row[: rng.integers(0, 20)] = 0  # padding
    full_from = rng.integers(0, LENGTH, (batch, ids.max())) * rng.integers(0, 2, (batch, ids.max()))
    full_from[full_from == 0] = LENGTH  # half of the documents have no full row
    return ids, full_from.astype(np.int32)


def arrays(seed: int, heads: int, kv_heads: int, batch: int = 2) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=(batch, LENGTH, n, 16)).astype(np.float32) for n in (heads, kv_heads, kv_heads)]


@pytest.mark.parametrize("in_vmem", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("seed", "options"),
    [
        (1, {"num_sink_tokens": 3}),
        pytest.param(2, {"activation": "sigmoid"}, marks=pytest.mark.slow),
        *(pytest.param(seed, {}, marks=pytest.mark.slow) for seed in (0, 3, 5)),
    ],
)
def test_values_and_gradients(seed, options, in_vmem, schedules, monkeypatch):
    if not in_vmem:
        keys_at_once = launches.keys_at_once
        monkeypatch.setattr(launches, "fits_vmem", lambda *_: False)
        monkeypatch.setattr(launches, "keys_at_once", lambda *a: (keys_at_once(*a)[0], False))
    ids, full_from = rows_of_documents(seed)
    learned, packing = arrays(seed, 4, 2), {"q_segment_ids": ids, "full_from": full_from}
    spec = AttentionSpec(int(np.random.default_rng(seed).integers(2, 60)), **options)

    def run(name):
        return with_gradients(lambda learned: attention(*learned, spec, implementation=name, **packing))(learned)

    assert_both_close(run("tpu"), run("reference"), "float32")
    assert len(schedules) == (2 if in_vmem else 0)


@pytest.mark.parametrize("seed", [0, 5, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3, 7, 14))])
def test_the_list_has_every_visible_pair_once_and_no_mask_hides_one_of_a_full_row(seed):
    ids, full_from = rows_of_documents(seed, batch=1 + seed % 2)
    spec = AttentionSpec(1 + 7 * seed, num_sink_tokens=seed % 3)
    where = coordinates(LENGTH, LENGTH, q_segment_ids=ids, full_from=full_from)
    call = launches.make_call(spec, where, 16, "float32", has_slopes=False, has_bias=False, kind="TPU v6 lite")
    call, listed = launches.outside_forward(
        launches.choose_kernel(call, where), LENGTH, launches.Given(16, "float32", "TPU v6 lite")
    )
    assert listed
    rows = quick_jit(list_rows, static_argnums=0)(call, passes.of_full_rows(where))
    past = seen_pairs(spec, where) & ~seen_pairs(spec, where._replace(full_rows=None))
    past = past.reshape(len(ids), LENGTH // FORWARD, FORWARD, LENGTH // KEYS, KEYS)
    assert where.full_rows is not None
    full = np.broadcast_to(where.full_rows, ids.shape).reshape(past.shape[:3])
    order = np.asarray(rows.order).reshape(len(ids), -1)
    bounds = np.asarray(rows.bounds).reshape(len(ids), -1, 4)
    assert int(rows.most[0]) == max(1, *np.asarray(rows.counts))
    for b, count in enumerate(np.asarray(rows.counts)):
        assert sorted(order[b]) == list(range(LENGTH // FORWARD))
        for place, row in enumerate(order[b]):
            seen = past[b, row].any(axis=(0, 2))  # by block of keys
            first, stop, whole, whole_stop = bounds[b, row]
            assert not (np.delete(seen, range(first, stop))).any()
            assert past[b, row][full[b, row], whole:whole_stop].all()
            assert full[b, row].any() or whole == whole_stop or place >= count
            assert place < count or not seen.any()


def test_rows_beside_full_ones(schedules):
    """They stay bit for bit as the window wrote them, and know nothing of what the full rows of their block see.

    Row 2 of the batch has no full row.
    """
    ids, full = np.ones((3, LENGTH), np.int32), [40, 10, 0]
    full_from = np.array([[LENGTH - n] for n in full], np.int32)
    q, k, v = arrays(5, 2, 1, batch=3)
    assert (LENGTH - 40) % FORWARD  # there are blocks with rows of both kinds

    def program(**options):
        @quick_jit
        def both(q, k, v):
            def attend(q):
                return attention(q, k, v, AttentionSpec(24), q_segment_ids=ids, implementation="tpu", **options)

            out, pullback = jax.vjp(attend, q)
            return out, *pullback(jnp.ones_like(out))

        return lambda *qkv: [np.asarray(x) for x in both(*qkv)]

    with_full, window = program(full_from=full_from), program()
    plain = window(q, k, v)
    for found, expected in zip(with_full(q, k, v), plain, strict=True):
        for row, count in enumerate(full):
            np.testing.assert_array_equal(found[row, : LENGTH - count], expected[row, : LENGTH - count])
            assert (found[row, LENGTH - count :] != expected[row, LENGTH - count :]).any(axis=(1, 2)).all()
    assert len(schedules) == 2  # of the forward and of the backward pass
    for name, value in (("k", np.nan), ("v", np.nan), ("v", np.inf)):
        changed = {"k": k.copy(), "v": v.copy()}
        changed[name][:, 70, 0, 3] = value
        for found, expected in zip(with_full(q, *changed.values()), plain, strict=True):
            for row, count in enumerate(full):
                unseen = found[row, 70 + 24 : LENGTH - count]
                np.testing.assert_array_equal(unseen, expected[row, 70 + 24 : LENGTH - count])
                assert not np.isfinite(found[row, LENGTH - count :]).all(axis=(1, 2)).any()
