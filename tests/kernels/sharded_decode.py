"""Run by test_transforms in a process with eight devices: `python -m tests.kernels.sharded_decode IMPLEMENTATION`.

Decoding with sequences and KV heads shared out over a mesh gives what the unsharded call gives: `decode_attention`, and
for "tpu" the kernels that write into the model's pools and read them where they are.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from pallas_kernels import AttentionSpec, alibi_slopes, decode_attention
from pallas_kernels.math.spec import PerHead, coordinates
from pallas_kernels.tpu.decode.cache_write import write_pool
from pallas_kernels.tpu.decode.decode import decode_pool

from .suite import Implementation
from .tolerances import assert_close

IMPLEMENTATION = sys.argv[1]
Implementation(IMPLEMENTATION, block=16).install(pytest.MonkeyPatch())
SPEC = AttentionSpec(window=9, num_sink_tokens=2)
MESH = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
LAYERS, BATCH, TOKENS, ENTRIES, HEADS, KV_HEADS, HEAD_DIM = 3, 4, 2, 40, 16, 8, 16

rng = np.random.default_rng(0)
q = jnp.asarray(rng.normal(size=(BATCH, TOKENS, HEADS, HEAD_DIM)), jnp.float32)
lengths = jnp.array([40, 17, 2, 25])
by_head = {
    "alibi_slopes": alibi_slopes(8, 8),
    "sink_logits": jnp.asarray(rng.normal(size=HEADS), jnp.float32),
    "full_heads": jnp.arange(KV_HEADS) % 3 == 0,
}
batch, heads = P("data"), P("model")
both = P("data", None, "model")  # of [B, T, heads, D]


def shard(function, in_specs, out_specs):
    # Interpreted, the kernels' loops mix their own counters with the operands.
    return jax.jit(
        jax.shard_map(function, mesh=MESH, in_specs=in_specs, out_specs=out_specs, check_vma=IMPLEMENTATION == "xla"),
        compiler_options={"xla_backend_optimization_level": 0},
    )


def public_call():
    k, v = (jnp.asarray(rng.normal(size=(BATCH, ENTRIES, KV_HEADS, HEAD_DIM)), jnp.float32) for _ in range(2))
    starts = jnp.array([3, 0, 0, 20])

    def decode(q, k, v, lengths, starts, by_head, name=IMPLEMENTATION):
        return decode_attention(q, k, v, SPEC, lengths=lengths, starts=starts, **by_head, implementation=name)

    arguments = q, k, v, lengths, starts, by_head
    for tokens_by, caches_by, rows_by, by in (
        (batch, batch, batch, P()),
        (P(None, None, "model"), P(None, None, "model"), P(), heads),
        (both, both, batch, heads),
    ):
        run = shard(decode, (tokens_by, caches_by, caches_by, rows_by, rows_by, by), tokens_by)
        assert_close(run(*arguments), decode(*arguments, "reference"), "float32")


def pools(scattered: bool):
    """A step of a model: every layer's new entry is written, and one layer attends to all of them.

    Pools [layers, KV heads, B, entries, head_dim] are rows of layers and KV heads on each device. `scattered`: the
    rows are in another order, and one KV head of each device is not there.
    """
    here = KV_HEADS // MESH.shape["model"]
    k_pool, v_pool = (
        jnp.asarray(rng.normal(size=(LAYERS, KV_HEADS, BATCH, ENTRIES, HEAD_DIM)), jnp.float32) for _ in range(2)
    )
    new = jnp.asarray(rng.normal(size=(BATCH, KV_HEADS, HEAD_DIM)), jnp.float32)
    layer, absent = 1, LAYERS * here
    slots = np.arange(KV_HEADS) % here + layer * here  # of each device's rows
    if scattered:
        slots = np.where(np.arange(KV_HEADS) % here == 0, layer * here + 1, absent)

    def step(q, k_pool, v_pool, new, slots, lengths, by_head):
        rows = [write_pool(pool.reshape(-1, *pool.shape[2:]), slots, new, lengths - 1) for pool in (k_pool, v_pool)]
        where = coordinates(TOKENS, ENTRIES, q_positions=lengths[:, None] - TOKENS + jnp.arange(TOKENS))
        out = decode_pool(q, *rows, slots, SPEC, where, PerHead(**by_head), scattered=scattered)
        return out, *(x.reshape(k_pool.shape) for x in rows)

    pool_by = P(None, "model", "data")
    run = shard(step, (both, pool_by, pool_by, P("data", "model"), heads, batch, heads), (both, pool_by, pool_by))
    out, *written = run(q, k_pool, v_pool, new, jnp.asarray(slots, jnp.int32), lengths, by_head)

    present = slots < absent
    row = np.arange(KV_HEADS) // here * here + np.where(present, slots % here, 0)  # of the layer
    expected = []
    for pool, actual in zip((k_pool, v_pool), written, strict=True):
        changed = np.array(pool)
        for head in np.flatnonzero(present):
            changed[layer, row[head], np.arange(BATCH), lengths - 1] = new[:, head]
        np.testing.assert_array_equal(actual, changed)
        expected.append(jnp.asarray(changed[layer, row]).transpose(1, 2, 0, 3))
    expected = decode_attention(q, *expected, SPEC, lengths=lengths, **by_head, implementation="reference")
    assert_close(out, jnp.where(present.repeat(HEADS // KV_HEADS)[:, None], expected, 0), "float32")


public_call()
if IMPLEMENTATION == "tpu":
    for scattered in (False, True):
        pools(scattered)
