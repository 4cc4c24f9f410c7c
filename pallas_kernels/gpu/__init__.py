"""Attention on NVIDIA GPUs: what surrounds the kernels of `triton.py`.

Schedules as loop bounds, tile sizes, the custom gradient, the folding of a decoding step's queries into one
block. The work is that of the schedule (window, sink tokens, segments, full rows, gates), not of the length.
Off the GPU the kernels run in Pallas' interpret mode: right, and slow.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.blocks import table_rows
from pallas_kernels.gpu import decode_kernels
from pallas_kernels.gpu import triton as gpu_triton
from pallas_kernels.gpu.fold import Fold
from pallas_kernels.gpu.loop_bounds import loop_bounds
from pallas_kernels.gpu.operands import GpuStatic, Operands, Side, Tile
from pallas_kernels.math import parts
from pallas_kernels.math.schedule import fully_visible_by_row, visited_by_row
from pallas_kernels.math.spec import AttentionSpec, Coordinates, PerHead, Pools

_PROGRAMS_IN_FLIGHT = 264  # two for each of an H100's 132 multiprocessors; decode splits its keys to reach it


class TilesByKernel(NamedTuple):
    forward: Tile
    dq: Tile
    dkv: Tile
    decode: Tile  # its q_block is not read: a step's few queries are one block


def tile_sizes(head_dim: int, itemsize: int, capability: int) -> TilesByKernel:
    """Tile sizes: those of the rule, replaced where a row of the table (`blocks`) serves the kernel and the device.

    Of the rows for as large a head_dim or a larger one, the smallest counts.
    """
    tiles = _by_rule(head_dim, itemsize, capability)
    device = {"capability": capability, "itemsize": itemsize}
    rows = [row for row in table_rows("gpu") if row | device == row and row["head_dim"] >= head_dim]
    for kernel in TilesByKernel._fields:
        if mine := [row for row in rows if row["pass"] == kernel]:
            row = min(mine, key=lambda row: row["head_dim"])
            tiles = tiles._replace(**{kernel: Tile(*(row[name] for name in Tile._fields))})
    return tiles


def _by_rule(head_dim: int, itemsize: int, capability: int) -> TilesByKernel:
    """Tile sizes by the compiler's account of registers, spills and shared memory; no timing stands behind them.

    Hopper (9.0) and later have 227 KB of shared memory a multiprocessor, A100 (8.0) 163 KB, the others of
    generation 8 about 100 KB. A tile's operands are staged there `num_stages` times, its accumulators stay in
    registers. KV blocks of 64 keep the tiles at a window's two edges small.
    """
    if itemsize > 2:  # float32 in full precision has no tensor cores: small tiles, or registers spill
        block = 32 if head_dim <= 128 else 16
        return TilesByKernel(*[Tile(block, block, 4, 2)] * 4)
    if capability not in (80, 90, 100, 103):
        if head_dim > 128:
            return TilesByKernel(Tile(64, 32, 4, 2), *[Tile(32, 32, 4, 2)] * 3)
        return TilesByKernel(Tile(64, 32, 4, 2), Tile(64, 32, 4, 2), Tile(32, 64, 4, 2), Tile(16, 32, 4, 2))
    if capability == 80:
        if head_dim <= 64:
            return TilesByKernel(Tile(128, 64, 4, 3), Tile(64, 64, 4, 3), Tile(64, 64, 4, 3), Tile(16, 128, 4, 3))
        if head_dim <= 128:
            return TilesByKernel(Tile(128, 64, 8, 2), Tile(64, 64, 4, 2), Tile(32, 128, 8, 2), Tile(16, 64, 4, 3))
        return TilesByKernel(Tile(64, 32, 4, 2), Tile(64, 32, 8, 2), Tile(32, 64, 8, 2), Tile(16, 32, 4, 3))
    if head_dim <= 64:
        return TilesByKernel(Tile(128, 64, 4, 3), Tile(128, 64, 8, 3), Tile(64, 128, 8, 3), Tile(16, 128, 4, 3))
    if head_dim <= 128:
        return TilesByKernel(Tile(128, 64, 8, 3), Tile(128, 64, 8, 2), Tile(32, 128, 8, 3), Tile(16, 64, 4, 4))
    return TilesByKernel(Tile(64, 64, 8, 2), Tile(64, 64, 8, 2), Tile(32, 64, 8, 2), Tile(16, 64, 4, 2))


def attention(
    q: jax.Array,  # [B, T, H, D]
    k: jax.Array,  # [B, S, K, D]
    v: jax.Array,  # [B, S, K, D]
    spec: AttentionSpec,
    where: Coordinates,
    per_head: PerHead,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns out [B, T, H, D] in q's dtype and lse [B, T, H] float32 (None for sigmoid)."""
    static = GpuStatic(spec, not gpu_triton.on_gpu(), q.dtype.name)
    heads = _for_kernels(per_head)
    return _flash(static, _tiles(q, k), *parts.vary_alike((q, k, v, heads, where)))


def routed_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    gate: jax.Array,  # [B, T]
    spec: AttentionSpec,
    where: Coordinates,
    per_head: PerHead,
    *,
    inference: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Returns gate * O_full + (1 - gate) * O_window and the branch disagreement [B, T]; see `parts.route`."""
    heads = _for_kernels(per_head._replace(sink_logits=None))  # they join afterwards

    def part(q, where, outside):
        static = GpuStatic(spec, not gpu_triton.on_gpu(), outside=outside)
        return _flash(static, _tiles(q, k), *parts.vary_alike((q, k, v, heads, where)))

    return parts.route(part, q, gate, where, per_head.sink_logits, inference=inference)


def decode_attention(
    q: jax.Array, k_cache: jax.Array, v_cache: jax.Array, spec: AttentionSpec, where: Coordinates, per_head: PerHead
) -> jax.Array:
    """Attention of a few queries over a cache, [B, T, H, D] float32; not differentiable."""
    static = GpuStatic(spec, not gpu_triton.on_gpu())
    heads = _for_kernels(per_head._replace(sink_logits=None))  # they join afterwards
    tile = _tiles(q, k_cache).decode
    out, lse = _decode(static, tile, *parts.vary_alike((q, k_cache, v_cache, heads, where)))
    return parts.join_sinks(out, lse, per_head.sink_logits)[0]


def _for_kernels(per_head: PerHead) -> PerHead:
    """All floats in float32, `full_heads` in int32."""
    full = per_head.full_heads
    floats = jax.tree.map(lambda x: x.astype(jnp.float32), per_head._replace(full_heads=None))
    return floats._replace(full_heads=None if full is None else full.astype(jnp.int32))


def _tiles(q: jax.Array, k: jax.Array | jax.ShapeDtypeStruct) -> TilesByKernel:
    return tiles_of(q, k, gpu_triton.compute_capability() if gpu_triton.on_gpu() else None)


def tiles_of(
    q: jax.Array | jax.ShapeDtypeStruct, k: jax.Array | jax.ShapeDtypeStruct, capability: int | None
) -> TilesByKernel:
    """Those of a call on a device; of a Hopper if None. Shapes and dtype are read."""
    longest = [max(16, pl.next_power_of_2(x.shape[1])) for x in (q, k)]

    def fit(tile: Tile) -> Tile:
        return tile._replace(q_block=min(tile.q_block, longest[0]), kv_block=min(tile.kv_block, longest[1]))

    return TilesByKernel(*map(fit, tile_sizes(q.shape[3], q.dtype.itemsize, capability or 90)))


def decode_grid(batch: int, kv_heads: int, entries: int, tile: Tile) -> tuple[int, int, int]:
    """Programs that share the keys of a KV head when decoding, KV heads, and sequences."""
    blocks = -(-entries // tile.kv_block)
    return min(blocks, -(-_PROGRAMS_IN_FLIGHT // (batch * kv_heads))), kv_heads, batch


def each_head(
    spec: AttentionSpec,
    tile: Tile,
    q: jax.Array | jax.ShapeDtypeStruct,
    k: jax.Array | jax.ShapeDtypeStruct,
    *,
    outside: bool,
) -> bool:
    """Whether the programs for keys' gradients take a query head each; their results are then added up.

    All queries visit the block of the sink tokens, one program a KV head. Where there are few others, all wait for it:
    with 4 sink tokens, forward and backward of one row of 8192 tokens and 8 KV heads took 1.9 times as long on an
    H200. The rule compares its visits with the mean of those of a multiprocessor.
    """
    if outside or not spec.num_sink_tokens or spec.window is None or q.shape[2] == k.shape[2]:
        return False
    blocks_of_a_window = -(-spec.window // tile.kv_block)
    return k.shape[0] * k.shape[2] * blocks_of_a_window < _PROGRAMS_IN_FLIGHT


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _flash(static: GpuStatic, tiles: TilesByKernel, q, k, v, heads: PerHead, where: Coordinates):
    """The core: out [B, T, H, D] in `static.out_dtype` and lse [B, T, H] float32 (None for sigmoid)."""
    return _flash_fwd(static, tiles, q, k, v, heads, where)[0]


def _flash_fwd(static, tiles, q, k, v, heads, where):
    x = _operands(static, tiles.forward, q, k, v, heads, where)
    out, lse = gpu_triton.forward(static, tiles.forward, x)
    out, lse = parts.named(out, None if lse is None else lse[:, :, : q.shape[1]].swapaxes(1, 2))
    return (out, parts.natural_lse(lse)), (q, k, v, heads, where, out, lse)


def _flash_bwd(static, tiles, saved, cotangents):
    q, k, v, heads, where, out, lse = saved
    dout, dlse = cotangents
    # A block of rows whose cotangents are all zero (rows routed to the other branch, padding) changes
    # nothing.
    active = (dout != 0).any(axis=(2, 3))  # [B, T]
    dsinks = None
    delta = None
    if lse is not None:
        sees_any = lse != -jnp.inf  # true for NaN, which is not to be hidden
        delta = jnp.where(sees_any, (dout.astype(jnp.float32) * out.astype(jnp.float32)).sum(axis=-1) - dlse, 0)
        active |= (delta != 0).any(axis=2)
        # Weights of a row whose cotangents are not finite are NaN; masked tiles take the cotangents as zero.
        lse = jnp.where(sees_any, jnp.where(jnp.isfinite(delta), lse, jnp.nan), 0)
        if heads.sink_logits is not None:
            dsinks = -jnp.where(sees_any, jnp.exp2(heads.sink_logits * parts.LOG2E - lse) * delta, 0).sum(axis=(0, 1))
    gradients = _Gradients(active, dout.astype(q.dtype), lse, delta)

    x = _operands(static, tiles.dq, q, k, v, heads, where, gradients)
    dq, dbias = gpu_triton.dq(static, tiles.dq, x)
    x = _operands(static, tiles.dkv, q, k, v, heads, where, gradients, by_key=True)
    each = each_head(static.spec, tiles.dkv, q, k, outside=static.outside)
    dk, dv = gpu_triton.dkv(static, tiles.dkv, x, each)
    if each:
        dk, dv = (x.reshape(*k.shape[:3], -1, x.shape[3]).sum(axis=3).astype(k.dtype) for x in (dk, dv))
    return dq, dk, dv, PerHead(None, None if dbias is None else dbias.sum(axis=(0, 2)), dsinks, None), None


_flash.defvjp(_flash_fwd, _flash_bwd)


def decode_pools(
    q: jax.Array,  # [B, T, H, D]
    caches: tuple[tuple[Pools, AttentionSpec], ...],
    per_head: PerHead,
    *,
    lengths: jax.Array,  # [B] int32, with the T new tokens
    full_from: jax.Array | None = None,  # [B] int32
) -> jax.Array:
    """Attention of a few queries over the pools of a cache in one launch, [B, T, H, D] float32; not differentiable."""
    pools, specs = zip(*caches, strict=True)
    static = GpuStatic(specs[0], not gpu_triton.on_gpu(), q.dtype.name)
    heads = _for_kernels(per_head._replace(sink_logits=None))  # they join afterwards
    fold = Fold(q.shape[1], q.shape[2], pools[0].slots.shape[0])
    keys = jax.ShapeDtypeStruct((1, max(y.k.shape[2] for y in pools), 1, 1), q.dtype)
    tile = _tiles(q, keys).decode._replace(q_block=fold.rows)
    x = decode_kernels.PoolOperands(fold.queries(q), pools, fold.per_head(heads), lengths, full_from)
    shares, *_ = decode_grid(q.shape[0], fold.kv_heads, keys.shape[1], tile)
    x = parts.vary_alike(x)
    out, lse = decode_kernels.pool_decode(specs, static, tile, fold.tokens, fold.group, x, shares)
    return parts.join_sinks(*fold.merged(out, lse), per_head.sink_logits)[0]


def _decode(static: GpuStatic, tile: Tile, q, k, v, heads: PerHead, where: Coordinates):
    """Out [B, T, H, D] float32 and lse [B, T, H] (None for sigmoid); a KV head's queries are one block of rows."""
    fold = Fold(q.shape[1], q.shape[2], k.shape[2])
    tile = tile._replace(q_block=fold.rows)
    queries = {name: getattr(where, name) for name in ("q_pos", "q_order", "full_rows")}
    where = where._replace(**jax.tree.map(lambda x: jnp.repeat(x, fold.group, axis=1), queries))
    x = _operands(static, tile, fold.queries(q), k, v, fold.per_head(heads), where)
    shares, *_ = decode_grid(q.shape[0], fold.kv_heads, k.shape[1], tile)
    return fold.merged(*decode_kernels.decode(static, tile, x, shares))


class _Gradients(NamedTuple):
    """What a backward pass reads beside."""

    active: jax.Array | None = None  # [B, T] bool: rows with a cotangent
    dout: jax.Array | None = None  # [B, T, H, D]
    lse: jax.Array | None = None  # [B, T, H], as is delta (softmax)
    delta: jax.Array | None = None


_NO_GRADIENTS = _Gradients()


def _operands(
    static: GpuStatic,
    tile: Tile,
    q,
    k,
    v,
    heads: PerHead,
    where: Coordinates,
    gradients: _Gradients = _NO_GRADIENTS,
    by_key: bool = False,
) -> Operands:
    where = _blocked(where, tile)
    full = None if where.full_rows is None else where.full_rows.astype(jnp.int32)

    def by_head(x):  # [B, T, H] -> [B, H, T of whole blocks]
        return None if x is None else jnp.pad(x.swapaxes(1, 2), ((0, 0), (0, 0), (0, -x.shape[1] % tile.q_block)))

    return Operands(
        q,
        k,
        v,
        Side(where.q_pos, where.q_segment_ids, full),
        Side(where.kv_pos, where.kv_segment_ids),
        heads,
        _bounds(static, tile, where, heads.full_heads is not None, gradients.active, by_key),
        gradients.dout,
        by_head(gradients.lse),
        by_head(gradients.delta),
    )


def _blocked(where: Coordinates, tile: Tile) -> Coordinates:
    """Gives every array the same number of rows, and pads it to whole blocks with tokens that nothing sees."""
    rows = max(x.shape[0] for x in jax.tree.leaves(where))

    def pad(x, block, fill):
        x = jnp.broadcast_to(x, (rows, x.shape[1]))
        return jnp.pad(x, ((0, 0), (0, -x.shape[1] % block)), constant_values=fill)

    return parts.in_blocks(where, tile.q_block, tile.kv_block, pad)


def _bounds(static: GpuStatic, tile: Tile, where: Coordinates, some_full: bool, active, by_key: bool) -> jax.Array:
    """[rows, variants, blocks, 10] int32: bounds for heads that are not full and (if some are) for those that are."""
    variants = [where]
    if some_full:
        variants.append(where._replace(full_rows=jnp.ones_like(where.q_pos, bool)))
    blocks, outside = (tile.q_block, tile.kv_block), static.outside
    pairs = [
        [by_row(static.spec, one, *blocks, outside=outside) for by_row in (visited_by_row, fully_visible_by_row)]
        for one in variants
    ]
    table, whole = (jnp.stack(kind, axis=1) for kind in zip(*pairs, strict=True))  # [rows, variants, nq, nk]
    if active is not None:
        active = jnp.pad(active, ((0, 0), (0, -active.shape[1] % tile.q_block)))
        table = table & active.reshape(active.shape[0], 1, -1, 1, tile.q_block).any(axis=-1)
    if by_key:
        table, whole = table.swapaxes(2, 3), whole.swapaxes(2, 3)
    return loop_bounds(table, whole)
