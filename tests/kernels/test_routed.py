"""Routed attention: both branches, the gate's gradient and the disagreement, against two separate attentions."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import AttentionSpec, attention, routed_attention
from pallas_kernels.math.parts import members

from .suite import PACKED, Call, Implementation, assert_matches_routed, every_implementation, gates
from .tolerances import assert_both_close, assert_close

PLAIN = Call(AttentionSpec(window=11))
PACKED_ROWS = tuple(map(tuple, PACKED))
CALLS = {
    "plain": PLAIN,
    "bidirectional": Call(AttentionSpec(window=5, causal=False)),
    "everything": Call(
        AttentionSpec(window=7, num_sink_tokens=2, logit_softcap=3.0),
        ("sink_logits", "alibi_slopes", "full_heads", "full_from"),
        PACKED_ROWS,
    ),
    "sigmoid-everything": Call(
        AttentionSpec(window=7, num_sink_tokens=2, activation="sigmoid"),
        ("sigmoid_bias", "alibi_slopes", "full_heads"),
        PACKED_ROWS,
    ),
    "full-heads": Call(AttentionSpec(window=11), ("full_heads",)),
    "chunked": Call(AttentionSpec(window=7, num_sink_tokens=2, chunked=True), (), PACKED_ROWS),
    "bfloat16": dataclasses.replace(PLAIN, dtype="bfloat16"),
}


@every_implementation
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name.endswith(("everything", "chunked")) else pytest.mark.long)
        for name in CALLS
    ],
)
def test_routed(implementation, name):
    assert_matches_routed(CALLS[name], implementation, gates("soft"), gates("some"))


def test_packed_rows_go_on_outside_from_what_the_window_has_given(monkeypatch):
    """With sink tokens, the kernels of the two branches are two, and the second begins with the first one's sums."""
    Implementation("tpu", block=16).install(monkeypatch)
    call = Call(AttentionSpec(window=7, num_sink_tokens=2), (), PACKED_ROWS)
    learned, fixed = call.draw()

    @functools.partial(jax.jit, static_argnums=0)
    def run(name):
        return routed_attention(**learned, gate=gates("soft"), spec=call.spec, **fixed, implementation=name)

    assert_close(run("tpu"), run("reference"), "float32")


@every_implementation
def test_gradients_with_full_heads_can_be_traced(implementation):
    """Quick, beside `test_routed`: the launches for full heads have a spec of their own."""
    call = CALLS["full-heads"]
    learned, fixed = call.draw()

    def loss(learned, gate):
        return routed_attention(**learned, gate=gate, spec=call.spec, **fixed, implementation=implementation.name)

    def gradients(learned, gate):
        out, pullback = jax.vjp(loss, learned, gate)
        return pullback(out)

    shapes = jax.eval_shape(gradients, learned, gates("soft"))[0]
    assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, learned)


@every_implementation
def test_hard_gates_equal_two_separate_attentions(implementation):
    """One compiled function for every gate: what is skipped is decided at run time."""
    learned, _ = PLAIN.draw()
    spec, name = PLAIN.spec, implementation.name

    @jax.jit
    def gradients(gate):
        def routed(q, k, v, gate):
            return routed_attention(q, k, v, gate, spec, implementation=name)[0]

        def separate(q, k, v, gate):
            full = attention(q, k, v, AttentionSpec(), implementation="reference")
            window = attention(q, k, v, spec, implementation="reference")
            return gate[:, :, None, None] * full + (1 - gate[:, :, None, None]) * window

        def both(function):
            out, pullback = jax.vjp(function, learned["q"], learned["k"], learned["v"], gate)
            return out, pullback(jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape))

        return both(routed), both(separate)

    for kind in ("none", "all", "some", "runs"):
        assert_both_close(*gradients(gates(kind)), "float32")


@pytest.mark.slow
@every_implementation
@pytest.mark.parametrize(
    "name", ["everything", *(pytest.param(x, marks=pytest.mark.long) for x in ("plain", "sigmoid-everything"))]
)
def test_inference_leaves_out_the_full_branch_of_other_rows(implementation, name):
    call, drawn = CALLS[name], [gates(kind) for kind in ("some", "none", "runs")]
    learned, fixed = call.draw()

    def routed(implementation):
        options = learned | fixed | {"inference": True, "implementation": implementation}
        run = jax.jit(lambda gate: routed_attention(gate=gate, spec=call.spec, **options))
        return [run(gate) for gate in drawn]

    training = call.run_routed("reference", *drawn)
    cases = zip(drawn, routed(implementation.name), routed("reference"), training, strict=True)
    for gate, (out, disagreement), expected, ((trained, _), _) in cases:
        assert_close((out, disagreement), expected, call.dtype)
        assert (np.asarray(disagreement)[np.asarray(gate) == 0] == 0).all()
        assert_close(out, trained, call.dtype)


def test_inference_cannot_be_differentiated():
    learned, _ = PLAIN.draw()

    def loss(q):
        gate = gates("some")
        return routed_attention(q, learned["k"], learned["v"], gate, PLAIN.spec, inference=True)[0].sum()

    with pytest.raises(NotImplementedError, match="inference=True cannot be differentiated"):
        jax.grad(loss)(learned["q"])


@pytest.mark.slow
@every_implementation
def test_rows_routed_to_the_window_send_nothing_outside(implementation):
    """With every gate 0 the keys beyond all windows of the queries that have a loss get exactly no gradient."""
    learned, _ = PLAIN.draw()

    def loss(k):
        out, _ = routed_attention(
            learned["q"], k, learned["v"], gates("none"), PLAIN.spec, implementation=implementation.name
        )
        return out[:, 40:].sum()

    gradient = jax.jit(jax.grad(loss))(learned["k"])
    np.testing.assert_array_equal(gradient[:, :30], 0)
    assert (gradient[:, 30:] != 0).any(axis=(0, 2, 3)).all()


def test_rows_are_put_together_wherever_they_end(monkeypatch):
    """What is gathered ends inside a block of rows or with one; rows of a batch have numbers of their own."""
    tpu = Implementation("tpu", block=16).install(monkeypatch)
    length, whole = 80, 16
    call = dataclasses.replace(PLAIN, q_length=length, kv_length=length)
    counts = (whole - 3, whole, whole + 1)
    drawn = np.zeros((len(counts) + 1, 2, length), np.float32)
    for gate, count in zip(drawn, counts, strict=False):
        gate[:, length - 2 * count :: 2], gate[1, -2] = 1.0, 0.5
    drawn[-1, 0] = 1.0  # all, and none
    assert_matches_routed(call, tpu, *drawn)


def test_members_are_found_in_order():
    rng = np.random.default_rng(0)
    for length in (80, 128, 300):
        member = rng.uniform(size=(3, length)) < [[0.3], [1], [0]]
        for count in (length, length // 4):
            found = np.asarray(members(jnp.asarray(member), count))
            assert found.shape == (3, count)
            assert found.min() >= 0
            assert found.max() < length
            for row, expected in zip(found, map(np.flatnonzero, member), strict=True):
                np.testing.assert_array_equal(row[: len(expected)], expected[:count])
