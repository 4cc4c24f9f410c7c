"""No block outside the schedule is touched, shown from outside: what was touched becomes NaN.

A tile of keys and values that are NaN makes NaN of every row of a strip of queries that multiplies by it, masked or
not (0 * NaN is NaN). So a call whose rows of the batch each have another block of keys poisoned says which blocks each
block of queries worked on. That has to be exactly what a dense mask says by brute force: the blocks with a visible
pair. Likewise for the gradients of keys and values, with poisoned cotangents.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import AttentionSpec, attention, decode_attention, routed_attention
from pallas_kernels.gpu import triton as gpu_triton
from pallas_kernels.math import reference
from pallas_kernels.tpu.calls import passes, routed
from pallas_kernels.tpu.schedule import scheduled_backward as tpu_backward
from pallas_kernels.tpu.window import window_backward_step as tpu_window_backward
from pallas_kernels.tpu.window import window_forward_step as tpu_window_forward

from .suite import IMPLEMENTATIONS, Implementation, quick_jit, set_parallel_dimensions

BLOCK, BLOCKS = 16, 5
T = BLOCK * BLOCKS
TPU = Implementation("tpu", BLOCK)
DOCUMENTS = [1] * 27 + [2] * 30 + [3] * 14 + [0] * 9

kernels = pytest.mark.parametrize(
    "implementation", [i for i in IMPLEMENTATIONS if i.name != "xla"], ids=str, indirect=True
)

CALLS = {
    "full": (AttentionSpec(), {}),
    "bidirectional": (AttentionSpec(21, causal=False), {}),
    "window-of-one": (AttentionSpec(1), {}),
    "window-of-a-block": (AttentionSpec(BLOCK + 1), {}),
    "window-of-more-than-a-block": (AttentionSpec(BLOCK + 2), {}),
    "sink-tokens": (AttentionSpec(7, num_sink_tokens=3), {}),
    "sink-tokens-of-two-blocks": (AttentionSpec(7, num_sink_tokens=20), {}),
    "sigmoid": (AttentionSpec(21, activation="sigmoid"), {}),
    "packed": (AttentionSpec(21, num_sink_tokens=2), {"q_segment_ids": DOCUMENTS}),
    "packed-full": (AttentionSpec(), {"q_segment_ids": DOCUMENTS}),
    "full-from": (AttentionSpec(7), {"full_from": 50}),
    "positions": (AttentionSpec(21), {"q_positions": np.arange(T)}),
    "full-heads": (AttentionSpec(7), {"full_heads": np.array([False, True])}),
    "full-heads-packed": (AttentionSpec(7), {"full_heads": np.array([True, False]), "q_segment_ids": DOCUMENTS}),
}
QUICK = ("window-of-a-block", "sink-tokens", "full-heads")


@pytest.fixture(autouse=True)
def nothing_is_taken_for_zero(monkeypatch):
    """Lets NaN through masks again, which `nonfinite` keeps out: it shows what is multiplied."""
    for module in (reference, tpu_window_forward, tpu_backward, tpu_window_backward, gpu_triton):
        monkeypatch.setattr(module, "finite", lambda x: x)


def drawn():
    """q, k and v whose rows are alike, as many as there are blocks."""
    rng = np.random.default_rng(0)
    one = [rng.normal(size=(1, T, heads, 8)) for heads in (4, 2, 2)]
    return [jnp.asarray(np.float32(x.repeat(BLOCKS, axis=0))) for x in one]


def repeated(options, rows=BLOCKS):
    """The options of one row of the batch, for that many."""
    return {
        name: x if name == "full_heads" else np.broadcast_to(x, (rows, *np.shape(x))) for name, x in options.items()
    }


def poisoned(x):
    """[n, n * BLOCK, ...] with block i of row i being NaN."""
    here = np.arange(x.shape[1]) // BLOCK == np.arange(len(x))[:, None]
    return jnp.where(here[..., None, None], jnp.nan, x)


def changed(x, clean):
    """Which blocks of x [n, m * BLOCK, H, D] are not bit for bit those of clean: [H, m, n]."""
    different = np.asarray(x) != np.asarray(clean)
    n, _, heads, _ = x.shape
    return different.reshape(n, -1, BLOCK, heads, x.shape[3]).any(axis=(2, 4)).transpose(2, 1, 0)


def needed(spec, options, heads):
    """Blocks with a visible pair, by brute force: [heads, query blocks, KV blocks]."""
    options = repeated(options, 1)
    full = options.pop("full_heads", np.zeros(2, bool)).repeat(heads // 2)
    specs = [spec.full if f else spec for f in full]
    masks = [np.asarray(s.mask(T, **(options if s.window is not None else _without_full_from(options)))) for s in specs]
    return np.stack([m.reshape(BLOCKS, BLOCK, BLOCKS, BLOCK).any(axis=(1, 3)) for m in masks])


def _without_full_from(options):
    return {name: x for name, x in options.items() if name != "full_from"}


@kernels
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.long]) for name in CALLS]
)
def test_attention(implementation, name):
    spec, options = CALLS[name]
    q, k, v = drawn()

    @quick_jit
    def run(k, v, dout):
        out, pullback = jax.vjp(
            lambda *qkv: attention(*qkv, spec, **repeated(options), implementation=implementation.name), *(q, k, v)
        )
        return out, *pullback(dout)

    clean = run(k, v, q)
    assert all(np.isfinite(x).all() for x in clean)
    by_query = [changed(x, c) for x, c in zip(run(poisoned(k), poisoned(v), q), clean, strict=True)][:2]
    by_key = [changed(x, c) for x, c in zip(run(k, v, poisoned(q)), clean, strict=True)][2:]
    tables = dict(zip(("out", "dq"), by_query, strict=True))
    tables |= {name: x.swapaxes(1, 2) for name, x in zip(("dk", "dv"), by_key, strict=True)}
    for result, table in tables.items():
        least = most = needed(spec, options, heads=table.shape[0])
        if implementation.name == "tpu" and name == "packed":  # the window kernels mask documents, and skip none
            most = least | needed(spec, {}, heads=table.shape[0])
        assert (least <= table).all(), result
        assert (table <= most).all(), result


@kernels
@pytest.mark.parametrize("kind", ["window", pytest.param("sink-tokens", marks=pytest.mark.long)])
def test_routed_forward_reads_what_full_attention_reads(implementation, kind):
    q, k, v = drawn()
    spec, _ = CALLS["window-of-a-block" if kind == "window" else kind]

    @quick_jit
    def run(k, v):
        gate = jnp.ones(q.shape[:2])
        return routed_attention(q, k, v, gate, spec, implementation=implementation.name)[0]

    table = changed(run(poisoned(k), poisoned(v)), run(k, v))
    np.testing.assert_array_equal(table, needed(AttentionSpec(), {}, heads=4))


GATES = {
    "some": np.random.default_rng(3).uniform(size=T) < 0.4,  # two blocks of rows, and a part of one
    "runs": np.arange(T) // 9 % 2 == 1,
    "all": np.ones(T, bool),
    "none": np.zeros(T, bool),
}
QUICK_ROUTED = ("window-of-a-block", "some")


@pytest.mark.parametrize(
    ("name", "gate"),
    [
        pytest.param(*pair, marks=[] if pair == QUICK_ROUTED else pytest.mark.long)
        for pair in (
            QUICK_ROUTED,
            ("window-of-a-block", "all"),
            ("window-of-a-block", "none"),
            ("sink-tokens", "runs"),
            ("sigmoid", "some"),
        )
    ],
)
def test_routed_backward(monkeypatch, name, gate):
    """Each of its two passes: over the window for all rows, and over what lies outside for the routed ones alone."""
    TPU.install(monkeypatch)
    spec, _ = CALLS[name]
    found = []

    def backward(launches, x, gradients, num_active, added):
        """The rows of the batch three times: clean, with poisoned keys and values, and with poisoned cotangents.

        What the pass over the window found is not `added`, so that each pass shows what it touches itself.
        """
        x = x._replace(k=nonfinite(x.k, 1), v=nonfinite(x.v, 1))
        found.append(passes.backward(launches, x, gradients._replace(dout=nonfinite(gradients.dout, 2)), num_active))
        return found[-1]

    def nonfinite(x, copy):  # [3 * BLOCKS, H, T, D]
        copies = x.swapaxes(1, 2).reshape(3, BLOCKS, T, *x.shape[1::2])
        return copies.at[copy].set(poisoned(copies[copy])).reshape(-1, *copies.shape[2:]).swapaxes(1, 2)

    monkeypatch.setattr(routed, "backward", backward)
    routed_rows = GATES[gate]

    @quick_jit
    def run(q, k, v):
        weights = jnp.broadcast_to(jnp.asarray(routed_rows, jnp.float32), q.shape[:2])
        out, pullback = jax.vjp(lambda *qkv: routed_attention(*qkv, weights, spec, implementation="tpu")[0], q, k, v)
        pullback(out)
        return found

    inside, everything = (np.asarray(s.mask(T))[0] for s in (spec, AttentionSpec()))
    active = int(routed_rows.sum())
    outside = np.zeros((T, T), bool)  # of the routed rows, which are gathered into blocks of their own
    outside[:active] = (everything & ~inside)[routed_rows]
    results = run(*(jnp.concatenate([x] * 3) for x in drawn()))
    for gradients, mask, rows in zip(results, (inside, outside), (BLOCKS, -(-active // BLOCK)), strict=True):
        expected = mask.reshape(BLOCKS, BLOCK, BLOCKS, BLOCK).any(axis=(1, 3))
        by_token = [x.swapaxes(1, 2).reshape(3, BLOCKS, T, *x.shape[1::2]) for x in gradients]
        (dq, *_), by_query, (_, *by_key) = ([x[copy] for x in by_token] for copy in range(3))
        table = changed(by_query[0], dq)[:, :rows]  # behind them dq is undefined
        np.testing.assert_array_equal(table, np.broadcast_to(expected[:rows], table.shape), err_msg="dq")
        for poisoned_by_key, clean in zip(by_key, by_token[1:3], strict=True):
            table = changed(poisoned_by_key, clean[0])
            np.testing.assert_array_equal(table, np.broadcast_to(expected.T, table.shape), err_msg="dk, dv")


@kernels
@pytest.mark.parametrize(
    ("window", "num_sink_tokens"),
    [(None, 0), *(pytest.param(w, n, marks=pytest.mark.slow) for w in (1, BLOCK, BLOCK + 1) for n in (0, 2))],
)
def test_decode(implementation, window, num_sink_tokens):
    """Caches filled to every length; a block without a visible entry is not read."""
    q, k, v = drawn()
    spec = AttentionSpec(window, num_sink_tokens=num_sink_tokens)

    @quick_jit
    def run(k, v, length):
        lengths = jnp.broadcast_to(length, BLOCKS)
        return decode_attention(q[:, :1], k, v, spec, lengths=lengths, implementation=implementation.name)

    for length in (1, BLOCK, BLOCK + 1, 3 * BLOCK + 5, T):
        out, clean = run(poisoned(k), poisoned(v), length), run(k, v, length)
        touched = np.isnan(out).any(axis=(1, 2, 3))
        mask = np.asarray(spec.mask(1, T, q_positions=jnp.array([[length - 1]])))
        np.testing.assert_array_equal(touched, mask.reshape(BLOCKS, BLOCK).any(axis=1), err_msg=str(length))
        np.testing.assert_array_equal(out[~touched], clean[~touched])


def grid_points(monkeypatch, function, *calls) -> list[int]:
    """How many steps the grids of all launches of a TPU call have together, with each of the arguments."""
    set_parallel_dimensions(monkeypatch, 1)  # the simulation shuffles parallel dimensions, if their size is static
    points, counts = [], []

    def record(token, point, core):
        points.append(point)
        return token

    TPU.install(monkeypatch)
    compiled = quick_jit(function)
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(grid_point_recorder=record)):
        for arguments in calls:
            points.clear()
            jax.block_until_ready(compiled(*arguments))
            counts.append(len(points))
    pltpu.reset_tpu_interpret_mode_state()
    return counts


def steps(table) -> int:
    """One for each pair of blocks; a block of queries that sees nothing needs one to write its zeros."""
    return int(np.maximum(table.sum(axis=-1), 1).sum())


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.long]) for name in CALLS]
)
def test_no_step_of_the_grid_is_idle(monkeypatch, name):
    spec, options = CALLS[name]
    q, k, v = (x[:1] for x in drawn())
    (used,) = grid_points(
        monkeypatch, lambda q, k, v: attention(q, k, v, spec, **repeated(options, 1), implementation="tpu"), (q, k, v)
    )
    assert 0 < used <= steps(needed(spec, options, heads=4))


def test_routing_takes_the_steps_of_window_and_outside(monkeypatch):
    spec, _ = CALLS["window-of-a-block"]
    q, k, v = (x[:1] for x in drawn())
    (used,) = grid_points(
        monkeypatch,
        lambda q, k, v: routed_attention(q, k, v, jnp.ones((1, T)), spec, implementation="tpu")[0],
        (q, k, v),
    )
    past = np.asarray(AttentionSpec().mask(T) & ~spec.mask(T))
    outside = past.reshape(1, BLOCKS, BLOCK, BLOCKS, BLOCK).any(axis=(2, 4))
    assert BLOCKS < used <= steps(needed(spec, {}, heads=4)) + 4 * steps(outside)


def test_decoding_takes_a_step_for_each_visible_block(monkeypatch):
    q, k, v = (x[:1] for x in drawn())
    spec = AttentionSpec(BLOCK + 2, num_sink_tokens=1)

    def decode(lengths):
        return decode_attention(q[:, :1], k, v, spec, lengths=lengths, implementation="tpu")

    lengths = (1, BLOCK + 1, T)
    counts = grid_points(monkeypatch, decode, *((np.int32([n]),) for n in lengths))
    for length, used in zip(lengths, counts, strict=True):
        mask = np.asarray(spec.mask(1, T, q_positions=np.int32([[length - 1]])))
        assert 0 < used <= 2 * steps(mask.reshape(1, BLOCKS, BLOCK).any(axis=2))  # a KV head's queries together


def test_a_kernel_that_visits_too_much_is_found():
    """The reference multiplies by every key, visible or not."""
    q, k, v = drawn()
    spec = AttentionSpec(7)
    attend = quick_jit(lambda k, v: attention(q, k, v, spec, implementation="reference"))
    out, clean = attend(poisoned(k), poisoned(v)), attend(k, v)
    assert changed(out, clean).all()
