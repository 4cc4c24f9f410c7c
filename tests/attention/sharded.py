"""Run by test_transforms in a process with two devices: the op under shard_map and with sharded operands.

Sharding the batch, the heads, or the queries with keys and values replicated gives the values and gradients of the
unsharded call.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import AttentionSpec, alibi_slopes, attention, routed_attention, xla

xla.block_size = lambda rows, window: 8  # several blocks
SPEC = AttentionSpec(window=4, num_sink_tokens=1)
MESH = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))

rng = np.random.default_rng(0)
q, k, v = (jnp.asarray(rng.normal(size=(2, 20, heads, 8)), jnp.float32) for heads in (4, 2, 2))
sinks = jnp.asarray(rng.normal(size=4), jnp.float32)
segments = jnp.asarray([[1] * 9 + [2] * 11, [1] * 15 + [2] * 5])
positions = jnp.tile(jnp.arange(20), (2, 1))
gate = jnp.asarray(rng.uniform(size=(2, 20)) < 0.3, jnp.float32)


def attend(q, k, v, sinks, **options):
    return jnp.sin(attention(q, k, v, SPEC, sink_logits=sinks, implementation="xla", **options)).mean()


def by_batch(q, k, v, sinks, segments, slopes):
    return attend(q, k, v, sinks, q_segment_ids=segments, alibi_slopes=slopes)


def by_heads(q, k, v, sinks, full_heads):
    return attend(q, k, v, sinks, full_heads=full_heads)


def by_queries(q, k, v, sinks, positions):
    return attend(q, k, v, sinks, q_positions=positions)


def routed(q, k, v, sinks, gate):
    out, disagreement = routed_attention(q, k, v, gate, SPEC, sink_logits=sinks, implementation="xla")
    return jnp.sin(out).mean() + disagreement.mean()


def check(function, in_specs, *options):
    def sharded(*args):
        return jax.lax.pmean(function(*args), "x")

    sharded = jax.shard_map(sharded, mesh=MESH, in_specs=in_specs, out_specs=P())
    gradients = [
        jax.jit(jax.grad(f, argnums=(0, 1, 2, 3)))(q, k, v, sinks, *options) for f in (sharded, function)
    ]
    for name, ours, expected in zip(("q", "k", "v", "sinks"), *gradients, strict=True):
        np.testing.assert_allclose(
            ours, expected, rtol=1e-5, atol=1e-6, err_msg=f"{function.__name__}: {name}"
        )


batch, heads = P("x"), P(None, None, "x")
check(by_batch, (batch, batch, batch, P(), batch, P()), segments, alibi_slopes(2, 2))
check(routed, (batch, batch, batch, P(), batch), gate)
check(by_heads, (heads, heads, heads, P("x"), P("x")), jnp.array([True, False]))
check(by_queries, (P(None, "x"), P(), P(), P(), P(None, "x")), positions)

# Without shard_map: batch-sharded operands stay where they are.
placed = [jax.device_put(x, NamedSharding(MESH, batch)) for x in (q, k, v)]
compiled = (
    jax.jit(jax.grad(lambda q, k, v: attend(q, k, v, sinks), argnums=(0, 1, 2))).lower(*placed).compile()
)
text = compiled.as_text()
assert "all-gather" not in text
assert "all-to-all" not in text
for ours, expected in zip(
    compiled(*placed), jax.grad(attend, argnums=(0, 1, 2))(q, k, v, sinks), strict=True
):
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)
