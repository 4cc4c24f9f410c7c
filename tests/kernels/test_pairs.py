"""Heads of 64 in pairs (tpu/tile/pairs.py): the same attention, whichever heads share a register's lanes."""

import dataclasses

import jax.numpy as jnp
import pytest

from pallas_kernels import AttentionSpec
from pallas_kernels.math.spec import PerHead
from pallas_kernels.tpu.tile.pairs import LONGEST_WINDOW, in_pairs

from .suite import LEFT_PADDED, PACKED, Call, Implementation, assert_matches_reference

SIGMOID = ("alibi_slopes", "sigmoid_bias")
CALLS = {
    "window": Call(AttentionSpec(11)),
    "packed-sinks": Call(AttentionSpec(9, 3), ("sink_logits",), tuple(map(tuple, PACKED))),
    "sigmoid": Call(AttentionSpec(11, activation="sigmoid"), SIGMOID, tuple(map(tuple, LEFT_PADDED))),
    "full-from": Call(AttentionSpec(7), ("full_from",), tuple(map(tuple, PACKED))),
    "softcap": Call(AttentionSpec(11, logit_softcap=3.0), ("logit_scales",)),
    "bidirectional": Call(AttentionSpec(11, causal=False)),
}


@pytest.mark.parametrize(
    ("name", "heads"),
    [
        pytest.param(name, heads, marks=[] if (name, heads) == ("packed-sinks", (8, 4)) else pytest.mark.slow)
        for name in CALLS
        for heads in ((4, 4), (8, 4))
    ],
    ids=str,
)
def test_pairs_match_the_reference(name, heads, monkeypatch):
    call = dataclasses.replace(CALLS[name], head_dim=64, heads=heads[0], kv_heads=heads[1])
    learned, _ = call.draw()
    assert in_pairs(learned["q"], learned["k"], call.spec, PerHead())
    assert_matches_reference(call, Implementation("tpu", block=16).install(monkeypatch))


def test_which_calls_are_taken_in_pairs():
    def pairs(heads=4, kv_heads=4, head_dim=64, window=1024, full_heads=None):
        q, k = (jnp.zeros((1, 8, n, head_dim)) for n in (heads, kv_heads))
        return in_pairs(q, k, AttentionSpec(window), PerHead(full_heads=full_heads))

    assert pairs()
    assert pairs(heads=8, kv_heads=2)
    assert pairs(window=LONGEST_WINDOW)
    assert not pairs(heads=3, kv_heads=3)  # one head would be left
    assert not pairs(heads=6, kv_heads=2)  # two query heads side by side would read different keys
    assert not pairs(head_dim=128)
    assert not pairs(window=None)
    assert not pairs(window=LONGEST_WINDOW + 1)
    assert not pairs(full_heads=jnp.array([True, False, False, True]))
