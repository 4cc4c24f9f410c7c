"""Run by test_transforms in a process with eight devices: `python -m tests.kernels.sharded IMPLEMENTATION`.

Sharding the batch, the heads, both, or the queries with keys and values replicated gives the values and gradients of
the unsharded call.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import AttentionSpec, alibi_slopes, attention, routed_attention

from .suite import Implementation

IMPLEMENTATION = sys.argv[1]
small_blocks = pytest.MonkeyPatch()
Implementation(IMPLEMENTATION, block=8 if IMPLEMENTATION == "xla" else 16).install(small_blocks)
SPEC = AttentionSpec(window=4, num_sink_tokens=1)
MESH = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

rng = np.random.default_rng(0)
q, k, v = (jnp.asarray(rng.normal(size=(2, 20, heads, 8)), jnp.float32) for heads in (8, 4, 4))
sinks = jnp.asarray(rng.normal(size=8), jnp.float32)
slopes = alibi_slopes(4, 4)
segments = jnp.asarray([[1] * 9 + [2] * 11, [1] * 15 + [2] * 5])
positions = jnp.tile(jnp.arange(20), (2, 1))
gate = jnp.asarray(rng.uniform(size=(2, 20)) < 0.3, jnp.float32)


def attend(q, k, v, sinks, spec=SPEC, **options):
    return jnp.sin(attention(q, k, v, spec, sink_logits=sinks, implementation=IMPLEMENTATION, **options)).mean()


def window_alone(q, k, v, sinks):
    return attend(q, k, v, sinks, AttentionSpec(window=4))


def by_batch(q, k, v, sinks, segments, slopes):
    return attend(q, k, v, sinks, q_segment_ids=segments, alibi_slopes=slopes)


def by_heads(q, k, v, sinks, full_heads):
    return attend(q, k, v, sinks, full_heads=full_heads)


def by_queries(q, k, v, sinks, positions):
    return attend(q, k, v, sinks, q_positions=positions)


def routed(q, k, v, sinks, gate):
    out, disagreement = routed_attention(q, k, v, gate, SPEC, sink_logits=sinks, implementation=IMPLEMENTATION)
    return jnp.sin(out).mean() + disagreement.mean()


def check(function, in_specs, *options):
    axes = tuple({axis for spec in in_specs for axis in spec if axis is not None})

    def sharded(*args):
        return jax.lax.pmean(function(*args), axes)

    # Interpreted, the kernels' loops mix their own counters with the operands.
    sharded = jax.shard_map(sharded, mesh=MESH, in_specs=in_specs, out_specs=P(), check_vma=IMPLEMENTATION == "xla")
    results = [
        jax.jit(jax.value_and_grad(f, argnums=(0, 1, 2, 3)), compiler_options={"xla_backend_optimization_level": 0})(
            q, k, v, sinks, *options
        )
        for f in (sharded, function)
    ]
    (value, gradients), (expected_value, expected_gradients) = results
    np.testing.assert_allclose(value, expected_value, rtol=1e-5, err_msg=function.__name__)
    for name, ours, expected in zip(("q", "k", "v", "sinks"), gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6, err_msg=f"{function.__name__}: {name}")


batch, heads = P("data"), P(None, None, "model")
both = P("data", None, "model")
check(by_batch, (batch, batch, batch, P(), batch, P()), segments, slopes)
check(window_alone, (both, both, both, P("model")))
check(by_heads, (heads, heads, heads, P("model"), P("model")), jnp.array([True, False, False, True]))
check(by_heads, (both, both, both, P("model"), P("model")), jnp.array([True, False, False, True]))
check(by_queries, (P(None, "data"), P(), P(), P(), P(None, "data")), positions)
check(routed, (both, both, both, P("model"), batch), gate)

# Without shard_map: batch-sharded operands stay where they are, if all sequences are worked on at once, as everywhere
# but on a CPU with a large batch. (A kernel needs shard_map, which XLA does not.)
if IMPLEMENTATION == "xla":
    small_blocks.undo()
    placed = [jax.device_put(x, NamedSharding(MESH, batch)) for x in (q, k, v)]
    compiled = jax.jit(jax.grad(lambda q, k, v: attend(q, k, v, sinks), argnums=(0, 1, 2))).lower(*placed).compile()
    text = compiled.as_text()
    assert "all-gather" not in text
    assert "all-to-all" not in text
    for ours, expected in zip(compiled(*placed), jax.grad(attend, argnums=(0, 1, 2))(q, k, v, sinks), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)
