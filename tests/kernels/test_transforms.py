"""The op under JAX's transformations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from python_process import EIGHT_DEVICES, python

from pallas_kernels import AttentionSpec, attention, decode_attention, routed_attention

from .suite import Call, every_implementation, quick_jit
from .tolerances import assert_close

CALL = Call(AttentionSpec(window=11, num_sink_tokens=2), q_length=40, kv_length=40, heads=4, kv_heads=2)


def drawn():
    learned, _ = CALL.draw()
    return learned["q"], learned["k"], learned["v"]


def loss(q, k, v, implementation, **options):
    return jnp.sin(attention(q, k, v, CALL.spec, implementation=implementation, **options)).sum()


@functools.cache
def expected_gradients():
    return quick_jit(jax.grad(loss, argnums=(0, 1, 2)), static_argnums=3)(*drawn(), "reference")


@every_implementation
def test_eager_equals_jit(implementation):
    run = functools.partial(attention, spec=CALL.spec, implementation=implementation.name)
    assert_close(run(*drawn()), jax.jit(run)(*drawn()), "float32")


@every_implementation
def test_remat(implementation):
    function = jax.checkpoint(functools.partial(loss, implementation=implementation.name))
    gradients = jax.jit(jax.grad(function, argnums=(0, 1, 2)))(*drawn())
    assert_close(gradients, expected_gradients(), "float32", gradient=True)


@pytest.mark.slow
@every_implementation
@pytest.mark.parametrize("packed", [pytest.param(False, marks=pytest.mark.long), True])
def test_vmap_over_the_batch(implementation, packed):
    """Mapping over rows, each a batch of one, equals one call; with segment ids each row has its own schedule."""
    segments = jnp.asarray([[1] * 25 + [2] * 15, [1] * 9 + [2] * 20 + [0] * 11])

    def by_row(function):
        return lambda *row: function(*(x[None] for x in row))

    def total(name, mapped):
        def one(q, k, v, ids):
            return loss(q, k, v, name, **({"q_segment_ids": ids} if packed else {}))

        return lambda q, k, v: jax.vmap(by_row(one))(q, k, v, segments).sum() if mapped else one(q, k, v, segments)

    gradients = jax.jit(jax.grad(total(implementation.name, True), argnums=(0, 1, 2)))(*drawn())
    expected = jax.jit(jax.grad(total("reference", False), argnums=(0, 1, 2)))(*drawn())
    assert_close(gradients, expected, "float32", gradient=True)


@pytest.mark.slow
@every_implementation
def test_scan_over_layers_with_other_full_heads_each(implementation):
    q, k, v = drawn()
    full_heads = jnp.array([[True, False], [False, False], [True, True]])

    def deep(q, k, v, name):
        def layer(x, full):
            return x + attention(x, k, v, CALL.spec, full_heads=full, implementation=name), None

        return jnp.sin(jax.lax.scan(layer, q, full_heads)[0]).sum()

    gradients, expected = (
        jax.jit(jax.grad(functools.partial(deep, name=name), argnums=(0, 1, 2)))(q, k, v)
        for name in (implementation.name, "reference")
    )
    assert_close(gradients, expected, "float32", gradient=True)


@every_implementation
def test_forward_mode_says_what_is_wrong(implementation):
    q, k, v = drawn()
    with pytest.raises(TypeError, match=r"forward-mode .* custom_vjp"):
        jax.jvp(lambda q: loss(q, k, v, implementation.name), (q,), (q,))


@every_implementation
def test_no_gradient_flows_to_alibi_slopes(implementation):
    q, k, v = drawn()
    for name in (implementation.name, "reference"):
        gradient = jax.jit(jax.grad(lambda slopes, name=name: loss(q, k, v, name, alibi_slopes=slopes)))(jnp.ones(4))
        np.testing.assert_array_equal(gradient, 0)


@pytest.mark.slow
@every_implementation
def test_the_spec_is_a_static_argument_and_everything_else_may_be_traced(implementation):
    @functools.partial(jax.jit, static_argnums=0)
    def run(spec, q, k, v, gate, options):
        name = implementation.name
        return (
            attention(q, k, v, spec, **options, implementation=name),
            routed_attention(q, k, v, gate, spec, **options, implementation=name),
            decode_attention(
                q[:, :1], k, v, spec, lengths=jnp.array([9, 3]), full_from=options["full_from"], implementation=name
            ),
        )

    options = {
        "full_from": jnp.array([3, 50]),
        "full_heads": jnp.array([True, False]),
        "q_segment_ids": jnp.ones((2, 40), jnp.int32),
        "alibi_slopes": jnp.zeros(4),
        "sink_logits": jnp.zeros(4),
    }
    outputs = run(CALL.spec, *drawn(), jnp.ones((2, 40)), options)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(outputs))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("xla", marks=pytest.mark.long),
        pytest.param("tpu", marks=pytest.mark.slow),
        pytest.param("triton", marks=pytest.mark.long),
    ],
)
def test_shard_map(name):
    python("-W", "error", "-m", "tests.kernels.sharded", name, **EIGHT_DEVICES)


@pytest.mark.long
@pytest.mark.parametrize("name", ["tpu", "xla", "triton"])
def test_decoding_in_shard_map(name):
    python("-W", "error", "-m", "tests.kernels.sharded_decode", name, **EIGHT_DEVICES)


@pytest.mark.parametrize("implementation", ["tpu", "triton"])
def test_decoding_by_kernels_has_no_gradient_and_says_so(implementation):
    q, k, v = drawn()
    decode = functools.partial(decode_attention, spec=CALL.spec, lengths=jnp.full(len(q), 9))
    with pytest.raises(NotImplementedError, match="decode_attention has no gradient where a kernel computes it; call"):
        jax.eval_shape(jax.grad(lambda k: decode(q[:, :1], k, v, implementation=implementation).sum()), k)


def test_keys_of_devices_that_jit_closes_over():
    """A mesh of `jax.make_mesh` has explicit axes, unless told otherwise."""
    with jax.set_mesh(jax.make_mesh((1,), ("x",))):
        q, k, v = (jax.device_put(x, jax.P("x")) for x in drawn())
        jax.eval_shape(jax.grad(lambda q: attention(q, k, v, CALL.spec, implementation="xla").sum()), q)
        decode = functools.partial(decode_attention, spec=CALL.spec, lengths=jnp.full(len(q), 3), implementation="xla")
        jax.eval_shape(lambda q: decode(q[:, :1], k, v), q)
