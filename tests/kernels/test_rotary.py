"""Queries that come unrotated: every implementation gives what the oracle gives of rotated ones, gradients too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import AttentionSpec, attention, routed_attention
from pallas_kernels.math.rotary import Rotation, rotate
from pallas_kernels.math.spec import Packing, PerHead, segment_positions

from .suite import IMPLEMENTATIONS, Implementation, quick_jit
from .tolerances import assert_both_close, assert_close

TPU = Implementation("tpu", block=16)
LENGTH, HEADS, KV_HEADS = 50, 4, 2
PACKED = jnp.asarray([[1] * 20 + [2] * 17 + [3] * 10 + [0] * 3, [0] * 5 + [1] * 30 + [2] * 15])


def rotation(positions, head_dim: int, rotated: int, interleaved: bool, factor: float = 1.0) -> Rotation:
    """Drawn angles of the first `rotated` channels; written with loops over pairs, as the papers have it."""
    rng = np.random.default_rng(head_dim + rotated)
    cos, sin = np.ones((*positions.shape, head_dim)), np.zeros((*positions.shape, head_dim))
    distance = 1 if interleaved else rotated // 2
    for pair in range(rotated // 2):
        first = 2 * pair if interleaved else pair
        angle = np.asarray(positions) * rng.uniform(0.01, 2)
        for channel, sign in ((first, -1), (first + distance, 1)):
            cos[..., channel], sin[..., channel] = factor * np.cos(angle), factor * sign * np.sin(angle)
    return Rotation(jnp.asarray(cos, jnp.float32), jnp.asarray(sin, jnp.float32), distance)


def rotated_by_complex_numbers(x, rotating: Rotation, rotated: int, interleaved: bool):
    x = np.asarray(x, np.float64)
    first = np.arange(0, rotated, 2) if interleaved else np.arange(rotated // 2)
    second = first + rotating.distance
    cos, sin = (np.asarray(table, np.float64)[:, :, None] for table in (rotating.cos, rotating.sin))
    z = (x[..., first] + 1j * x[..., second]) * (cos[..., second] + 1j * sin[..., second])
    out = x.copy()
    out[..., first], out[..., second] = z.real, z.imag
    return out


@pytest.mark.parametrize(("rotated", "interleaved"), [(128, False), (128, True), (48, False), (6, True)])
def test_pairs_rotate_as_complex_numbers_do(rotated, interleaved):
    rotating = rotation(np.arange(9)[None], 128, rotated, interleaved)
    x = np.random.default_rng(0).normal(size=(2, 9, 3, 128)).astype(np.float32)
    expected = rotated_by_complex_numbers(x, rotating, rotated, interleaved)
    assert_close(rotate(jnp.asarray(x), rotating), expected.astype(np.float32), "float32")
    abreast = jnp.asarray(x.reshape(2, 9, 1, 384))  # heads side by side
    assert_close(rotate(abreast, rotating).reshape(x.shape), expected.astype(np.float32), "float32")


def drawn(head_dim: int, dtype: str = "float32") -> list[jax.Array]:
    rng = np.random.default_rng(3)
    shapes = [(2, LENGTH, heads, head_dim) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def outcome(implementation, spec, per_head, packing, rotating, routed, arrays):
    """The result, and the gradients of a drawn combination of it."""
    q, k, v, weights = arrays
    gate = jnp.asarray(np.random.default_rng(1).random((2, LENGTH)) < 0.3, jnp.float32)

    def function(q, k, v):
        # Rotated by hand for the oracle.
        query, given = (rotate(q, rotating), None) if implementation == "reference" else (q, rotating)
        options = {"per_head": per_head, "packing": packing, "rotation": given, "implementation": implementation}
        if routed:
            return routed_attention(query, k, v, gate, spec, **options)
        return attention(query, k, v, spec, **options), jnp.zeros(())

    def loss(*qkv):
        out, disagreement = function(*qkv)
        return (out.astype(jnp.float32) * weights.astype(jnp.float32)).sum() + disagreement.sum(), out

    gradients, out = quick_jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(q, k, v)
    return out, gradients


CASES = {
    "window": (AttentionSpec(11), {}, {}),
    "full": (AttentionSpec(), {}, {}),
    "packed-sinks": (AttentionSpec(9, 3), {}, {"q_segment_ids": PACKED}),
    "packed-full": (AttentionSpec(), {}, {"q_segment_ids": PACKED}),
    "full-heads": (AttentionSpec(11), {"full_heads": jnp.array([True, False])}, {}),
    "full-from": (AttentionSpec(7), {}, {"q_segment_ids": PACKED, "full_from": jnp.full((2, 3), 8)}),
    "softcap": (AttentionSpec(11, logit_softcap=3.0), {}, {}),
    "sigmoid": (AttentionSpec(11, activation="sigmoid"), {"sigmoid_bias": jnp.full(HEADS, -2.0)}, {}),
    "routed": (AttentionSpec(11), {}, {"q_segment_ids": PACKED}),
    "routed-sigmoid": (AttentionSpec(11, activation="sigmoid"), {}, {}),
}
ROTATIONS = {"halves": (128, 128, False), "interleaved": (128, 128, True), "part": (128, 48, False)}


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *[
            pytest.param(name, "halves", marks=[] if name in ("packed-full", "routed") else pytest.mark.slow)
            for name in CASES
        ],
        ("window", "part"),
        pytest.param("packed-sinks", "interleaved", marks=pytest.mark.slow),
    ],
)
def test_kernels_rotate_queries_and_rotate_gradients_back(name, how, monkeypatch):
    TPU.install(monkeypatch)
    spec, per_head, packing = CASES[name]
    head_dim, rotated, interleaved = ROTATIONS[how]
    ids = packing.get("q_segment_ids")
    positions = np.arange(LENGTH)[None] if ids is None else np.asarray(segment_positions(ids))
    rotating = rotation(positions, head_dim, rotated, interleaved, factor=1.1)
    options = spec, PerHead(**per_head), Packing(**packing), rotating, name.startswith("routed")
    found, expected = (outcome(name, *options, drawn(head_dim)) for name in ("tpu", "reference"))
    assert_both_close(found, expected, "float32")


@pytest.mark.parametrize(
    "implementation", [i for i in IMPLEMENTATIONS if i.name != "tpu"] + [TPU], ids=str, indirect=False
)
def test_heads_that_fill_no_register_are_rotated_before(implementation, monkeypatch):
    implementation.install(monkeypatch)
    rotating = rotation(np.arange(LENGTH)[None], 16, 16, False)
    options = AttentionSpec(11), PerHead(), Packing(), rotating, False
    found, expected = (outcome(name, *options, drawn(16)) for name in (implementation.name, "reference"))
    assert_both_close(found, expected, "float32")


def test_rotating_in_the_kernel_rounds_less(monkeypatch):
    """Queries are rounded to bfloat16 once there, after RoPE and the scale; rotated before, they are rounded twice."""
    TPU.install(monkeypatch)
    rotating, arrays = rotation(np.arange(LENGTH)[None], 128, 128, False), drawn(128, "bfloat16")
    still = Rotation(np.ones_like(rotating.cos), np.zeros_like(rotating.sin), rotating.distance)

    @quick_jit
    def errors(q, k, v):
        def attend(*qkv, **options):
            return attention(*qkv, AttentionSpec(11), **options).astype(jnp.float32)

        wide = [x.astype(jnp.float32) for x in (q, k, v)]
        exact = attend(rotate(wide[0], rotating), *wide[1:], implementation="reference")
        found = attend(q, k, v, rotation=rotating, implementation="tpu")
        before = attend(rotate(q, rotating), k, v, rotation=still, implementation="tpu")
        return [jnp.square(out - exact).mean() for out in (found, before)]

    in_kernel, before = errors(*arrays[:3])
    assert in_kernel < before
