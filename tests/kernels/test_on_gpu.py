"""On an NVIDIA GPU: the kernels with the tiles that they are used with, against the reference.

`JAX_PLATFORMS=cuda pytest tests/kernels -k "triton or on_gpu"` runs these, and every variant with small blocks.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import AttentionSpec, attention, decode_attention
from pallas_kernels.math.spec import PerHead, Pools
from pallas_kernels.pools import attend_over_pools

from .suite import Call, Implementation, assert_matches_reference, assert_matches_routed
from .tolerances import assert_both_close, assert_close

pytestmark = pytest.mark.gpu

T = 1300  # several tiles of every size, and a ragged end
DOCUMENTS = (tuple([1] * 500 + [2] * 77 + [3] * 700 + [0] * 23), tuple([0] * 100 + [1] * 1200))
WINDOW = AttentionSpec(window=300)


def call(spec, options=(), **fields):
    sizes = {"q_length": T, "kv_length": T, "heads": 8, "kv_heads": 2, "head_dim": 128, "dtype": "bfloat16"}
    return Call(spec, options, **sizes | fields)


CALLS = {
    "full": call(AttentionSpec()),
    "window": call(WINDOW),
    "window-of-128": call(AttentionSpec(window=128)),
    "bidirectional": call(AttentionSpec(window=300, causal=False)),
    "packed": call(WINDOW, segments=DOCUMENTS),
    "packed-sink-tokens": call(AttentionSpec(window=300, num_sink_tokens=4), segments=DOCUMENTS),
    "full-from-packed": call(WINDOW, ("full_from",), segments=DOCUMENTS),
    "full-heads": call(WINDOW, ("full_heads",)),
    "softcap-sink-logits": call(AttentionSpec(window=300, logit_softcap=30.0), ("sink_logits",)),
    "chunk": call(WINDOW, ("chunk",), q_length=400),
    "multi-query": call(WINDOW, heads=5, kv_heads=1),
    "head-dim-64": call(WINDOW, head_dim=64),
    "head-dim-80": call(WINDOW, head_dim=80),
    "head-dim-256": call(WINDOW, head_dim=256),
    "float32": call(WINDOW, dtype="float32"),
    # Two heads, whose slopes both fall: with a rising one, weights near 1 add up to the number of keys, and what they
    # are rounded by to more than tolerances for values of order one allow.
    "sigmoid": call(
        AttentionSpec(window=300, activation="sigmoid"), ("alibi_slopes", "scalar_bias"), heads=2, kv_heads=1
    ),
}
TRITON = Implementation("triton")  # with its own tiles


@pytest.mark.parametrize("name", CALLS)
def test_tiles_in_use(name):
    assert_matches_reference(CALLS[name], TRITON)


@pytest.mark.parametrize("name", ["window", "packed", "packed-sink-tokens", "full-heads", "head-dim-64"])
def test_routed_with_tiles_in_use(name):
    rng = np.random.default_rng(5)
    drawn = [rng.uniform(size=(2, T)), rng.uniform(size=(2, T)) < 0.13]
    assert_matches_routed(CALLS[name], TRITON, *(jnp.asarray(gate, jnp.float32) for gate in drawn))


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("name", ["full", "window", "full-heads", "head-dim-64", "head-dim-256", "float32"])
def test_decode_equals_the_last_rows(name, tokens):
    case = CALLS[name]
    learned, fixed = case.draw()
    q, k, v = (learned[x] for x in "qkv")
    lengths = jnp.array([T, 700])
    queries = jnp.stack([q[b, n - tokens : n] for b, n in enumerate(lengths.tolist())])
    out = decode_attention(queries, k, v, case.spec, lengths=lengths, **fixed, implementation="triton")
    expected = attention(q, k, v, case.spec, **fixed, implementation="reference")
    expected = jnp.stack([expected[b, n - tokens : n] for b, n in enumerate(lengths.tolist())])
    assert_close(out, expected, case.dtype)


@pytest.mark.parametrize("name", ["full", "window", "window-of-128", "multi-query", "head-dim-64"])
def test_plain_calls_take_cudnn(name):
    """What `implementation=None` chooses, values and gradients."""
    case = CALLS[name]
    learned, _ = case.draw()

    def run(implementation):
        @jax.jit
        def both(learned):
            def function(learned):
                return attention(*(learned[x] for x in "qkv"), case.spec, implementation=implementation)

            out, pullback = jax.vjp(function, learned)
            return out, pullback(jnp.cos(jnp.arange(out.size)).reshape(out.shape).astype(out.dtype))

        return both

    assert "fmha" in run(None).lower(learned).as_text()
    assert_both_close(run(None)(learned), run("reference")(learned), case.dtype)


def test_packed_calls_take_triton():
    case = CALLS["packed"]
    learned, fixed = case.draw()
    text = jax.jit(lambda x: attention(*(x[y] for y in "qkv"), case.spec, **fixed)).lower(learned).as_text()
    assert "__gpu$xla.gpu.triton" in text


@pytest.mark.parametrize("name", ["full", "window", "head-dim-64", "head-dim-256", "float32"])
def test_pools_equal_the_last_row(name):
    """The pools of a model's cache, read where they lie, each head from a row of its own."""
    case = CALLS[name]
    learned, _ = case.draw()
    q, k, v = (learned[x] for x in "qkv")
    lengths, slots = jnp.array([T, 700]), jnp.array([4, 1])
    pools = [jnp.zeros((5, *x.shape[:2], x.shape[3]), x.dtype) for x in (k, v)]
    pools = [pool.at[slots].set(x.transpose(2, 0, 1, 3)) for pool, x in zip(pools, (k, v), strict=True)]
    queries = jnp.stack([q[b, n - 1 : n] for b, n in enumerate(lengths.tolist())])
    out = jax.jit(
        lambda q, *pools: attend_over_pools(
            q, Pools(*pools, slots), case.spec, PerHead(), lengths=lengths, implementation="triton"
        )
    )(queries, *pools)
    expected = attention(q, k, v, case.spec, implementation="reference")
    assert_close(out, jnp.stack([expected[b, n - 1 : n] for b, n in enumerate(lengths.tolist())]), case.dtype)
