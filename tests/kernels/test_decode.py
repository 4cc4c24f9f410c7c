"""Decoding over caches equals the same rows of a full forward; what the TPU kernel reads and visits."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import AttentionSpec, attention, decode_attention
from pallas_kernels.math.spec import PerHead, Pools, coordinates
from pallas_kernels.pools import attend_over_pools
from pallas_kernels.tpu.decode import cache_write, decode
from pallas_kernels.tpu.decode.decode_kernel import CacheVisit

from .suite import Call, every_implementation, quick_jit, seen_pairs
from .tolerances import assert_close

CHOOSE_STEPS = decode.choose_steps
WINDOW = 9
LENGTHS = [WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW]
T = 3 * WINDOW + 4

CALLS = {
    "full": Call(AttentionSpec(), ("sink_logits",), q_length=T, kv_length=T),
    "window": Call(
        AttentionSpec(window=WINDOW, num_sink_tokens=2, logit_softcap=2.0),
        ("alibi_slopes", "sink_logits", "full_heads"),
        q_length=T,
        kv_length=T,
    ),
    "full-from": Call(AttentionSpec(window=WINDOW), ("full_from_row",), q_length=T, kv_length=T),
    "sigmoid": Call(
        AttentionSpec(window=WINDOW, activation="sigmoid"), ("alibi_slopes", "sigmoid_bias"), q_length=T, kv_length=T
    ),
    "bfloat16": Call(AttentionSpec(window=WINDOW), q_length=T, kv_length=T, dtype="bfloat16"),
}


@pytest.fixture
def choose_steps():
    return CHOOSE_STEPS


@pytest.fixture(autouse=True)
def small_steps(monkeypatch):
    """The TPU kernel in blocks of 16 entries, two KV heads a step where they pair up."""
    monkeypatch.setattr(
        decode, "choose_steps", lambda spec, entries, kv_heads, entry_bytes, kind, scattered: (2 - kv_heads % 2, 16)
    )


def by_name(call):
    learned, fixed = call.draw()
    options = learned | fixed
    return [options.pop(name) for name in "qkv"], options


@functools.cache
def rows_of_forward(call):
    """Queries and results [B, T, H, D] of `attention`: numpy's, of which JAX compiles no slice."""
    (q, k, v), options = by_name(call)
    forward = quick_jit(lambda: attention(q, k, v, call.spec, **options, implementation="reference"))
    return np.asarray(q), np.asarray(forward())


@every_implementation
@pytest.mark.parametrize(
    ("name", "tokens"), [("full", 1), ("full", 3), ("window", 1), *((name, 3) for name in CALLS if name != "full")]
)
def test_decode_equals_forward(implementation, name, tokens):
    call = CALLS[name]
    (_, k, v), options = by_name(call)
    q, forward = rows_of_forward(call)

    @quick_jit
    def decode(q, lengths):
        return decode_attention(q, k, v, call.spec, lengths=lengths, **options, implementation=implementation.name)

    for length in LENGTHS:  # the cache already holds keys of later positions: they must not be seen
        lengths = np.array([length, length + 1], np.int32)
        queries, expected = (np.stack([x[b, n - tokens : n] for b, n in enumerate(lengths)]) for x in (q, forward))
        assert_close(decode(queries, lengths), expected, call.dtype)


@every_implementation
@pytest.mark.parametrize(("num_sink_tokens", "chunked"), [(2, False), (2, True)])
def test_ring_cache_equals_forward(implementation, num_sink_tokens, chunked):
    """A cache of window + sink tokens: the sink tokens first, then a ring; empty slots have position -1."""
    spec = AttentionSpec(window=WINDOW, num_sink_tokens=num_sink_tokens, chunked=chunked)
    call = Call(spec, q_length=T, kv_length=T)
    (_, *keys), _ = by_name(call)
    q, forward = rows_of_forward(call)
    entries = WINDOW + num_sink_tokens
    positions = np.full(entries, -1)
    cached = [np.zeros((2, entries, *x.shape[2:]), np.float32) for x in keys]

    @quick_jit
    def decode(q, k, v, positions, length):
        return decode_attention(
            q, k, v, spec, lengths=jnp.stack([length] * 2), kv_positions=positions, implementation=implementation.name
        )

    for t in range(T):
        slot = t if t < num_sink_tokens else num_sink_tokens + (t - num_sink_tokens) % WINDOW
        positions[slot] = t
        for cache, source in zip(cached, map(np.asarray, keys), strict=True):
            cache[:, slot] = source[:, t]
        if t + 1 in LENGTHS or t == 0:
            out = decode(q[:, t : t + 1], *cached, np.tile(positions, (2, 1)), jnp.int32(t + 1))
            assert_close(out, forward[:, t : t + 1], call.dtype)


@every_implementation
def test_long_caches_in_several_blocks(implementation):
    call = Call(AttentionSpec(window=300), q_length=2, kv_length=1536, heads=2, kv_heads=1, head_dim=4)
    (q, k, v), _ = by_name(call)
    lengths = jnp.array([1300, 5])

    @functools.partial(quick_jit, static_argnames="name")
    def decode(name):
        return decode_attention(q, k, v, call.spec, lengths=lengths, implementation=name)

    assert_close(decode(implementation.name), decode("reference"), call.dtype)


run = quick_jit(decode_attention, static_argnames=("spec", "implementation"))


@every_implementation
def test_starts_hide_earlier_keys(implementation):
    (q, k, v), _ = by_name(CALLS["full"])
    lengths, starts = jnp.array([20, 20]), jnp.array([0, 20 - WINDOW])
    one = np.asarray(q)[:, :1]
    out = run(one, k, v, AttentionSpec(), lengths=lengths, starts=starts, implementation=implementation.name)
    for row, spec in enumerate([AttentionSpec(), AttentionSpec(window=WINDOW)]):
        expected = run(one, k, v, spec, lengths=lengths, implementation="reference")
        assert_close(np.asarray(out)[row], np.asarray(expected)[row], "float32")


@every_implementation
def test_a_sequence_shorter_than_the_step_sees_nothing_before_its_start(implementation):
    (q, k, v), _ = by_name(CALLS["full"])
    three, lengths = np.asarray(q)[:, :3], jnp.array([0, 2])
    out = np.asarray(run(three, k, v, AttentionSpec(), lengths=lengths, implementation=implementation.name))
    np.testing.assert_array_equal(out[0], 0)
    np.testing.assert_array_equal(out[1, 0], 0)
    first = np.asarray(v)[1, 0].repeat(2, axis=0)  # position 0 sees its own key only
    assert_close(out[1, 1], first, "float32")


# ---- the TPU kernel: what it visits, and pools ----

VISITS = {
    "full": (AttentionSpec(), {}),
    "window": (AttentionSpec(9), {}),
    "window of one": (AttentionSpec(1), {}),
    "sinks": (AttentionSpec(9, 3), {}),
    "full rows": (AttentionSpec(9, 3), {"full_from": np.array([0, 90, 1000, 3, 1000])}),
    "starts": (AttentionSpec(40), {"starts": np.array([0, 37, 60, 2, 0])}),
    "ring": (AttentionSpec(70, 2), {"ring": True}),
    "full heads": (AttentionSpec(9, 3), {"some_full_heads": True}),
}
VISITED_LENGTHS = np.array([1, 44, 100, 97, 0])  # the last sequence is empty
ENTRIES, BLOCK = 100, 16


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize(("spec", "options"), VISITS.values(), ids=VISITS)
def test_visits_are_the_blocks_that_each_sequence_sees(spec, options, tokens):
    options = dict(options)
    some_full_heads = options.pop("some_full_heads", False)
    starts = options.pop("starts", np.zeros(5, int))
    positions = np.tile(np.arange(ENTRIES), (5, 1))
    if options.pop("ring", False):  # rotated by another number in each row, half empty in one
        positions = np.stack([np.roll(row, 13 * b) for b, row in enumerate(positions)])
        positions[2, :50] = -1
    positions = np.where((positions >= starts[:, None]) & (positions < VISITED_LENGTHS[:, None]), positions, -1)
    positions = np.pad(positions, ((0, 0), (0, -ENTRIES % BLOCK)), constant_values=-1)
    q_positions = VISITED_LENGTHS[:, None] - tokens + np.arange(tokens)
    where = coordinates(tokens, positions.shape[1], q_positions=q_positions, kv_positions=positions, **options)
    seen, reach = (seen_pairs(x, where).any(axis=1).reshape(5, -1, BLOCK).any(axis=2) for x in (spec, spec.full))
    expected = reach if some_full_heads else seen
    list_visits = quick_jit(decode.list_visits, static_argnums=(0, 2), static_argnames="some_full_heads")
    visits = list_visits(spec, where, BLOCK, some_full_heads=some_full_heads)
    used = [decode.unpack(int(entry), seen.shape[1]) for entry in np.asarray(visits.pairs)[: int(visits.used)]]
    used = [CacheVisit(*map(int, visit)) for visit in used]
    assert [(v.sequence, v.block) for v in used if v.wanted] == [tuple(pair) for pair in np.argwhere(expected).tolist()]
    assert {(v.sequence, v.block) for v in used if v.windowed} == set(map(tuple, np.argwhere(seen).tolist()))
    # What sees nothing has one entry, which reads nothing but writes the zeros.
    assert len(used) == np.maximum(expected.sum(axis=1), 1).sum()
    for sequence in range(5):
        mine = [v for v in used if v.sequence == sequence]
        assert [v.first for v in mine] == [1] + [0] * (len(mine) - 1)
        assert [v.last for v in mine] == [0] * (len(mine) - 1) + [1]


def pool_call(head_dim, dtype, tokens=1, entries=40, heads=6):
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape).astype(jnp.dtype(dtype)))

    pools = [normal(7, 3, entries, head_dim) for _ in range(2)]
    return normal(3, tokens, heads, head_dim), pools, jnp.array([40, 17, 0])


@functools.partial(quick_jit, static_argnames="spec")
def expected_of_pools(q, pools, slots, spec, **options):
    rows = [pool[slots].transpose(1, 2, 0, 3) for pool in pools]
    return decode_attention(q, *rows, spec, **options, implementation="reference")


@pytest.mark.slow
@pytest.mark.parametrize("entries", [40, 48])
@pytest.mark.parametrize(
    ("head_dim", "dtype"), [(16, "float32"), (128, "float32"), (128, "bfloat16"), (80, "bfloat16")]
)
def test_pools_are_read_by_their_rows(head_dim, dtype, entries):
    q, pools, lengths = pool_call(head_dim, dtype, tokens=2, entries=entries)
    spec, slots = AttentionSpec(19, 2), jnp.array([3, 4, 5])
    sinks = jnp.array([0.3, -1.0, 2.0, 0.0, 1.0, -2.0])
    where = coordinates(2, entries, q_positions=lengths[:, None] - 2 + np.arange(2))
    out = jax.jit(decode.decode_pool, static_argnums=4)(q, *pools, slots, spec, where, PerHead(sink_logits=sinks))
    assert_close(out, expected_of_pools(q, pools, slots, spec, lengths=lengths, sink_logits=sinks), dtype)


@pytest.mark.parametrize("implementation", ["tpu", "xla", "triton"])
def test_pools_know_every_option_of_a_head(implementation):
    q, pools, lengths = pool_call(16, "float32")
    spec, slots = AttentionSpec(9, logit_softcap=4.0), jnp.array([5, 2, 0])
    heads = q.shape[2]
    per_head = {
        "alibi_slopes": np.linspace(-0.1, -0.4, heads, dtype=np.float32),
        "sink_logits": np.linspace(-1.0, 1.0, heads, dtype=np.float32),
        "logit_scales": np.linspace(0.5, 2.0, heads, dtype=np.float32),
    }
    attend = quick_jit(attend_over_pools, static_argnames=("spec", "implementation"))
    out = attend(q, Pools(*pools, slots), spec, PerHead(**per_head), lengths=lengths, implementation=implementation)
    assert_close(out, expected_of_pools(q, pools, slots, spec, lengths=lengths, **per_head), "float32")


@pytest.mark.parametrize("full_heads", [None, pytest.param([True, False, True, False], marks=pytest.mark.slow)])
def test_scattered_and_absent_heads(full_heads):
    q, pools, lengths = pool_call(16, "float32", heads=8)
    spec, slots = AttentionSpec(9), jnp.array([5, 100, 2, 0])  # the pools have 7 rows
    options = {} if full_heads is None else {"full_heads": jnp.array(full_heads)}
    where = coordinates(1, 40, q_positions=lengths[:, None] - 1)
    read = quick_jit(decode.decode_pool, static_argnums=4, static_argnames="scattered")
    out = read(q, *pools, slots, spec, where, PerHead(**options), scattered=True)
    expected = np.array(expected_of_pools(q, pools, np.minimum(slots, 6), spec, lengths=lengths, **options))
    expected[:, :, 2:4] = 0
    assert_close(out, expected, "float32")


def test_nothing_behind_the_last_entry_or_unseen_reaches_the_result():
    """Entries that are not seen hold NaN, those of other sequences and heads too."""
    q, pools, lengths = pool_call(128, "float32")
    spec, slots = AttentionSpec(9), jnp.array([0, 1, 2])
    where = coordinates(1, 40, q_positions=lengths[:, None] - 1)
    visited = np.zeros(pools[0].shape, bool)  # whole blocks are read: what else they hold has weight zero
    for b, length in enumerate(np.asarray(lengths)):
        visited[:3, b, max(length - 9, 0) // 16 * 16 : -(-length // 16) * 16] = True
    poisoned = [np.where(visited, pool, np.float32(np.nan)) for pool in pools]
    read = quick_jit(decode.decode_pool, static_argnums=4)
    np.testing.assert_array_equal(*(read(q, *x, slots, spec, where, PerHead()) for x in (poisoned, pools)))


@pytest.mark.parametrize(("head_dim", "dtype"), [(16, "float32"), (128, "bfloat16")])
def test_write_pool_puts_values_at_their_entries_and_nowhere_else(head_dim, dtype):
    _, (pool, values), _ = pool_call(head_dim, dtype)
    slots, entries = np.array([5, 100, 2, 0]), np.array([39, 40, 17])  # the pools have 7 rows of 40 entries
    values = values[:4, :, 0].swapaxes(0, 1)  # [B, K, D]
    expected = np.array(pool)
    for head in (0, 2, 3):
        for b in (0, 2):
            expected[slots[head], b, entries[b]] = values[b, head]
    written = jax.jit(cache_write.write_pool)(pool, jnp.asarray(slots), values, jnp.asarray(entries))
    np.testing.assert_array_equal(written, expected)


@pytest.mark.parametrize("kind", ["TPU v5 lite", "TPU v5", "TPU v6 lite", "TPU7x", "cpu"])
@pytest.mark.parametrize("spec", [AttentionSpec(), AttentionSpec(1024, 4)], ids=["full", "window"])
def test_steps_fit_vector_memory(choose_steps, kind, spec):
    cases = itertools.product(
        [1, 52, 1028, 4100, 8192, 131072], [(1, 512), (8, 512), (8, 256), (12, 2048), (32, 512)], [False, True]
    )
    for entries, (kv_heads, entry_bytes), scattered in cases:
        heads, block = choose_steps(spec, entries, kv_heads, entry_bytes, kind, scattered)
        assert kv_heads % heads == 0
        assert block % 128 == 0
        assert (-(-entries // block) - 1) * block < entries
        assert 2 * heads * block * entry_bytes <= 20 * 2**20
        if spec.window == 1024 and entries == 1028 and entry_bytes <= 512:
            assert block >= entries  # the whole window is one block
