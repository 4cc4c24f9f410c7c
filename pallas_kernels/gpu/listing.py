"""What a GPU is to launch for a call, told without running it."""

import jax
import jax.numpy as jnp

from pallas_kernels import gpu
from pallas_kernels.gpu.operands import key_grid, query_grid
from pallas_kernels.math.schedule import Kind
from pallas_kernels.request import LaunchFacts, Request

_MASKS = (Kind.FULL, Kind.BY_TOKEN)


def list_launches(request: Request) -> tuple[LaunchFacts, ...]:
    """The launches of the forward pass, then those of the backward pass."""
    dtype = jnp.dtype(request.dtype)
    q, k = (
        jax.ShapeDtypeStruct((request.batch, length, heads, request.head_dim), dtype)
        for length, heads in ((request.q_length, request.heads), (request.kv_length, request.kv_heads))
    )
    tiles = gpu.tiles_of(q, k, request.device.capability)
    if request.op == "decode_attention":
        grid = gpu.decode_grid(request.batch, request.kv_heads, request.kv_length, tiles.decode)
        name = "pool_decode_kernel" if "pools" in request.given else "decode_kernel"
        return (LaunchFacts(name, grid, tiles.decode, _MASKS),)
    found = []
    every = ("visible",) if request.op == "attention" else ("visible", "outside")
    for keys in every:
        grid = query_grid(tiles.forward, q)
        found.append(LaunchFacts("forward_kernel", grid, tiles.forward, _MASKS, keys))
    for keys in () if request.inference else every:
        found.append(LaunchFacts("dq_kernel", query_grid(tiles.dq, q), tiles.dq, _MASKS, keys, True))
        each = gpu.each_head(request.spec, tiles.dkv, q, k, outside=keys == "outside")
        grid = key_grid(tiles.dkv, k, request.heads if each else request.kv_heads)
        found.append(LaunchFacts("dkv_kernel", grid, tiles.dkv, _MASKS, keys, True))
    return tuple(found)
