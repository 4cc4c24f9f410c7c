"""Heads of 64 in pairs (tpu/tile/pairs.py): the same attention, whichever heads share a register's lanes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import AttentionSpec, attention
from pallas_kernels.math.rotary import Rotation, rotate
from pallas_kernels.math.spec import PerHead, coordinates
from pallas_kernels.tpu.calls.launches import call_of, with_pairs
from pallas_kernels.tpu.tile.pairs import LONGEST_WINDOW

from .suite import LEFT_PADDED, PACKED, Call, Implementation, assert_matches_reference, with_gradients
from .tolerances import assert_both_close

SIGMOID = ("alibi_slopes", "sigmoid_bias")
CALLS = {
    "window": Call(AttentionSpec(11)),
    "packed-sinks": Call(AttentionSpec(9, 3), ("sink_logits",), tuple(map(tuple, PACKED))),
    "sinks": Call(AttentionSpec(9, 3)),
    "sigmoid": Call(AttentionSpec(11, activation="sigmoid"), SIGMOID, tuple(map(tuple, LEFT_PADDED))),
    "softcap": Call(AttentionSpec(11, logit_softcap=3.0), ("logit_scales",)),
    # Not in pairs: the scheduled kernels know none.
    "full-from": Call(AttentionSpec(7), ("full_from",), tuple(map(tuple, PACKED))),
    "bidirectional": Call(AttentionSpec(11, causal=False)),
}
QUICK = {("packed-sinks", (8, 4)), ("sigmoid", (4, 4))}


@pytest.mark.parametrize(
    ("name", "heads"),
    [
        pytest.param(name, heads, marks=[] if (name, heads) in QUICK else pytest.mark.slow)
        for name in CALLS
        for heads in ((4, 4), (8, 4))
    ],
    ids=str,
)
def test_pairs_match_the_reference(name, heads, monkeypatch):
    call = dataclasses.replace(CALLS[name], head_dim=64, heads=heads[0], kv_heads=heads[1])
    assert_matches_reference(call, Implementation("tpu", block=16).install(monkeypatch))


@pytest.mark.parametrize("distance", [32, 1, 8], ids=["halves", "neighbours", "of 16 channels"])
def test_the_kernels_rotate_pairs(distance, monkeypatch):
    Implementation("tpu", block=16).install(monkeypatch)
    learned, fixed = dataclasses.replace(CALLS["packed-sinks"], head_dim=64, heads=4, kv_heads=4).draw()
    angles = np.random.default_rng(1).normal(size=(2, 50, 64))
    channel = np.arange(64)
    partner = channel ^ distance
    angles = np.where(channel < max(2 * distance, 64 * (distance == 1)), angles[..., channel & ~distance], 0)
    signs = np.where(channel < partner, -1, 1)
    rotation = Rotation(*(jnp.asarray(x, jnp.float32) for x in (np.cos(angles), np.sin(angles) * signs)), distance)

    def run(implementation, **given):
        def function(learned):
            q = learned["q"] if given else rotate(learned["q"], rotation)
            options = fixed | given | {"return_lse": True, "implementation": implementation}
            return attention(**(learned | {"q": q}), spec=AttentionSpec(9, 3), **options)

        return with_gradients(function)(learned)

    assert_both_close(run("tpu", rotation=rotation), run("reference"), "float32")


def test_which_calls_are_taken_in_pairs():
    def pairs(heads=4, kv_heads=4, head_dim=64, window=1024, full_heads=None, causal=True, **packing):
        q, spec = jax.ShapeDtypeStruct((1, 8, heads, head_dim), jnp.float32), AttentionSpec(window, causal=causal)
        where = coordinates(8, 8, **packing)
        call = call_of(q, spec, where, PerHead())
        return with_pairs(call, where, heads, head_dim, kv_heads, full_heads).abreast == 2

    assert pairs()
    assert pairs(heads=8, kv_heads=2)
    assert pairs(window=LONGEST_WINDOW)
    assert pairs(q_segment_ids=jnp.ones((1, 8), jnp.int32))
    assert not pairs(heads=3, kv_heads=3)  # one head would be left
    assert not pairs(heads=6, kv_heads=2)  # two query heads side by side would read different keys
    assert not pairs(head_dim=128)
    assert not pairs(window=None)
    assert not pairs(window=LONGEST_WINDOW + 1)
    assert not pairs(full_heads=jnp.array([True, False, False, True]))
    assert not pairs(causal=False)
    assert not pairs(full_from=jnp.zeros(1, jnp.int32))
