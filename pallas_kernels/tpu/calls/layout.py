"""How the TPU kernels want arrays: heads first, and lengths of whole blocks. Padding is at position -1, and unseen."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.blocks import Tiles
from pallas_kernels.math.spec import Coordinates, PerHead
from pallas_kernels.tpu.tile.tiles import TpuOperands


def head_major(x: jax.Array, block: int) -> jax.Array:
    """[B, T, H, D] -> [B, H, T, D] with T extended to whole blocks."""
    return pad(x.transpose(0, 2, 1, 3), block, 2, 0)


def token_major(x: jax.Array, length: int) -> jax.Array:
    """[B, H, T, D] -> [B, T, H, D], cut to its length."""
    return x[:, :, :length].transpose(0, 2, 1, 3)


def pad_coordinates(where: Coordinates, tiles: Tiles) -> Coordinates:
    return pad_keys(pad_queries(where, tiles), tiles)


def pad_queries(where: Coordinates, tiles: Tiles) -> Coordinates:
    return where._replace(
        q_pos=pad(where.q_pos, tiles.q_block, 1, -1),
        q_order=pad(where.q_order, tiles.q_block, 1, -1),
        q_segment_ids=pad(where.q_segment_ids, tiles.q_block, 1, 0),
        full_rows=pad(where.full_rows, tiles.q_block, 1, False),
        q_cos=pad(where.q_cos, tiles.q_block, 1, 0),
        q_sin=pad(where.q_sin, tiles.q_block, 1, 0),
    )


def pad_keys(where: Coordinates, tiles: Tiles) -> Coordinates:
    return where._replace(
        kv_pos=pad(where.kv_pos, tiles.kv_block, 1, -1),
        kv_order=pad(where.kv_order, tiles.kv_block, 1, -1),
        kv_segment_ids=pad(where.kv_segment_ids, tiles.kv_block, 1, 0),
    )


def with_keys(x: TpuOperands, keys: tuple[jax.Array, jax.Array], where: Coordinates) -> TpuOperands:
    """The same queries with other keys and values, and where all of these are."""
    return x._replace(k=keys[0], v=keys[1], where=where)


def stack_head_bias(heads: int, per_head: PerHead) -> jax.Array:
    """[2, H] f32: slopes and biases, zeros for what is not given."""
    alibi_slopes, sigmoid_bias = per_head.alibi_slopes, per_head.sigmoid_bias
    zeros = jnp.zeros(heads, jnp.float32)
    slopes = zeros if alibi_slopes is None else jax.lax.stop_gradient(alibi_slopes).astype(jnp.float32)
    return jnp.stack([slopes, zeros if sigmoid_bias is None else sigmoid_bias.astype(jnp.float32)])


def pack_statistics(lse: jax.Array, delta: jax.Array) -> jax.Array:
    """lse (base 2) and delta [B, H, 1, T] as the backward kernels read them: [B, H, 8, T] f32."""
    sees_any = lse != -jnp.inf  # true for NaN, which is not to be hidden
    # Weights of a row whose cotangents are not finite are NaN, for its keys; masked tiles take the cotangents as zero.
    lse = jnp.where(jnp.isfinite(delta), lse, jnp.nan)
    rows = [jnp.where(sees_any, lse, 0), jnp.where(sees_any, delta, 0)]
    return jnp.pad(jnp.concatenate(rows, axis=2), [(0, 0), (0, 0), (0, 6), (0, 0)])


def pad(x, block: int, axis: int, fill):
    """Extends an axis to a multiple of `block`."""
    if x is None or x.shape[axis] % block == 0:
        return x
    numpy = np if isinstance(x, np.ndarray) else jnp
    widths = [(0, -x.shape[axis] % block if i == axis else 0) for i in range(x.ndim)]
    return numpy.pad(x, widths, constant_values=fill)
