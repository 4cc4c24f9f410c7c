"""A table of embeddings on a mesh, compiled for TPUs that are not here."""

import math
import re

import jax
import jax.numpy as jnp
import pytest

from swa_jax.model.lookup import rows_of
from swa_jax.model.sharding import MeshConfig, Partition, make_mesh

pytest.importorskip("libtpu")
from swa_jax.plan.plan import topology_devices


@pytest.mark.slow
def test_a_gathered_table_is_copied_once_each_way():
    """Tokens are rows of it, and a device has columns: one turns into the other, but nothing is copied besides."""
    width = 768  # 48 channels of a device
    partition = Partition(make_mesh(MeshConfig(fsdp=16), topology_devices("v5e:4x4", 1)))

    def lies(shape, dtype, *dimensions):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=partition.sharding(*dimensions))

    table = lies((4096, width), jnp.bfloat16, "vocab", "embed")
    tokens = lies((16, 512), jnp.int32, "batch", "sequence")
    cotangent = lies((16, 512, width), jnp.bfloat16, "batch", "sequence", None)

    def both_ways(table, tokens, cotangent):
        found, back = jax.vjp(lambda table: rows_of(table, tokens, partition), table)
        return found, back(cotangent)[0]

    places = cotangent.sharding, table.sharding
    with jax.sharding.use_abstract_mesh(partition.mesh.abstract_mesh):
        program = jax.jit(both_ways, out_shardings=places).lower(table, tokens, cotangent).compile().as_text()
    shapes = [map(int, shape.split(",")) for shape in re.findall(r"= bf16\[([\d,]+)\]\S* copy\(", program)]
    assert sum(math.prod(shape) == 4096 * width for shape in shapes) <= 2
