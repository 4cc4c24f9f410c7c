"""Decoding over the two pools of a model's cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import AttentionSpec, decode_attention
from pallas_kernels.math.spec import PerHead, Pools
from pallas_kernels.pools import attend_over_pools

from .suite import Implementation
from .tolerances import assert_close


@pytest.mark.parametrize("implementation", ["tpu", "xla", "triton"])
@pytest.mark.parametrize(
    ("seed", "tokens", "options"),
    [
        (0, 1, ()),
        (1, 2, ("sinks",)),
        (2, 1, ("full_heads", "sinks")),
        (3, 1, ("sigmoid", "full_from", "full_heads")),
        pytest.param(4, 5, ("sigmoid", "sinks"), marks=pytest.mark.slow),
        pytest.param(5, 1, ("softcap", "full_from", "full_heads", "sinks"), marks=pytest.mark.slow),
    ],
)
def test_each_head_reads_the_pool_that_it_is_in(seed, tokens, options, implementation, monkeypatch):
    """Whole sequences and rings side by side, against one dense cache; blocks of 16 show each of their edges."""
    Implementation("triton", block=16).install(monkeypatch)
    rng = np.random.default_rng(seed)
    batch, heads, kv_heads, head_dim, entries, window = 4, 6, 3, 12, 90, 21
    sinks = 3 if "sinks" in options else 0
    spec = AttentionSpec(
        window,
        sinks,
        "sigmoid" if "sigmoid" in options else "softmax",
        logit_softcap=5.0 if "softcap" in options else None,
    )
    lengths = jnp.array([90, 37, tokens, 22])

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    q, dense = (normal(batch, tokens, heads, head_dim), [normal(batch, entries, kv_heads, head_dim) for _ in "kv"])
    # Rings: entry j holds the newest position p with (p - sinks) % size == j - sinks, and the sink tokens lie in front.
    size = window + tokens - 1
    last = np.asarray(lengths)[:, None] - 1 - sinks
    entry = np.arange(sinks + size)[None]
    rotating = last - (last - (entry - sinks)) % size
    held = np.where(entry < sinks, entry, rotating + sinks)
    held = np.where((held < np.asarray(lengths)[:, None]) & ((entry < sinks) | (rotating >= 0)), held, -1)
    in_whole = np.array([True, False, True])
    whole_slots, ring_slots = jnp.array([4, 99, 1]), jnp.array([99, 2, 99])  # pools have 5 and 3 rows

    def pool(x, rows, slots, index):
        full = normal(rows, batch, index.shape[1], head_dim)
        for head in np.flatnonzero(np.asarray(slots) < rows):
            row = np.take_along_axis(np.asarray(x[:, :, head]), np.maximum(index, 0)[:, :, None], axis=1)
            full = full.at[slots[head]].set(row)
        return full

    index = np.tile(np.arange(entries), (batch, 1))
    whole = Pools(*(pool(x, 5, whole_slots, index) for x in dense), whole_slots)
    rings = Pools(*(pool(x, 3, ring_slots, held) for x in dense), ring_slots, jnp.asarray(held, jnp.int32))
    given = {"full_heads": jnp.asarray(in_whole)} if "full_heads" in options else {}
    if "sigmoid" in options:
        given |= {"sigmoid_bias": normal(heads), "alibi_slopes": normal(heads) / 10}
    full_from = jnp.array([88, 0, 5, 30]) if "full_from" in options else None
    out = jax.jit(
        lambda q, whole, rings, given: attend_over_pools(
            q,
            whole,
            spec,
            PerHead(**given),
            others=(rings, spec),
            lengths=lengths,
            full_from=full_from,
            implementation=implementation,
        )
    )(q, whole, rings, given)
    expected = decode_attention(
        q, *dense, spec, lengths=lengths, full_from=full_from, **given, implementation="reference"
    )
    if full_from is not None:  # a ring holds no more than the window
        narrow = decode_attention(q, *dense, spec, lengths=lengths, **given, implementation="reference")
        of_ring = np.repeat(~in_whole, heads // kv_heads)
        expected = jnp.where(of_ring[:, None], narrow, expected)
    assert_close(out, expected, "float32")
