"""Run by test_sharding in a process with eight devices: `python -m tests.generation_on_mesh NAME...`.

Prompts of unequal lengths over a mesh get what one device gives them: whole prompts in one batch, and in chunks over
few slots, with prefixes remembered. The kernels of a TPU, interpreted, give the same.
"""

import dataclasses
import sys

import jax
import numpy as np
from flax import nnx

from pallas_kernels import dispatch
from swa_jax.model.decoder import Decoder
from swa_jax.model.engine import Engine
from swa_jax.model.generate import generate
from swa_jax.model.sharding import MeshConfig, Partition, make_mesh, state_shardings

from .tiny_models import LAYERS, PATTERNS, make

MESHES = {
    "tensor 2": MeshConfig(1, 1, 1, 2),
    "data 2, tensor 4": MeshConfig(2, 1, 1, 4),
    "fsdp 4, tensor 2": MeshConfig(1, 4, 1, 2),
}
NEW = 8


def on_mesh(sizes: MeshConfig, model: Decoder) -> tuple[Decoder, Partition]:
    partition = Partition(make_mesh(sizes, jax.devices()[: sizes.data * sizes.fsdp * sizes.tensor]))
    graph, weights = nnx.split(model)
    there = jax.device_put(weights, state_shardings(weights, partition, model.config))
    return nnx.merge(graph, there), partition


def check(name: str) -> None:
    config, pattern = PATTERNS[name]
    # Four KV heads of two query heads each; head hybrids have more full heads in one half than in the other.
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 64, "hidden_size": 32}
    if config.uses_alibi:
        sizes |= {"alibi_negative_heads": 4, "alibi_positive_heads": 4}
    config = dataclasses.replace(config, **sizes, intermediate_size=48)
    model = Decoder(config, make("S" * LAYERS), rngs=nnx.Rngs(0)).with_pattern(pattern)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 64, length).tolist() for length in (3, 19, 40, 7, 22)]
    prompts.append(prompts[1] + [5, 6])
    expected = generate(model, prompts, max_new_tokens=NEW, max_length=64)
    assert len({tuple(reply) for reply in expected}) > 3
    for mesh, sizes in MESHES.items():
        there, partition = on_mesh(sizes, model)
        count = partition.mesh.size
        found = generate(there, prompts, max_new_tokens=NEW, max_length=64, partition=partition)
        assert found == expected, (name, mesh, "one batch")
        engine = Engine(there, slots=4, max_length=64, chunk=9, prefixes=2, steps=4, partition=partition)
        replies: list[list[int]] = [[] for _ in prompts]
        for piece in engine.stream(prompts, max_new_tokens=NEW):
            replies[piece.prompt] += piece.tokens
        assert replies == expected, (name, mesh, "slots")
        # Each device has its share of the caches.
        leaves = jax.tree.leaves(engine._cache.pools)
        shares = [leaf.addressable_shards[0].data.nbytes for leaf in leaves]
        assert sum(shares) * count == sum(leaf.nbytes for leaf in leaves), (name, mesh)
    there, partition = on_mesh(MeshConfig(2, 1, 1, 2), model)
    jax.clear_caches()  # the programs of before
    dispatch._BEST["cpu"] = ("tpu",)
    try:
        found = generate(there, prompts, max_new_tokens=NEW, max_length=64, partition=partition)
    finally:
        del dispatch._BEST["cpu"]
    assert found == expected, (name, "the kernels of a TPU")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        check(name)
