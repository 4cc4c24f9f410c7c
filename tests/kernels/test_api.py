"""What the op refuses, in which words, and the ALiBi slopes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import AttentionSpec, alibi_slopes, attention, decode_attention, routed_attention
from pallas_kernels.math.spec import Packing, PerHead

Q, K = jnp.zeros((2, 12, 6, 8)), jnp.zeros((2, 12, 3, 8))
WINDOW = AttentionSpec(window=4)
SIGMOID = AttentionSpec(activation="sigmoid")
IDS = jnp.ones((2, 12), jnp.int32)


def call(**changes):
    arguments = {"q": Q, "k": K, "v": K, "spec": WINDOW} | changes
    return attention(**arguments)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"q": Q[0]}, r"q has shape \(12, 6, 8\); it must have four axes \[B, T, H, D\]"),
        ({"k": K[..., 0]}, r"k has shape .*; it must have four axes \[B, S, K, D\]"),
        ({"q": Q.astype(int)}, "q is int32; it must be floating-point"),
        ({x: K.astype(jnp.float8_e4m3fn) for x in "qkv"}, "q is float8_e4m3fn; it must be floating-point, of 16 bits"),
        ({"v": K.astype(jnp.bfloat16)}, "v is bfloat16 but q is float32; q, k and v must share one dtype"),
        ({"v": K[:, :5]}, r"v has shape \(2, 5, 3, 8\) but k has \(2, 12, 3, 8\)"),
        ({"q": Q[:1]}, r"k has 2 on axis 0 \(batch\) but q has 1"),
        ({"q": Q[..., :4]}, r"k has 8 on axis 3 \(head_dim\) but q has 4"),
        ({"q": Q[:, :, :4]}, r"q has 4 heads and k has 3 KV heads .* must be a multiple"),
        ({"q": Q[:, :0]}, "every axis must be at least 1 long"),
        ({"alibi_slopes": jnp.ones(3)}, r"alibi_slopes has shape \(3,\); it must be \[H\] = \(6,\)"),
        ({"alibi_slopes": jnp.ones(6, int)}, "alibi_slopes is int32; it must be floating-point"),
        ({"sink_logits": jnp.ones((6, 1))}, r"sink_logits has shape \(6, 1\); it must be \[H\] = \(6,\)"),
        ({"sink_logits": jnp.ones(6), "spec": SIGMOID}, "sink_logits is given but activation is 'sigmoid'"),
        ({"sigmoid_bias": 1.0}, "sigmoid_bias is given but activation is 'softmax'"),
        ({"sigmoid_bias": jnp.ones(3), "spec": SIGMOID}, r"sigmoid_bias has shape \(3,\); it must be a scalar"),
        ({"return_lse": True, "spec": SIGMOID}, "return_lse is True with activation 'sigmoid'"),
        ({"full_heads": jnp.ones(6, bool)}, r"full_heads has shape \(6,\); it must be \[K\] = \(3,\)"),
        ({"full_heads": jnp.ones(3)}, "full_heads is float32; it must be bool"),
        ({"full_heads": jnp.ones(3, bool), "spec": SIGMOID}, "full_heads is given but spec.window is None"),
        ({"full_from": jnp.array([1, 2]), "spec": AttentionSpec()}, "full_from is given but spec.window is None"),
        ({"q": [[1.0]]}, r"q is a list; it must be an array \[B, T, H, D\]"),
        ({"spec": 4}, r"spec is 4; it must be an AttentionSpec, such as"),
        ({"full_from": jnp.array([1])}, r"full_from has shape \(1,\); it must be \[B\] or \[B, segments\] with B = 2"),
        ({"full_from": jnp.array([1.0, 2.0])}, "full_from is float32; it must be integers"),
        ({"full_from": jnp.ones((2, 3), int)}, "full_from has 3 columns but no q_segment_ids"),
        (
            {"full_from": jnp.array([1, 2]), "q_segment_ids": IDS.at[1, 6:].set(2)},
            r"q_segment_ids run from 1 to 2 but full_from has 1 column\(s\).*\[B, segments\]",
        ),
        ({"q_segment_ids": IDS[:, :5]}, r"q_segment_ids has shape \(2, 5\); it must be \[B, T\] = \(2, 12\)"),
        ({"q_segment_ids": IDS * 1.0}, "q_segment_ids is float32; it must be integers"),
        ({"kv_segment_ids": IDS}, "kv_segment_ids is given without q_segment_ids"),
        ({"q": Q[:, :5], "q_segment_ids": IDS[:, :5]}, "without kv_segment_ids, but there are 5 queries and 12 keys"),
        ({"q_positions": IDS[:1]}, r"q_positions has shape \(1, 12\); it must be \[B, T\] = \(2, 12\)"),
        ({"kv_positions": IDS[:, :3]}, r"kv_positions has shape \(2, 3\); it must be \[B, S\] = \(2, 12\)"),
        ({"implementation": "cuda"}, "'cuda'; it must be one of 'tpu', 'triton', 'cudnn', 'xla', 'reference', or None"),
    ],
)
def test_attention_refuses(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        call(**changes)
    arrays = {name: value for name, value in changes.items() if isinstance(value, jax.Array)}
    if "run from" not in sentence:  # shapes are as good under jit; only values cannot be looked at
        with pytest.raises(ValueError, match=sentence):
            jax.eval_shape(lambda arrays: call(**(changes | arrays)), arrays)


def test_routed_attention_refuses():
    gate = jnp.ones((2, 12))
    with pytest.raises(ValueError, match="window is None, but routed_attention needs a window"):
        routed_attention(Q, K, K, gate, AttentionSpec())
    with pytest.raises(ValueError, match=r"gate has shape \(2, 5\); it must be \[B, T\] = \(2, 12\)"):
        routed_attention(Q, K, K, gate[:, :5], WINDOW)
    with pytest.raises(ValueError, match="gate is None; it must be"):
        routed_attention(Q, K, K, None, WINDOW)
    with pytest.raises(ValueError, match="gate is bool; it must be floating-point"):
        routed_attention(Q, K, K, gate > 0, WINDOW)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"q": Q}, "q has 12 tokens .*at most 8; use attention with q_positions"),
        ({"lengths": 3}, r"lengths has shape \(\); it must be \[B\] = \(2,\)"),
        ({"lengths": None}, r"lengths is None; it must be \[B\] = \(2,\)"),
        ({"starts": jnp.zeros(2)}, "starts is float32; it must be integers"),
        ({"kv_positions": IDS[:, 1:]}, r"kv_positions has shape \(2, 11\); it must be \[B, S\] = \(2, 12\)"),
        ({"full_from": jnp.zeros((2, 1), int)}, r"full_from has shape \(2, 1\); it must be \[B\]"),
        ({"full_from": IDS[:, 0], "spec": AttentionSpec()}, "full_from is given but spec.window is None"),
        ({"spec": AttentionSpec(causal=False)}, "spec.causal is False, but decode_attention is causal"),
        ({"v_cache": K[:, 1:]}, "v_cache has shape .* but k_cache has"),
    ],
)
def test_decode_attention_refuses(changes, sentence):
    arguments = {"q": Q[:, :1], "k_cache": K, "v_cache": K, "spec": WINDOW, "lengths": jnp.array([3, 4])}
    with pytest.raises(ValueError, match=sentence):
        decode_attention(**(arguments | changes))


def test_an_unknown_keyword_is_refused_with_the_nearest_one():
    with pytest.raises(TypeError, match=r"sink_logit is no keyword of this function; did you mean sink_logits\?"):
        call(sink_logit=jnp.ones(6))
    with pytest.raises(TypeError, match="q_segment_ids is no keyword of this function"):
        decode_attention(Q[:, :1], K, K, WINDOW, lengths=jnp.array([3, 4]), q_segment_ids=IDS[:, :1])
    with pytest.raises(TypeError, match=r"q_segment_id is no keyword .*; did you mean q_segment_ids\?"):
        WINDOW.mask(12, q_segment_id=IDS)


@pytest.mark.parametrize("implementation", ["tpu", "triton"])
def test_arrays_that_devices_share_are_refused_outside_of_shard_map(implementation):
    """A mesh of `jax.make_mesh` has explicit axes, unless told otherwise."""
    with jax.set_mesh(jax.make_mesh((1,), ("x",))):
        q, k = (jax.device_put(x, jax.P("x")) for x in (Q, K))
        run = functools.partial(call, implementation=implementation)
        with pytest.raises(ValueError, match=r"q is split over devices as P.*'x'.*; call attention inside"):
            jax.eval_shape(lambda q, k: run(q=q, k=k, v=k), q, k)
        specs = {"in_specs": jax.P("x"), "out_specs": jax.P("x"), "check_vma": False}
        jax.eval_shape(jax.shard_map(lambda q, k: run(q=q, k=k, v=k), **specs), q, k)


def test_options_come_as_values_or_as_keywords():
    slopes, ids = jnp.linspace(-1, 1, 6), jnp.asarray([[1] * 5 + [2] * 7, [1] * 12])

    def traced(**options):
        return str(jax.make_jaxpr(lambda q, k: attention(q, k, k, WINDOW, **options))(Q, K))

    by_keyword = traced(alibi_slopes=slopes, q_segment_ids=ids)
    assert traced(per_head=PerHead(slopes), packing=Packing(ids)) == by_keyword
    assert traced(per_head=PerHead(slopes), packing=Packing(IDS), q_segment_ids=ids) == by_keyword
    assert traced(per_head=PerHead(slopes)) != by_keyword


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_a_traced_segment_without_a_full_from_column_is_nan(implementation):
    """Ids cannot be looked at under jit: such rows must not come out plausible."""
    ids = jnp.array([[1] * 6 + [2] * 6, [1] * 8 + [0] * 4])
    gate = jnp.ones((2, 12))
    run = jax.jit(functools.partial(call, implementation=implementation))
    route = jax.jit(functools.partial(routed_attention, implementation=implementation), static_argnames="spec")
    for out in (
        run(q_segment_ids=ids, full_from=jnp.array([3, 3])),
        route(Q, K, K, gate, spec=WINDOW, q_segment_ids=ids, full_from=jnp.array([3, 3]))[0],
    ):
        np.testing.assert_array_equal(np.isnan(out).all(axis=(2, 3)), np.asarray(ids) > 1)
        np.testing.assert_array_equal(np.isnan(out).any(axis=(2, 3)), np.asarray(ids) > 1)


def test_alibi_slopes():
    np.testing.assert_allclose(alibi_slopes(3, 2), [-1 / 2, -1 / 4, -1 / 8, 1 / 2, 1 / 4])
    np.testing.assert_allclose(alibi_slopes(4, 0, "press"), [-1 / 4, -1 / 16, -1 / 64, -1 / 256])
    np.testing.assert_allclose(alibi_slopes(2, 4, "press"), [-1 / 16, -1 / 256, 1 / 4, 1 / 16, 1 / 64, 1 / 256])
    np.testing.assert_allclose(alibi_slopes(2, 2, "reference"), [-1 / 4, -1 / 16, 1 / 4, 1 / 16])
    np.testing.assert_allclose(alibi_slopes(0, 8, "reference"), 2.0 ** -np.arange(1, 9))
    assert alibi_slopes(8, 4).dtype == jnp.float32


def test_alibi_slopes_refuses():
    with pytest.raises(ValueError, match="schedule is 'Swat'; it must be 'swat', 'press' or 'reference'"):
        alibi_slopes(1, 1, "Swat")
    for counts in ((0, 0), (-1, 2)):
        with pytest.raises(ValueError, match=r"num_negative is .* and num_positive is .* both must be >= 0"):
            alibi_slopes(*counts)
