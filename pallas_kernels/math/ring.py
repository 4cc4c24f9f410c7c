"""Keys that the devices of a mesh axis hold in parts: each device gathers them all or, in long rows, they go round.

In round s, device r has the keys that device r - s began with, and those of the next round are on their way while it
attends to them (ring attention, Liu et al. 2023). Going back, the gradients of the keys travel with them, and come home
last. Results over the parts are joined as they come, so that the backward pass knows the softmax over all keys.
Positions must be given: an index says nothing of another device's keys.

Keys that go round take the links of one direction only, and their gradients are sums in float32. Where a row is short,
attention is too quick to hide that, and gathering, in both directions at once, is faster.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.math.spec import Coordinates

LONGEST_GATHERED = 32768  # tokens of a row


class RowOrder(NamedTuple):
    """Which tokens of a row each of its devices holds.

    Attributes:
      zigzag: device r of n holds chunks r and 2n - 1 - r of 2n, instead of chunk r of n.
    """

    devices: int
    zigzag: bool

    @property
    def chunks(self) -> int:
        """Runs of consecutive tokens on a device."""
        return 2 if self.zigzag else 1

    def chunks_as_held(self) -> np.ndarray:
        """The chunks of the row in the order in which the devices hold them, one device after the other."""
        low = np.arange(self.devices)
        return np.stack([low, 2 * self.devices - 1 - low], axis=1).reshape(-1) if self.zigzag else low

    def tokens_as_held(self, length: int) -> np.ndarray:
        """The tokens of a row as the devices hold them: [length] int32."""
        return (
            np.arange(length, dtype=np.int32).reshape(self.devices * self.chunks, -1)[self.chunks_as_held()].reshape(-1)
        )

    def holder(self, chunk: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The device that holds a chunk of the row, and which of that device's chunks it is."""
        late = chunk >= self.devices
        return jnp.where(late, 2 * self.devices - 1 - chunk, chunk), late.astype(jnp.int32)

    def held_at(self, block: jax.Array, num_blocks: int) -> jax.Array:
        """Where a block of the row lies among those that the devices hold; a chunk has whole blocks."""
        if not self.zigzag:
            return block
        blocks = num_blocks // (2 * self.devices)  # of a chunk
        device, which = self.holder(lax.div(block, blocks))
        return (2 * device + which) * blocks + lax.rem(block, blocks)


class Ring(NamedTuple):
    """The devices along an axis of the mesh, inside shard_map.

    Attributes:
      order: of the tokens of a row over them.
      by_index: tokens are where the order says: positions are those that the segments imply.
    """

    axis: str
    order: RowOrder
    by_index: bool = False

    @property
    def devices(self) -> int:
        return self.order.devices

    def in_row(self, where: Coordinates) -> Coordinates:
        """The coordinates of a device's queries and of all keys, distances being measured along the row."""
        keys = self.order.tokens_as_held(where.kv_pos.shape[1])[None]
        length = where.q_pos.shape[1]
        queries = lax.dynamic_slice_in_dim(jnp.asarray(keys), lax.axis_index(self.axis) * length, length, axis=1)
        return where._replace(q_order=queries, kv_order=jnp.asarray(keys))

    def goes_round(self, keys: jax.Array) -> bool:
        """Whether the keys [B, T / devices, ..] of a row are too many to be gathered."""
        return keys.shape[1] * self.devices > LONGEST_GATHERED

    def gather(self, x: jax.Array) -> jax.Array:
        """The parts of all devices along axis 1, in the order of the devices."""
        return lax.all_gather(x, self.axis, axis=1, tiled=True)

    def passed_on(self, arrays: Any) -> Any:
        """What the device before this one holds; the first one follows the last."""
        steps = [(device, (device + 1) % self.devices) for device in range(self.devices)]
        return jax.tree.map(lambda x: lax.ppermute(x, self.axis, steps), arrays)

    def at_hand(self, where: Coordinates, number: jax.Array | int) -> Coordinates:
        """Where the keys of round `number` are, of those of all devices in the order of the devices."""
        holder = (lax.axis_index(self.axis) - number) % self.devices

        def part(x):
            length = x.shape[1] // self.devices
            return lax.dynamic_slice_in_dim(x, holder * length, length, axis=1)

        kv_segment_ids = None if where.kv_segment_ids is None else part(where.kv_segment_ids)
        return where._replace(kv_pos=part(where.kv_pos), kv_order=part(where.kv_order), kv_segment_ids=kv_segment_ids)


def one_part(ring: Ring | None, where: Coordinates) -> Coordinates:
    """Of the keys that a device attends to at once; shapes are all that matters."""
    return where if ring is None else ring.at_hand(where, 0)


def attend_to_all(
    ring: Ring | None,
    keys: Any,
    where: Coordinates,
    attend: Callable[[Any, Coordinates, Any, bool], Any],
    nothing: Any = (),
) -> Any:
    """The results over the keys of all devices.

    Args:
      keys: the device's own keys and values.
      attend: from keys, where they are, the results so far, and whether these are the last keys, to the results with
        these keys.
      nothing: the results so far of the first keys.
    """
    if ring is None:
        return attend(keys, where, nothing, True)
    results, last = nothing, ring.devices - 1
    for number in range(ring.devices):
        following = ring.passed_on(keys) if number < last else None
        results = attend(keys, ring.at_hand(where, number), results, number == last)
        keys = following
    return results


def gradients_of_all(
    ring: Ring | None,
    keys: tuple[jax.Array, jax.Array],
    where: Coordinates,
    backward: Callable[[tuple[jax.Array, jax.Array], Coordinates], tuple],
) -> tuple:
    """The gradients of a device's queries, of its own keys and values, and of what else `backward` returns.

    Args:
      backward: from keys and values and where they are to dq, dk, dv and more that adds up over the keys.
    """
    if ring is None:
        return backward(keys, where)
    at_hand, last = keys, ring.devices - 1
    of_queries: Any = None
    of_keys: Any = None
    for number in range(ring.devices):
        following = ring.passed_on(at_hand) if number < last else at_hand
        arriving = ring.passed_on(of_keys)
        dq, dk, dv, *more = backward(at_hand, ring.at_hand(where, number))
        of_queries, of_keys = _add(of_queries, (dq, *more)), _add(arriving, (dk, dv))
        at_hand = following
    dq, *more = of_queries
    dk, dv = (x.astype(keys[0].dtype) for x in ring.passed_on(of_keys))
    return dq, dk, dv, *more


def _add(sums: Any, parts: Any) -> Any:
    """The sums with the parts, none of which is rounded more than it came."""
    parts = jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)), parts)
    return parts if sums is None else jax.tree.map(jnp.add, sums, parts)
