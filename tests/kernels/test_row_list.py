"""Full rows in few blocks of queries: which blocks are visited, and that all others stay as they are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import AttentionSpec, attention
from pallas_kernels.blocks import Tiles
from pallas_kernels.math.spec import coordinates, dense_mask
from pallas_kernels.tpu.calls import launches, passes
from pallas_kernels.tpu.schedule import pair_schedule
from pallas_kernels.tpu.schedule.row_list import list_rows

from .suite import quick_jit, with_gradients
from .tolerances import assert_close

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


def arrays(seed: int, heads: int, kv_heads: int):
    rng = np.random.default_rng(seed)
    shapes = [(2, LENGTH, n, 16) for n in (heads, kv_heads, kv_heads)]
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


@pytest.mark.parametrize("in_vmem", [True, False])
@pytest.mark.parametrize(
    ("seed", "options"),
    [
        (1, {"num_sink_tokens": 3}),
        pytest.param(2, {"activation": "sigmoid"}, marks=pytest.mark.slow),
        *(pytest.param(seed, {}, marks=pytest.mark.slow) for seed in (0, *range(3, 9))),
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

    @with_gradients
    def tpu(learned):
        return attention(*learned, spec, implementation="tpu", **packing)

    @with_gradients
    def reference(learned):
        return attention(*learned, spec, implementation="reference", **packing)

    out, gradients = tpu(learned)
    expected, expected_gradients = reference(learned)
    assert len(schedules) == (2 if in_vmem else 0)
    assert_close(out, expected, "float32")
    for one, other in zip(gradients, expected_gradients, strict=True):
        assert_close(one, other, "float32", gradient=True)


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(6, 20))])
def test_the_list_has_every_visible_pair_once_and_no_mask_hides_one_of_a_full_row(seed):
    ids, full_from = rows_of_documents(seed, batch=1 + seed % 2)
    spec = AttentionSpec(1 + 7 * seed, num_sink_tokens=seed % 3)
    where = coordinates(LENGTH, LENGTH, q_segment_ids=ids, full_from=full_from)
    call = launches.make_call(spec, where, 16, "float32", has_slopes=False, has_bias=False, kind="TPU v6 lite")
    call, listed = launches.outside_forward(
        launches.choose_kernel(call, where), LENGTH, launches.Given(16, "float32", "TPU v6 lite")
    )
    assert listed
    rows = list_rows(call, passes.of_full_rows(where))
    past = dense_mask(spec, where) & ~dense_mask(spec, where._replace(full_rows=None))
    past = np.asarray(past).reshape(len(ids), LENGTH // FORWARD, FORWARD, LENGTH // KEYS, KEYS)
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


def test_other_rows_stay_as_the_window_wrote_them(schedules):
    """Bit for bit, in a row of the batch without any full row too."""
    ids = np.ones((2, LENGTH), np.int32)
    full_from = np.array([[LENGTH - 40], [LENGTH]], np.int32)
    q, k, v = arrays(5, 2, 1)
    options = {"spec": AttentionSpec(24), "q_segment_ids": ids, "implementation": "tpu"}

    def run(**more):
        @quick_jit
        def both(q):
            out, pullback = jax.vjp(lambda q: attention(q, k, v, **options, **more), q)
            return out, *pullback(jnp.ones_like(out))

        return both(q)

    (out, dq), (window, window_dq) = run(full_from=full_from), run()
    assert len(schedules) == 2  # of the forward and of the backward pass
    assert (LENGTH - 40) % FORWARD  # there are blocks with rows of both kinds
    for changed, plain in ((out, window), (dq, window_dq)):
        np.testing.assert_array_equal(changed[0, :-40], plain[0, :-40])
        np.testing.assert_array_equal(changed[1], plain[1])
        assert (changed[0, -40:] != plain[0, -40:]).any(axis=(1, 2)).all()


def test_a_value_that_is_not_finite_reaches_the_full_rows_alone():
    ids = np.ones((2, LENGTH), np.int32)
    full_from = np.array([[LENGTH - 40], [LENGTH - 10]], np.int32)
    q, k, v = arrays(6, 2, 1)
    v = v.at[:, 70, 0, 3].set(np.inf)
    options = {"q_segment_ids": ids, "full_from": full_from}
    out = attention(q, k, v, AttentionSpec(24), **options, implementation="tpu")
    expected = attention(q, k, v, AttentionSpec(24), **options, implementation="reference")
    clean, expected_clean = (np.isfinite(x).all(axis=3) for x in (out, expected))
    np.testing.assert_array_equal(clean, expected_clean)
    assert not clean[0, -40:].any()
    assert clean[0, 70 + 24 : -40].all()


@pytest.mark.parametrize("name", ["k", "v"])
def test_gradients_of_rows_beside_full_ones_know_nothing_of_what_these_see(name):
    """Rows that are not full are taken along where the full ones of their block see all keys."""
    ids, full_from = np.ones((2, LENGTH), np.int32), np.array([[LENGTH - 40], [LENGTH - 10]], np.int32)
    q, k, v = arrays(6, 2, 1)
    nonfinite = {"k": k, "v": v} | {name: {"k": k, "v": v}[name].at[:, 70, 0, 3].set(np.nan)}
    options = {"spec": AttentionSpec(24), "q_segment_ids": ids, "implementation": "tpu"}

    def dq(**more):
        @quick_jit
        def gradient(q):
            out, pullback = jax.vjp(lambda q: attention(q, nonfinite["k"], nonfinite["v"], **options, **more), q)
            return pullback(jnp.ones_like(out))[0]

        return np.asarray(gradient(q))

    changed, window = dq(full_from=full_from), dq()
    for row, full in enumerate((40, 10)):
        np.testing.assert_array_equal(changed[row, 70 + 24 : -full], window[row, 70 + 24 : -full])
        assert np.isfinite(changed[row, 70 + 24 : -full]).all()
        assert not np.isfinite(changed[row, -full:]).any()
