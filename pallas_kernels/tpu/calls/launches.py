"""Which kernels a call launches on a TPU. The list is made here and nowhere else: `passes` and `routed` run it, and
`listing` prints what is in it.

Calls with default positions and a causal window of moderate length run in the window kernels; all others in the
scheduled ones. What full rows see outside the window comes from a scheduled kernel, which adds it to the window's
results; where VMEM holds the keys, it visits the blocks with full rows alone (`list_rows`) and changes those results in
place. With full heads, one launch serves the windowed heads and another the full ones, each with its own grid, and
both write to the same arrays.
"""

import dataclasses
import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.blocks import backward_tiles, choose_tiles, device_kind, longest_window, on_tpu
from pallas_kernels.math.ring import RowOrder
from pallas_kernels.math.spec import AttentionSpec, Coordinates, PerHead
from pallas_kernels.tpu.schedule.pair_schedule import has_default_positions
from pallas_kernels.tpu.schedule.scheduled_backward import keys_at_once
from pallas_kernels.tpu.schedule.scheduled_forward import fits_vmem, serves_branches
from pallas_kernels.tpu.tile.pairs import pairs_pay
from pallas_kernels.tpu.tile.tiles import Call
from pallas_kernels.tpu.window.geometry import sink_slots, window_kernel_serves
from pallas_kernels.tpu.window.packed_sinks import MOST_COPIED

# Numbers of keys of a head in VMEM. Beside more of them, blocks of 2048 did not fit a v5p; a v6e has room.
_MOST_BESIDE_LARGE_BLOCKS = 24576 * 128
# Queries of a block with full rows: small, so that it holds few others; backward, as wide as the widest matrix unit.
_LISTED_FORWARD, _LISTED_BACKWARD = 128, 256
_OUTSIDE_BLOCK = 1024  # of keys outside the window, and of queries where all blocks are visited
# Of gathered rows: the smaller the block, the narrower the span of positions that its keys are bounded by.
GATHERED_BLOCK = 256


@dataclasses.dataclass(frozen=True)
class Launch:
    """One launch of a kernel.

    Attributes:
      kernel: the name that it has in compiled programs.
      call: the static side, with this launch's tiles.
      heads: those that it serves; "windowed" and "full" ones differ where the call is given `full_heads`.
      full_rows: it adds what full rows see outside the window to the results of the launch before.
      listed: it visits the blocks with full rows alone, and changes those results in place.
    """

    kernel: str
    call: Call
    heads: Literal["all", "windowed", "full"] = "all"
    full_rows: bool = False
    listed: bool = False


class Launches(NamedTuple):
    """The launches of one call; `call` is that by which arrays are padded and queries multiplied."""

    call: Call
    forward: tuple[Launch, ...]
    backward: tuple[Launch, ...]

    def in_parts(self) -> "Launches":
        """More is to be added to the results: they are not rounded."""
        return self._replace(forward=tuple(dataclasses.replace(x, call=in_parts(x.call)) for x in self.forward))


class RoutedLaunches(NamedTuple):
    """The launches of a routed call: of the keys in the window, and of those outside.

    Attributes:
      together: one kernel gives both branches, the first of `window.forward`; `outside` then has no forward launch.
    """

    call: Call
    together: bool
    window: Launches
    outside: Launches
    moved: tuple[Launch, ...]  # the rows of the backward pass outside, on their way to it and back


class Given(NamedTuple):
    """What else decides which kernels a call launches.

    Attributes:
      kind: of device.
      some_full_heads: whether the call is given `full_heads`.
    """

    head_dim: int
    dtype: jax.typing.DTypeLike
    kind: str
    some_full_heads: bool = False


def make_call(
    spec: AttentionSpec,
    where: Coordinates,
    head_dim: int,
    dtype: jax.typing.DTypeLike,
    *,
    has_slopes: bool,
    has_bias: bool,
    kind: str,
    order: RowOrder | None = None,
) -> Call:
    """The static side of a call on a kind of device, its kernel not yet chosen; of `where` shapes are read."""
    lengths = where.q_pos.shape[1], where.kv_pos.shape[1]
    tiles = choose_tiles(kind, *lengths, head_dim)
    if order is not None:
        chunk = lengths[0] // order.chunks
        tiles = choose_tiles(kind, chunk, chunk, head_dim)
        order = order if chunk % tiles.q_block == 0 else None  # chunks are whole blocks, or positions decide
    return Call(
        spec=dataclasses.replace(spec, scale=spec.scale_for(head_dim)),
        tiles=tiles,
        max_window=longest_window(kind, head_dim, dtype),
        indexed=is_indexed(where),
        order=order,
        has_slopes=has_slopes,
        has_bias=has_bias,
        interpret=not on_tpu(),
    )


def call_of(
    q: jax.Array, spec: AttentionSpec, where: Coordinates, per_head: PerHead, order: RowOrder | None = None
) -> Call:
    """`make_call` on the device that the trace is for."""
    given = {"has_slopes": per_head.alibi_slopes is not None, "has_bias": per_head.sigmoid_bias is not None}
    return make_call(spec, where, q.shape[3], q.dtype, **given, kind=device_kind(), order=order)


def attention_call(call: Call, where: Coordinates, given: Given) -> Call:
    """The call of `attention`, or of either part of a routed call at inference, with its kernel and tiles.

    Args:
      where: of the keys that are attended to at once; shapes are read.
    """
    call = choose_kernel(call, where)
    return call if given.some_full_heads else with_own_tiles(call, where, given)


def attention_launches(call: Call, where: Coordinates, given: Given) -> Launches:
    """The launches of an `attention_call`; the arguments are its."""
    windowed: Literal["all", "windowed"] = "windowed" if given.some_full_heads else "all"
    kv_length = _in_whole_blocks(where, call).kv_order.shape[1]
    forward = [Launch("scheduled_forward", call, windowed)]
    backward = [Launch("scheduled_backward", _backward_call(call, given), windowed)]
    if call.window_kernel:
        tiles = backward_tiles(call.tiles, given.kind, given.head_dim, call.spec.window)
        window = dataclasses.replace(call, tiles=tiles)
        forward, backward = [Launch("window_forward", call, windowed)], [Launch("window_backward", window, windowed)]
        if call.spec.num_sink_tokens and where.q_segment_ids is not None:
            backward.append(Launch("window_sink_gradients", window))
        if where.full_rows is not None:
            outside, listed = outside_forward(call, kv_length, given)
            if not listed:
                forward = [Launch("window_forward", in_parts(call), windowed)]
            forward.append(Launch("scheduled_forward", outside, windowed, True, listed))
            outside, listed = outside_backward(call, kv_length, given)
            backward.append(Launch("scheduled_backward", outside, windowed, True, listed))
    if given.some_full_heads:
        full = dataclasses.replace(call, spec=call.spec.full, window_kernel=False)
        forward.append(Launch("scheduled_forward", full, "full"))
        backward.append(Launch("scheduled_backward", full, "full"))
    return Launches(call, tuple(forward), tuple(backward))


def _backward_call(call: Call, given: Given) -> Call:
    """Wide heads gain 4 % by large blocks in the backward pass, and compile three times as long."""
    if given.head_dim <= 128:
        return call

    def halved(block: int) -> int:
        return block // 2 if block > 1024 and block % 256 == 0 else block  # whole tiles

    tiles = dataclasses.replace(call.tiles, q_block=halved(call.tiles.q_block), kv_block=halved(call.tiles.kv_block))
    return dataclasses.replace(call, tiles=tiles)


def routed_call(call: Call, where: Coordinates, given: Given) -> Call:
    """The call of `routed_attention` with its tiles; the arguments are those of `attention_call`."""
    # The gate's gradient is a difference of the branches: large sums without a normaliser must not be rounded before.
    call = dataclasses.replace(call, in_parts=not call.softmax)
    return with_own_tiles(call, where, given) if _one_kernel(call, where, given) else call


def _one_kernel(call: Call, where: Coordinates, given: Given) -> bool:
    """Whether one kernel gives both branches of a routed call."""
    return not given.some_full_heads and serves_branches(call, where, given.head_dim, given.dtype)


def routed_launches(call: Call, where: Coordinates, given: Given, in_ring: bool = False) -> RoutedLaunches:
    """The launches of a `routed_call`; the arguments are its.

    Args:
      in_ring: keys go round, and what is added up is each branch's own.
    """
    where = _in_whole_blocks(where, call)
    chosen, outside = choose_kernel(call, where), dataclasses.replace(call, outside=True)
    together = not in_ring and _one_kernel(call, where, given)
    window, rest = in_parts(call if in_ring else chosen), in_parts(outside) if in_ring else outside
    forward, more = (attention_launches(one, where, given).forward for one in (window, rest))
    if together:
        forward, more = (Launch("branches_forward", outside),), ()
    gathered = dataclasses.replace(_outside(call, GATHERED_BLOCK), rotated_by=0)
    return RoutedLaunches(
        call,
        together,
        Launches(call, forward, attention_launches(chosen, where, given).backward),
        Launches(gathered, more, attention_launches(gathered, where, given).backward),
        tuple(Launch(name, gathered) for name in ("rows_together", "rows_added")),
    )


def inference_calls(call: Call) -> tuple[Call, Call]:
    """The two calls of a routed call that is not differentiated: over the keys in the window, and those outside."""
    call = in_parts(call)
    return call, dataclasses.replace(by_position(call), outside=True)


def _in_whole_blocks(where: Coordinates, call: Call) -> Coordinates:
    """The coordinates with their lengths padded: shapes, which are all that is read."""

    def whole(order, block: int):
        return jax.ShapeDtypeStruct((1, -(-order.shape[1] // block) * block), jnp.int32)

    tiles = call.tiles
    q_order, kv_order = whole(where.q_order, tiles.q_block), whole(where.kv_order, tiles.kv_block)
    return where._replace(q_order=q_order, kv_order=kv_order)


def is_indexed(where: Coordinates) -> bool:
    """Whether queries and keys lie where their index says; `coordinates` gives such an order as NumPy arrays."""
    both = isinstance(where.q_order, np.ndarray) and isinstance(where.kv_order, np.ndarray)
    return both and where.q_order.shape == where.kv_order.shape


def with_pairs(
    call: Call, where: Coordinates, heads: int, head_dim: int, kv_heads: int, full_heads: object = None
) -> Call:
    """The call of `attention` with its heads in `pairs`, where window kernels alone serve it."""
    alone = window_kernel_serves(call, where) and where.full_rows is None and full_heads is None
    fit = pairs_pay(heads, kv_heads, head_dim, call.spec.window)
    return dataclasses.replace(call, abreast=2) if alone and fit else call


def choose_kernel(call: Call, where: Coordinates) -> Call:
    """Marks a call that the window kernels serve, its window cut to the sequence."""
    if not window_kernel_serves(call, where):
        return call
    assert call.spec.window is not None  # no window kernel without a window
    spec = dataclasses.replace(call.spec, window=min(call.spec.window, where.q_order.shape[1]))
    return dataclasses.replace(call, spec=spec, window_kernel=True)


def with_own_tiles(call: Call, where: Coordinates, given: Given) -> Call:
    """The kernel's own tiles, for a call whose arrays no other kernel reads."""
    window = call.spec.window if call.window_kernel else None
    scheduled = not call.window_kernel and has_default_positions(call, where)
    if not (call.window_kernel or scheduled) or (scheduled and call.spec.num_sink_tokens):
        return call
    length = where.q_order.shape[1] // (1 if call.order is None else call.order.chunks)
    large = scheduled and ("v6" in given.kind or where.kv_order.shape[1] * given.head_dim <= _MOST_BESIDE_LARGE_BLOCKS)
    tiles = choose_tiles(given.kind, length, length, given.head_dim, window=window, scheduled=large)
    own = dataclasses.replace(call, tiles=tiles)
    # A large block would hold the sink tokens of many documents.
    return call if own.spec.num_sink_tokens and sink_slots(own, True) > MOST_COPIED else own


def in_parts(call: Call) -> Call:
    return dataclasses.replace(call, in_parts=True)


def by_position(call: Call) -> Call:
    """The call for queries that are not where their index says."""
    return dataclasses.replace(call, indexed=False, order=None)


def outside_forward(call: Call, length: int, given: Given) -> tuple[Call, bool]:
    """The call of what full rows see outside the window, beside what a window kernel has done for all rows, and whether
    it visits the blocks with full rows alone, which takes all keys in VMEM."""
    listed = fits_vmem(length, given.head_dim, given.dtype)
    return _outside(call, _LISTED_FORWARD if listed else _OUTSIDE_BLOCK), listed


def outside_backward(call: Call, length: int, given: Given) -> tuple[Call, bool]:
    """`outside_forward` for the backward pass."""
    small = _outside(call, _LISTED_BACKWARD)
    listed = keys_at_once(small, length, given.head_dim, jnp.dtype(given.dtype).itemsize)[1]
    return (small if listed else _outside(call, _OUTSIDE_BLOCK)), listed


def _outside(call: Call, q_block: int) -> Call:
    q_block, kv_block = math.gcd(call.tiles.q_block, q_block), math.gcd(call.tiles.kv_block, _OUTSIDE_BLOCK)
    tiles = dataclasses.replace(call.tiles, q_block=q_block, kv_block=kv_block)
    return dataclasses.replace(by_position(call), outside=True, window_kernel=False, tiles=tiles)
