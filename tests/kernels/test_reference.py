"""The oracle itself: numbers worked out by hand, and the equations written as plain Python loops in float64."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import AttentionSpec, attention, decode_attention, routed_attention

from .tolerances import assert_close


def one_head(*rows):
    return jnp.asarray(rows, jnp.float32)[None, :, None, :]  # [1, T, 1, D]


# Logits q_m k_n with scale 1 and D = 1 (log 2 makes powers of two): row m, column n: (m + 1) * n * log 2.
LOG2 = math.log(2)
Q, K, V = one_head([1], [2], [3]), one_head([0], [LOG2], [2 * LOG2]), one_head([1], [10], [100])


def reference(spec, **options):
    out = attention(Q, K, V, spec, implementation="reference", **options)
    return jax.tree.map(lambda x: np.asarray(x).ravel(), out)


@pytest.mark.parametrize(
    ("spec", "options", "expected"),
    [
        # Row 1: weights 1, 4; row 2: 1, 8, 64.
        (AttentionSpec(scale=1), {}, [1, (1 + 40) / 5, (1 + 80 + 6400) / 73]),
        (AttentionSpec(scale=1, window=2), {}, [1, (1 + 40) / 5, (80 + 6400) / 72]),
        (AttentionSpec(scale=1, window=1), {}, [1, 10, 100]),
        (AttentionSpec(scale=1, window=1, num_sink_tokens=1), {}, [1, (1 + 40) / 5, (1 + 6400) / 65]),
        (AttentionSpec(scale=1, window=1), {"full_from": jnp.array([2])}, [1, 10, (1 + 80 + 6400) / 73]),
        (AttentionSpec(scale=1, window=1), {"full_heads": jnp.array([True])}, [1, 41 / 5, 6481 / 73]),
        # A sink logit of log 3 adds 3 to each denominator.
        (AttentionSpec(scale=1), {"sink_logits": jnp.array([math.log(3)])}, [1 / 4, 41 / 8, 6481 / 76]),
        # A slope of -log 2 halves a weight for each token of distance.
        (AttentionSpec(scale=1), {"alibi_slopes": jnp.array([-LOG2])}, [1, 40.5 / 4.5, 6440.25 / 68.25]),
        # Packed: the second document starts at the second token.
        (AttentionSpec(scale=1), {"q_segment_ids": jnp.array([[1, 2, 2]])}, [1, 10, (80 + 6400) / 72]),
        # Sigmoid of log x is x / (1 + x): weights 1/2; 1/2, 4/5; 1/2, 8/9, 64/65.
        (AttentionSpec(scale=1, activation="sigmoid"), {}, [1 / 2, 1 / 2 + 8, 1 / 2 + 80 / 9 + 6400 / 65]),
        # A bias of -log 4 divides each x by 4.
        (
            AttentionSpec(scale=1, activation="sigmoid", window=2),
            {"sigmoid_bias": -2 * LOG2},
            [1 / 5, 1 / 5 + 10 / 2, 20 / 3 + 1600 / 17],
        ),
    ],
)
def test_by_hand(spec, options, expected):
    np.testing.assert_allclose(reference(spec, **options), expected, rtol=1e-5)


def test_lse_by_hand():
    _, lse = reference(AttentionSpec(scale=1), return_lse=True)
    np.testing.assert_allclose(lse, [0, math.log(5), math.log(73)], rtol=1e-5, atol=1e-6)
    _, lse = reference(AttentionSpec(scale=1), return_lse=True, sink_logits=jnp.array([math.log(3)]))
    np.testing.assert_allclose(lse, [math.log(4), math.log(8), math.log(76)], rtol=1e-5)


def test_softcap_by_hand():
    # The capped logits are below 0.5, so the weights of row 2 are nearly equal.
    capped = reference(AttentionSpec(scale=1, logit_softcap=0.5))
    weights = np.exp(0.5 * np.tanh(np.array([0, 3, 6]) * LOG2 / 0.5))
    np.testing.assert_allclose(capped[2], weights @ [1, 10, 100] / weights.sum(), rtol=1e-5)


def test_routed_by_hand():
    out, disagreement = routed_attention(
        Q, K, V, jnp.array([[0.0, 1.0, 0.25]]), AttentionSpec(scale=1, window=1), implementation="reference"
    )
    full, window = np.array([1, 41 / 5, 6481 / 73]), np.array([1, 10, 100])
    np.testing.assert_allclose(out.ravel(), [1, 41 / 5, 0.25 * full[2] + 0.75 * 100], rtol=1e-5)
    np.testing.assert_allclose(disagreement.ravel(), (full - window) ** 2, rtol=1e-5)


def test_decode_by_hand():
    out = decode_attention(
        Q[:, 2:], K, V, AttentionSpec(scale=1, window=2), lengths=jnp.array([3]), implementation="reference"
    )
    np.testing.assert_allclose(out.ravel(), [(80 + 6400) / 72], rtol=1e-5)


def loops(q, k, v, spec, slopes, sinks, bias):
    """The equations of the module, one query, head and key at a time; windowed, causal, default positions."""
    batch, length, heads, head_dim = q.shape
    group = heads // k.shape[2]
    out = np.zeros(q.shape)
    for b in range(batch):
        for h in range(heads):
            for m in range(length):
                total = math.exp(sinks[h]) if spec.activation == "softmax" else 1.0
                for n in range(m + 1):
                    if n <= m - spec.window and n >= spec.num_sink_tokens:
                        continue
                    s = q[b, m, h] @ k[b, n, h // group] / math.sqrt(head_dim)
                    s = spec.logit_softcap * math.tanh(s / spec.logit_softcap) + slopes[h] * (m - n)
                    if spec.activation == "softmax":
                        weight = math.exp(s)
                        total += weight
                    else:
                        weight = 1 / (1 + math.exp(-s - bias))
                    out[b, m, h] += weight * v[b, n, h // group]
                out[b, m, h] /= total
    return out


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
def test_float64_against_loops(activation, implementation):
    rng = np.random.default_rng(0)
    spec = AttentionSpec(window=3, num_sink_tokens=2, activation=activation, logit_softcap=1.5)
    q, k, v = (rng.normal(size=(2, 9, heads, 5)) for heads in (6, 3, 3))
    slopes, sinks, bias = rng.normal(size=6), rng.normal(size=6), -0.7
    with jax.enable_x64(True):
        given = {"sink_logits": sinks} if activation == "softmax" else {"sigmoid_bias": bias}
        out = attention(*map(jnp.asarray, (q, k, v)), spec, alibi_slopes=slopes, implementation=implementation, **given)
        assert_close(out, jnp.asarray(loops(q, k, v, spec, slopes, sinks, bias)), "float64")


def test_bfloat16_is_computed_in_float32():
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(1, 20, 2, 16)), jnp.bfloat16) for _ in range(3))
    out = attention(q, k, v, AttentionSpec(), implementation="reference")
    exact = attention(*(x.astype(jnp.float32) for x in (q, k, v)), AttentionSpec(), implementation="reference")
    np.testing.assert_array_equal(out, exact.astype(jnp.bfloat16))
