"""What is not finite reaches the queries that see it, and changes no bit of the others."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import AttentionSpec, attention, decode_attention, routed_attention

from .suite import IMPLEMENTATIONS, PACKED, Call, Implementation, quick_jit

KEY = 22
SEGMENTS = tuple(map(tuple, PACKED))
CALLS = {
    "window": Call(AttentionSpec(11)),
    "packed": Call(AttentionSpec(11), segments=SEGMENTS),
    "sink-tokens": Call(AttentionSpec(7, num_sink_tokens=3)),
    "sigmoid": Call(AttentionSpec(11, activation="sigmoid"), ("alibi_slopes",)),
    "full": Call(AttentionSpec()),
    "full-heads": Call(AttentionSpec(11), ("full_heads",)),
    "packed-sink-tokens-full-rows": Call(AttentionSpec(7, num_sink_tokens=3), ("full_from",), segments=SEGMENTS),
    "full-sigmoid": Call(AttentionSpec(activation="sigmoid"), segments=SEGMENTS),
}
UNSEEN = {
    "packed": CALLS["packed"],
    "packed-sink-tokens-full-rows": CALLS["packed-sink-tokens-full-rows"],
    "full-sigmoid": CALLS["full-sigmoid"],
    "chunk": Call(AttentionSpec(5), ("chunk",), q_length=30),
    "ring": Call(AttentionSpec(7, num_sink_tokens=2), ("chunk", "ring"), q_length=10),
}
CHANGES = [("k", np.nan), ("v", np.nan), ("v", np.inf), ("qkv", np.nan)]
QUICK = {"window", "sigmoid", "full", "packed-sink-tokens-full-rows", "ring"}  # one for each kernel


def quick_first(names):
    return [pytest.param(x, marks=[] if x in QUICK else [pytest.mark.long]) for x in names]


every_backend = pytest.mark.parametrize(
    "implementation", [Implementation("reference"), *IMPLEMENTATIONS], ids=str, indirect=True
)


def mask_of(call: Call) -> np.ndarray:
    """[B, T, S], what any head sees."""
    _, fixed = call.draw()
    names = ("q_segment_ids", "q_positions", "kv_positions", "full_from")
    spec = AttentionSpec() if "full_heads" in call.options else call.spec
    mask = spec.mask(call.q_length, call.kv_length, **{x: fixed[x] for x in names if x in fixed})
    return np.broadcast_to(mask, (call.batch, call.q_length, call.kv_length))


def with_pullback(function):
    """(arrays, rows [B, T]) -> results and gradients; cotangents are 1 in the rows, 0 in others."""

    @quick_jit
    def both(arrays, rows):
        results, pullback = jax.vjp(lambda *x: jax.tree.leaves(function(*x)), *arrays)
        weight = [jnp.broadcast_to(rows.reshape(*rows.shape, *[1] * (x.ndim - 2)), x.shape) for x in results]
        finite = [jnp.where(jnp.isfinite(x), w, 0) for x, w in zip(results, weight, strict=True)]
        return results, pullback(finite)

    return both


@functools.cache
def program(call: Call, name: str):
    """The call as a function of q, k, v and rows; both of the first tests run it."""
    _, fixed = call.draw()
    return_lse = call.spec.activation == "softmax"
    options = dict(return_lse=return_lse, implementation=name, **fixed)
    return with_pullback(lambda *qkv: attention(*qkv, call.spec, **options))


def changed(call: Call, names: str, value: float, where) -> list[np.ndarray]:
    """q, k and v, those of the names being `value` at the tokens of `where`, an index of [B, T]."""
    arrays, _ = call.draw()
    for name in names:
        arrays[name][where] = value
    return [arrays[x] for x in "qkv"]


@every_backend
@pytest.mark.parametrize("name", quick_first(CALLS))
def test_only_the_queries_that_see_it(implementation, name):
    call = CALLS[name]
    mask, both = mask_of(call), program(call, implementation.name)
    for names, value in CHANGES:
        nonfinite = mask[:, :, KEY].copy()  # [B, T]
        if "q" in names:
            nonfinite[:, KEY] = True
        assert nonfinite.any()
        assert not nonfinite.all()
        rows = np.float32(~nonfinite)
        # A query that is NaN has no weights to speak of, not even for a cotangent of 0.
        clean_keys = ~(mask & nonfinite[:, :, None]).any(axis=1)  # [B, S]
        clean, clean_gradients = both(changed(call, "", 0.0, ()), rows)
        results, gradients = both(changed(call, names, value, (slice(None), KEY)), rows)
        if "full_heads" not in call.options:
            assert not np.isfinite(results[0])[nonfinite].all(axis=-1).any()
            if "k" in names and len(results) == 2:
                assert np.isnan(results[1])[nonfinite].all()
        for actual, expected in zip((*results, gradients[0]), (*clean, clean_gradients[0]), strict=True):
            np.testing.assert_array_equal(actual[~nonfinite], expected[~nonfinite], err_msg=f"{names} {value}")
        for actual, expected in zip(gradients[1:], clean_gradients[1:], strict=True):
            np.testing.assert_array_equal(actual[clean_keys], expected[clean_keys], err_msg=f"keys {names} {value}")


@every_backend
@pytest.mark.parametrize("name", quick_first(UNSEEN))
def test_what_nobody_sees_changes_nothing(implementation, name):
    call = UNSEEN[name]
    mask, both = mask_of(call), program(call, implementation.name)
    unseen = ~mask.any(axis=1)  # [B, S]
    assert unseen.any()
    rows = np.ones((call.batch, call.q_length), np.float32)
    clean = both(changed(call, "", 0.0, ()), rows)
    for value in (np.nan, np.inf):
        for actual, expected in zip(
            jax.tree.leaves(both(changed(call, "kv", value, unseen), rows)), jax.tree.leaves(clean), strict=True
        ):
            np.testing.assert_array_equal(actual, expected)
    for gradient in clean[1][1:]:
        assert (np.asarray(gradient)[unseen] == 0).all()


@every_backend
@pytest.mark.parametrize(
    ("activation", "packed"),
    [
        ("softmax", False),
        pytest.param("sigmoid", False, marks=pytest.mark.long),
        pytest.param("softmax", True, marks=pytest.mark.long),
        pytest.param("sigmoid", True, marks=pytest.mark.slow),
    ],
)
def test_routed_attention(implementation, activation, packed):
    call = Call(AttentionSpec(11, activation=activation), segments=SEGMENTS if packed else None)
    _, fixed = call.draw()
    gate = np.float32(np.arange(50) // 3 % 2 * np.ones((2, 50)))

    @with_pullback
    def both(q, k, v):
        return routed_attention(q, k, v, gate, call.spec, **fixed, implementation=implementation.name)

    nonfinite = mask_of(Call(AttentionSpec(), segments=call.segments))[:, :, KEY]
    rows = np.float32(~nonfinite)
    clean, clean_gradients = both(changed(call, "", 0.0, ()), rows)
    for names, value in (("k", np.nan), ("v", np.nan), ("v", np.inf)):
        results, gradients = both(changed(call, names, value, (slice(None), KEY)), rows)
        assert not np.isfinite(results[0])[nonfinite].all(axis=-1).any()
        for actual, expected in zip((*results, gradients[0]), (*clean, clean_gradients[0]), strict=True):
            np.testing.assert_array_equal(actual[~nonfinite], expected[~nonfinite], err_msg=f"{names} {value}")


@every_backend
@pytest.mark.parametrize(
    ("activation", "head_dim", "window"),
    [
        ("softmax", 16, 9),
        ("sigmoid", 128, None),
        pytest.param("softmax", 128, None, marks=pytest.mark.slow),
        pytest.param("sigmoid", 16, 9, marks=pytest.mark.slow),
    ],
)
def test_decoding(implementation, activation, head_dim, window):
    """Entries that no query sees, other KV heads and other sequences; caches are of two blocks and a part."""
    spec = AttentionSpec(window, num_sink_tokens=0 if window is None else 2, activation=activation)
    call = Call(spec, head_dim=head_dim, q_length=2)
    learned, _ = call.draw()
    lengths = np.array([37, 20])
    mask = np.asarray(spec.mask(50, 50))[0][[[35, 36], [18, 19]]]  # [B, 2, S]

    @quick_jit
    def decode(k, v):
        return decode_attention(learned["q"], k, v, spec, lengths=lengths, implementation=implementation.name)

    clean = np.asarray(decode(learned["k"], learned["v"]))
    for value in (np.nan, np.inf):
        nonfinite = changed(call, "kv", value, ~mask.any(axis=1))
        np.testing.assert_array_equal(decode(*nonfinite[1:]), clean)
    for names, value in (("k", np.nan), ("v", np.nan), ("v", np.inf)):
        _, k, v = changed(call, names, value, (0, 36, 1))
        out = np.asarray(decode(k, v))
        sees = np.zeros(clean.shape[:3], bool)
        sees[0, 1, 2:4] = True  # the last query, two heads a KV head
        assert not np.isfinite(out[sees]).any()
        np.testing.assert_array_equal(out[~sees], clean[~sees])
