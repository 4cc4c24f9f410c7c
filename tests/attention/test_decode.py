"""Decoding over caches equals the same rows of a full forward."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import AttentionSpec, attention, decode_attention

from .suite import Call, every_implementation
from .tolerances import assert_close

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
        AttentionSpec(window=WINDOW, activation="sigmoid"),
        ("alibi_slopes", "sigmoid_bias"),
        q_length=T,
        kv_length=T,
    ),
    "bfloat16": Call(AttentionSpec(window=WINDOW), q_length=T, kv_length=T, dtype="bfloat16"),
}


def by_name(call):
    learned, fixed = call.draw()
    options = learned | fixed
    return [options.pop(name) for name in "qkv"], options


@every_implementation
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_decode_equals_forward(implementation, call, tokens):
    (q, k, v), options = by_name(call)
    forward = attention(q, k, v, call.spec, **options, implementation="reference")

    @jax.jit
    def decode(q, lengths):
        return decode_attention(
            q, k, v, call.spec, lengths=lengths, **options, implementation=implementation.name
        )

    for length in LENGTHS:  # the cache already holds keys of later positions: they must not be seen
        lengths = jnp.array([length, length + 1])
        rows = [slice(int(n) - tokens, int(n)) for n in lengths]
        queries = jnp.stack([q[b, row] for b, row in enumerate(rows)])
        expected = jnp.stack([forward[b, row] for b, row in enumerate(rows)])
        assert_close(decode(queries, lengths), expected, call.dtype)


@every_implementation
@pytest.mark.parametrize("num_sink_tokens", [0, 2])
def test_ring_cache_equals_forward(implementation, num_sink_tokens):
    """A cache of window + sink tokens: the sink tokens first, then a ring; empty slots have position -1."""
    spec = AttentionSpec(window=WINDOW, num_sink_tokens=num_sink_tokens)
    call = Call(spec, q_length=T, kv_length=T)
    (q, k, v), _ = by_name(call)
    forward = attention(q, k, v, spec, implementation="reference")
    entries = WINDOW + num_sink_tokens
    positions = np.full(entries, -1)
    cached = [np.zeros((2, entries, *x.shape[2:]), np.float32) for x in (k, v)]

    @jax.jit
    def decode(q, k, v, positions, length):
        return decode_attention(
            q,
            k,
            v,
            spec,
            lengths=jnp.stack([length] * 2),
            kv_positions=positions,
            implementation=implementation.name,
        )

    for t in range(T):
        slot = t if t < num_sink_tokens else num_sink_tokens + (t - num_sink_tokens) % WINDOW
        positions[slot] = t
        for cache, source in zip(cached, (k, v), strict=True):
            cache[:, slot] = source[:, t]
        if t + 1 in LENGTHS or t == 0:
            out = decode(q[:, t : t + 1], *cached, np.tile(positions, (2, 1)), jnp.int32(t + 1))
            assert_close(out, forward[:, t : t + 1], call.dtype)


@every_implementation
def test_long_caches_in_several_blocks(implementation):
    call = Call(AttentionSpec(window=300), q_length=2, kv_length=1536, heads=2, kv_heads=1, head_dim=4)
    (q, k, v), _ = by_name(call)
    lengths = jnp.array([1300, 5])

    @functools.partial(jax.jit, static_argnames="name")
    def decode(name):
        return decode_attention(q, k, v, call.spec, lengths=lengths, implementation=name)

    assert_close(decode(implementation.name), decode("reference"), call.dtype)


@every_implementation
def test_starts_hide_earlier_keys(implementation):
    (q, k, v), _ = by_name(CALLS["full"])
    lengths, starts = jnp.array([20, 20]), jnp.array([0, 20 - WINDOW])
    out = jax.jit(decode_attention, static_argnames=("spec", "implementation"))(
        q[:, :1],
        k,
        v,
        spec=AttentionSpec(),
        lengths=lengths,
        starts=starts,
        implementation=implementation.name,
    )
    for row, spec in enumerate([AttentionSpec(), AttentionSpec(window=WINDOW)]):
        expected = decode_attention(q[:, :1], k, v, spec, lengths=lengths, implementation="reference")
        assert_close(out[row], expected[row], "float32")


@every_implementation
def test_a_sequence_shorter_than_the_step_sees_nothing_before_its_start(implementation):
    (q, k, v), _ = by_name(CALLS["full"])
    out = jax.jit(decode_attention, static_argnames=("spec", "implementation"))(
        q[:, :3], k, v, spec=AttentionSpec(), lengths=jnp.array([0, 2]), implementation=implementation.name
    )
    np.testing.assert_array_equal(out[0], 0)
    np.testing.assert_array_equal(out[1, 0], 0)
    first = v[1, 0].repeat(2, axis=0)  # position 0 sees its own key only
    assert_close(out[1, 1], first, "float32")
