"""Queries that come unrotated: the kernels rotate them as they read them, and their gradients back (`rotary`)."""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.math.rotary import Rotation, rotate
from pallas_kernels.math.spec import Coordinates
from pallas_kernels.tpu.tile.tiles import LANES, Blocked, Call, batch_index


def rotates_queries(width: int) -> bool:
    """Whether the kernels can turn queries in rows of this width: those that fill whole registers."""
    return width % LANES == 0


def left_to_kernels(call: Call, where: Coordinates, rotation: Rotation | None) -> tuple[Call, Coordinates]:
    """A call whose kernels rotate the queries, if they are still to be rotated."""
    if rotation is None:
        return call, where
    call = dataclasses.replace(call, rotated_by=rotation.distance)
    cos, sin = (jnp.tile(table, call.abreast) for table in (rotation.cos, rotation.sin))
    return call, where._replace(q_cos=cos, q_sin=sin)


def rotated_by_xla(q: jax.Array, rotation: Rotation) -> jax.Array:
    """`rotate` for queries [B, T, H, D]: of narrow heads as many side by side as fill a register, which is faster."""
    heads, head_dim = q.shape[2:]
    abreast = math.gcd(heads, max(LANES // head_dim, 1))
    return rotate(q.reshape(*q.shape[:2], -1, abreast * head_dim), rotation).reshape(q.shape)


def multiplied(call: Call, q: jax.Array) -> jax.Array:
    """The queries as the kernels take them: those that are to be rotated are multiplied then."""
    return q if call.rotated_by else q * jnp.asarray(call.query_factor, q.dtype)


def table_blocks(where: Coordinates, located: Callable) -> list[Blocked]:
    """What a kernel reads to rotate queries; nothing if they come rotated.

    Args:
      located: from a function, which gives the row of a table for a row of the batch, to the block of a table.
    """
    tables = [x for x in (where.q_cos, where.q_sin) if x is not None]
    return [Blocked(table, located(functools.partial(batch_index, info=table))) for table in tables]


def rotate_tile(call: Call, x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Queries [rows, D], rotated and multiplied, in their own dtype; inside a kernel."""
    return (_rotate(call, x, cos, sin) * call.query_factor).astype(x.dtype)


def rotate_tile_back(call: Call, sums: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """The gradient [rows, D] f32 of queries before `rotate`, from the sums of ds k [D, rows] f32; inside a kernel."""
    return rotate_gradient_back(call, (sums * call.product_factor).T, cos, sin)


def rotate_gradient_back(call: Call, gradient: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """The gradient [rows, D] f32 of queries before `rotate`, from that of what it gave; inside a kernel."""
    return _rotate(call, gradient * call.query_factor, cos, -sin)


def _rotate(call: Call, x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    x, distance, width = x.astype(jnp.float32), call.rotated_by, x.shape[1]
    other = pltpu.roll(x, distance, 1)
    if 2 * distance != width:
        is_first = lax.broadcasted_iota(jnp.int32, x.shape, 1) // distance % 2 == 0
        other = jnp.where(is_first, pltpu.roll(x, width - distance, 1), other)
    return x * cos + other * sin
