"""Rotary embeddings (RoPE; Su et al. 2021): pairs of channels, rotated by angles that grow with the position.

A call takes its keys rotated. Its queries may come as they are, with a `Rotation`: the TPU kernels rotate them as they
read them, and their gradients back as they write them, where passes of their own over memory take half as long as the
attention of a short window.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@functools.partial(jax.tree_util.register_dataclass, data_fields=("cos", "sin"), meta_fields=("distance",))
@dataclasses.dataclass(frozen=True)
class Rotation:
    """By what the channels of each token are rotated.

    Attributes:
      cos: [B or 1, T, D] f32, 1 in channels that are not rotated.
      sin: [B or 1, T, D] f32, 0 in those; negative in the first channel of each pair.
      distance: between the two channels of a pair: 1, or half the channels that are rotated.
    """

    cos: jax.Array
    sin: jax.Array
    distance: int


def rotate(x: jax.Array, rotation: Rotation) -> jax.Array:
    """x [B, T, H, D], or with several heads side by side, rotated; in its own dtype.

    The other channel of each pair comes from a product with a matrix of 0 and 1, which is exact. A TPU does it beside
    the rest; halves of a row, which are less than a register's width, would cost it several passes over x.
    """
    head_dim, distance = rotation.cos.shape[-1], rotation.distance
    first = np.arange(head_dim - distance)
    first = first[first // distance % 2 == 0]
    swap, abreast = np.zeros((head_dim,) * 2, np.float32), x.shape[-1] // head_dim
    swap[first + distance, first] = swap[first, first + distance] = 1
    swap = np.kron(np.eye(abreast, dtype=np.float32), swap)
    exact = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    other = jnp.matmul(x, swap.astype(x.dtype), precision=exact, preferred_element_type=jnp.float32)
    cos, sin = (jnp.tile(table, abreast)[:, :, None] for table in (rotation.cos, rotation.sin))
    return (x.astype(jnp.float32) * cos + other * sin).astype(x.dtype)
