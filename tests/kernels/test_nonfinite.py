"""What is not finite reaches the queries that see it, and changes no bit of the others; lse stays in base 2."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import AttentionSpec, attention
from pallas_kernels.parts import LOG2E

from .suite import IMPLEMENTATIONS, PACKED, Call, Implementation, every_implementation
from .tolerances import assert_close

KEY = 22
CALLS = {
    "window": Call(AttentionSpec(11)),
    "packed": Call(AttentionSpec(11), segments=tuple(map(tuple, PACKED))),
    "sink-tokens": Call(AttentionSpec(7, num_sink_tokens=3)),
    "sigmoid": Call(AttentionSpec(11, activation="sigmoid"), ("alibi_slopes",)),
}


def run(call: Call, name: str, changed: str, value: float, weight: jax.Array):
    """out, lse and gradients with token KEY of the named arrays set to `value`, for the rows of `weight` [B, T]."""
    learned, fixed = call.draw()
    changes = {x: learned[x].at[:, KEY].set(value) for x in changed}
    return_lse = call.spec.activation == "softmax"

    def results(q, k, v):
        out = attention(q, k, v, call.spec, **fixed, return_lse=return_lse, implementation=name)
        return jax.tree.leaves(out)

    @jax.jit
    def both(arrays):
        out, pullback = jax.vjp(results, *arrays)
        rows = [jnp.broadcast_to(weight.reshape(*weight.shape, *[1] * (x.ndim - 2)), x.shape) for x in out]
        cotangents = [jnp.where(jnp.isfinite(x), r, 0) for x, r in zip(out, rows, strict=True)]
        return out, pullback(cotangents)

    arrays = learned | changes
    return both([arrays[x] for x in "qkv"])


@every_implementation
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(("changed", "value"), [("k", np.nan), ("v", np.nan), ("v", np.inf), ("qkv", np.nan)])
def test_only_the_queries_that_see_it(implementation, name, changed, value):
    call = CALLS[name]
    _, fixed = call.draw()
    segments = {x: y for x, y in fixed.items() if x == "q_segment_ids"}
    seen = np.broadcast_to(call.spec.mask(50, **segments)[:, :, KEY], (2, 50)).copy()
    if "q" in changed:
        seen[:, KEY] = True
    rows = jnp.asarray(~seen, jnp.float32)
    clean, clean_gradients = run(call, implementation.name, "", 0.0, rows)
    results, gradients = run(call, implementation.name, changed, value, rows)
    assert seen.any()
    assert not np.isfinite(results[0])[seen].all(axis=-1).any()
    if "k" in changed and len(results) == 2:
        assert np.isnan(results[1])[seen].all()
    # The TPU kernel's sigmoid takes a step with such a value in another body, which adds ALiBi up in another order.
    same = assert_close if (implementation.name, name) == ("tpu", "sigmoid") else assert_same_bits
    for actual, expected in zip((*results, gradients[0]), (*clean, clean_gradients[0]), strict=True):
        same(actual[~seen], expected[~seen], call.dtype)


def assert_same_bits(actual, expected, _):
    np.testing.assert_array_equal(actual, expected)


# Products and logits in base 2 that float32 holds exactly, so that only what is done to lse can lose digits.
# The others round the products otherwise forward than backward (tpu), or lse in natural units (xla).
@pytest.mark.parametrize(
    "implementation", [i for i in IMPLEMENTATIONS if i.name == "triton"], ids=str, indirect=True
)
@pytest.mark.parametrize("size", [1e4, 1e5])
def test_gradients_at_large_logits(implementation: Implementation, size):
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.integers(-8, 9, (1, 40, 2, 16)), jnp.float32) for _ in range(2))
    v = jnp.asarray(rng.normal(size=q.shape), jnp.float32)
    q = q * 2.0 ** np.round(np.log2(size / 400))
    spec = AttentionSpec(11, scale=1 / LOG2E)

    def gradients(name):
        def loss(*qkv):
            out, lse = attention(*qkv, spec, return_lse=True, implementation=name)
            return (out * jnp.cos(jnp.arange(16.0))).sum() + jnp.sin(lse * 1e-5).sum()

        return jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v)

    actual, expected = gradients(implementation.name), gradients("reference")
    assert_close(actual, expected, "float32", gradient=True)
