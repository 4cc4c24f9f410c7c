"""The cotangents of a routed layer's branches, against those that JAX finds for their mixture."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.math.parts import LOG2E, mix
from pallas_kernels.tpu.tile.cotangents import Branch, divide
from tests.kernels.suite import quick_jit
from tests.kernels.tolerances import assert_close

BATCH, LENGTH, HEADS, HEAD_DIM = 2, 24, 3, 8


def draw(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def by_head(x: jax.Array) -> jax.Array:
    return x.swapaxes(1, 2)


def inputs(softmax: bool, with_sinks: bool) -> dict:
    """A gate of 0, 1 and what lies between; the last two queries see no key at all, or none in their window."""
    gate = jnp.clip(draw(0, BATCH, LENGTH), 0, 1)
    window, full = draw(1, BATCH, LENGTH, HEADS, HEAD_DIM), draw(2, BATCH, LENGTH, HEADS, HEAD_DIM)
    given = {"gate": gate, "window": window, "window_lse": None, "full": full, "full_lse": None, "sink_logits": None}
    if not softmax:
        return given
    window_lse = draw(3, BATCH, LENGTH, HEADS).at[:, -2:].set(-jnp.inf)
    full_lse = jnp.logaddexp(window_lse, draw(4, BATCH, LENGTH, HEADS)).at[:, -1].set(-jnp.inf)
    given |= {"window": window.at[:, -2:].set(0), "full": full.at[:, -1].set(0)}
    return given | {
        "window_lse": window_lse,
        "full_lse": full_lse,
        "sink_logits": draw(5, HEADS) if with_sinks else None,
    }


@pytest.mark.parametrize(("softmax", "with_sinks"), [(True, False), (True, True), (False, False)])
def test_cotangents_are_those_of_the_mixture(softmax, with_sinks):
    given = inputs(softmax, with_sinks)
    dout, ddisagreement = draw(6, BATCH, LENGTH, HEADS, HEAD_DIM), draw(7, BATCH, LENGTH)
    (expected,) = quick_jit(lambda x, *cotangents: jax.vjp(lambda x: mix(**x), x)[1](cotangents))(
        given, dout, ddisagreement
    )

    def branch(name: str) -> Branch:
        lse = given[f"{name}_lse"]
        return Branch(by_head(given[name]), None if lse is None else by_head(lse) * LOG2E)

    of_window, of_full, dgate, dsinks = quick_jit(divide)(
        given["gate"], given["sink_logits"], branch("window"), branch("full"), by_head(dout), ddisagreement
    )
    assert_close(dgate, expected["gate"], "float32", gradient=True)
    assert_close(of_full.out, by_head(expected["full"]), "float32", gradient=True)
    if not softmax:
        assert_close(of_window.out, by_head(expected["window"] + expected["full"]), "float32", gradient=True)
        return
    # Both branches in one pass over the window: its share of the full softmax weighs what the full branch asks for.
    share = jnp.exp(given["window_lse"] - given["full_lse"])
    share = by_head(jnp.where(given["window_lse"] == -jnp.inf, 0, share))
    joint = by_head(expected["window"]) + share[..., None] * by_head(expected["full"])
    assert_close(of_window.out, joint, "float32", gradient=True)

    def delta(name: str) -> jax.Array:
        sees_any = given[f"{name}_lse"] != -jnp.inf
        dlse = jnp.where(sees_any, expected[f"{name}_lse"], 0)
        return by_head((expected[name] * given[name]).sum(axis=3) - dlse)

    assert_close(of_full.delta, delta("full"), "float32", gradient=True)
    assert_close(of_window.delta, delta("window") + share * delta("full"), "float32", gradient=True)
    if with_sinks:
        assert_close(dsinks, expected["sink_logits"], "float32", gradient=True)
