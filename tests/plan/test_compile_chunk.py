"""A chunk of a prompt, compiled for TPUs that are not here: its kernels, and caches that stay where they are."""

import math

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from swa_jax.bench.compile_for_chip import kernel_name, pallas_calls
from swa_jax.model.cache import POOL, allocate, cache_layouts
from swa_jax.model.config import ModelConfig
from swa_jax.model.decoder import Decoder
from swa_jax.model.layer_types import FULL, HYBRID, SWITCH, WINDOW
from swa_jax.model.pattern import AttentionPattern
from swa_jax.model.sharding import MeshConfig, Partition, make_mesh, state_shardings

pytest.importorskip("libtpu")
from swa_jax.plan.plan import topology_devices

CONFIG = ModelConfig(
    vocab_size=4096,
    hidden_size=512,
    intermediate_size=1024,
    num_hidden_layers=4,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    qk_norm=True,
)
PATTERNS = {
    "hybrid": AttentionPattern((WINDOW, FULL) * 2, 1024),
    "every kind": AttentionPattern(
        (FULL, WINDOW, HYBRID, SWITCH), 1024, num_sink_tokens=4, full_kv_heads=((), (), (1, 5), ())
    ),
    "full-attention decode": AttentionPattern((WINDOW, FULL) * 2, 1024, full_attention_decode=True),
}


@pytest.mark.parametrize(
    ("pattern", "topology", "tensor"),
    [
        pytest.param("every kind", "v5e:2x4", 8, marks=pytest.mark.slow),
        pytest.param("hybrid", "v5e:2x4", 1, marks=pytest.mark.long),
        pytest.param("full-attention decode", "v6e:2x2", 4, marks=pytest.mark.long),
    ],
)
def test_a_chunk_in_place(pattern, topology, tensor):
    pattern, length = PATTERNS[pattern], 16384
    mesh = make_mesh(MeshConfig(1, 1, 1, tensor), topology_devices(topology, 1)[:tensor])
    partition = Partition(mesh)
    layouts = cache_layouts(CONFIG, pattern, length, tensor)
    model = nnx.eval_shape(lambda: Decoder(CONFIG, pattern, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    graph, weights = nnx.split(model)
    cache = jax.eval_shape(lambda: allocate(CONFIG, layouts, 4, jnp.bfloat16))

    def lies(x, sharding):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    weights = jax.tree.map(lies, weights, state_shardings(weights, partition, CONFIG))
    pool, by_row = partition.sharding(*POOL), partition.sharding("batch")
    cache = jax.tree.map(lambda x: lies(x, pool if x.ndim == len(POOL) else by_row), cache)
    numbers = [lies(jax.ShapeDtypeStruct(shape, jnp.int32), partition.replicated) for shape in ((512,), (), ())]

    def extend(weights, cache, tokens, count, row):
        return nnx.merge(graph, weights).extend(tokens, count, row, cache, layouts, partition=partition)

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        traced = jax.jit(extend, donate_argnums=1).trace(weights, cache, *numbers)
        compiled = traced.lower().compile()
    kernels = {kernel_name(call) for call in pallas_calls(traced.jaxpr.jaxpr)}
    assert kernels == {"scheduled_forward"}
    memory = compiled.memory_analysis()
    held = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache)) // tensor
    assert memory.alias_size_in_bytes >= held  # the caches are changed where they lie
    assert memory.temp_size_in_bytes < 32 * 2**20
