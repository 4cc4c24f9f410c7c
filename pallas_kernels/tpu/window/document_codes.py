"""Documents told apart by the matrix unit, in steps of the window kernel that a document's edge cuts.

A comparison and a selection for every logit would cost a fifth of such a step. Where matrix units are 256 wide, a row
of 128 numbers fills half of their depth, and the other half is free: there stand codes of documents. A token's code has
two ones, for the two digits of its document's number. A query's is the same less one, times 2^126. So the product of a
query and a key is q.k where they are of one document, and at most q.k - 2^126 elsewhere, whose weight is zero.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.math.spec import Coordinates
from pallas_kernels.tpu.tile.tiles import LANES, Call, window_of

_FAR = 2.0**126  # twice of it is a float32
_LOW = LANES // 2  # values of the lower digit; the higher one has a value less
_NONE = LANES - 1  # lane of what no query sees


def reads_codes(call: Call, width: int) -> bool:
    """Whether the step has room for codes beside `width` columns of a head, and gains by them.

    The first or the last query of each strip must see every key that any of its queries sees: only so does a key that
    is not finite show, and the step is then done again by comparisons. A softcap would bound what codes add.
    """
    strip = math.gcd(call.tiles.strip, call.tiles.q_block)
    return (
        call.softmax
        and call.spec.logit_softcap is None
        and width == LANES
        and strip == 2 * LANES
        and 2 * strip <= window_of(call) <= _LOW * (_LOW - 1) - 2 * strip
    )


def document_codes(where: Coordinates, dtype: Any, behind: int = 0) -> jax.Array:
    """[B, T + behind, LANES]: a code for each token. Two documents that a strip of queries meets have different ones.

    No query sees the tokens `behind`: they stand for keys before the sequence.
    """
    order, position = jnp.asarray(where.q_order), jnp.asarray(where.q_pos)
    start, seen = order - position, position >= 0
    number = jnp.cumsum(jnp.diff(start, axis=1, prepend=start[:, :1]) != 0, axis=1, dtype=jnp.int32)
    digits = number % _LOW, _LOW + number // _LOW % (_LOW - 1)
    low, high = (
        jnp.pad(jnp.where(seen, digit, _NONE), [(0, 0), (0, behind)], constant_values=_NONE) for digit in digits
    )
    lane = jnp.arange(LANES)[:, None]
    codes = ((lane == low[:, None, :]) | (lane == high[:, None, :])).astype(dtype)  # [B, LANES, T]
    # Transposed by the matrix unit, which takes a tenth of the time that moving the lanes takes.
    transposed = jnp.einsum("bct,cd->btd", codes, jnp.eye(LANES, dtype=dtype), preferred_element_type=jnp.float32)
    return transposed.astype(dtype)


def with_query_code(query: jax.Array, code: jax.Array) -> jax.Array:
    """Queries with what tells them from keys of other documents, [strip, D + LANES]."""
    lane = lax.broadcasted_iota(jnp.int32, code.shape, 1)
    pushed = jnp.where(lane == _NONE, jnp.asarray(-_FAR, code.dtype), (code - 1) * _FAR)
    return jnp.concatenate([query, pushed], axis=1)
