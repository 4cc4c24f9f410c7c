"""What a TPU is to launch for a call, told without running it: the launches' grids, tiles and kinds of masks.

The launches are those that `launches` makes for the call itself, their grids those that the kernels take.
"""

import dataclasses
import math
from typing import NamedTuple

import jax.numpy as jnp

from pallas_kernels.math.schedule import Kind
from pallas_kernels.math.spec import Coordinates
from pallas_kernels.request import LaunchFacts, Request
from pallas_kernels.tpu.calls.launches import (
    Given,
    Launch,
    Launches,
    attention_call,
    attention_launches,
    inference_calls,
    make_call,
    routed_call,
    routed_launches,
    with_pairs,
)
from pallas_kernels.tpu.calls.rows import heads_a_step as rows_heads_a_step
from pallas_kernels.tpu.decode.decode import choose_steps
from pallas_kernels.tpu.schedule.pair_schedule import has_default_positions, kind_of_tile, order_pairs, reach_of
from pallas_kernels.tpu.schedule.scheduled_backward import key_chunks
from pallas_kernels.tpu.schedule.scheduled_forward import fits_vmem
from pallas_kernels.tpu.schedule.side_by_side import heads_side_by_side
from pallas_kernels.tpu.tile.tiles import LANES, Call
from pallas_kernels.tpu.window.geometry import blocks_back, window_tiles
from pallas_kernels.tpu.window.sink_gradients import sink_gradients_grid
from pallas_kernels.tpu.window.window_backward import window_backward_grid
from pallas_kernels.tpu.window.window_forward import window_forward_grid

_VARIES = "data"  # a dimension of a grid whose size is known when the program runs


class DecodeTiles(NamedTuple):
    """A step of the decoding kernel: KV heads, and entries of their caches."""

    kv_heads: int
    entries: int


def list_launches(request: Request) -> tuple[LaunchFacts, ...]:
    """The launches of the forward pass, then those of the backward pass."""
    if request.op == "decode_attention":
        return (_decode(request),)
    where, full_heads = request.abstract_coordinates(), "full_heads" in request.given
    call = make_call(
        request.spec,
        where,
        request.head_dim,
        request.dtype,
        has_slopes="alibi_slopes" in request.given,
        has_bias="sigmoid_bias" in request.given,
        kind=request.device.kind,
    )
    if request.op == "attention":
        sizes = request.heads, request.head_dim, request.kv_heads
        call = with_pairs(call, where, *sizes, full_heads or None)
        request = _in_pairs(request) if call.abreast > 1 else request
    given = Given(request.head_dim, jnp.dtype(request.dtype), request.device.kind, full_heads)
    if request.op == "attention":
        found = _attention(call, where, given)
        return _facts(request, found, found.forward + found.backward)
    if request.inference:
        parts = [_attention(one, where, given) for one in inference_calls(call)]
        return sum((_facts(request, one, one.forward) for one in parts), ())
    routed = routed_launches(routed_call(call, where, given), where, given)
    window, outside = routed.window, routed.outside
    return _facts(request, routed, window.forward + outside.forward + window.backward + routed.moved) + _facts(
        request, routed, outside.backward, gathered=True
    )


def _attention(call: Call, where: Coordinates, given: Given) -> Launches:
    return attention_launches(attention_call(call, where, given), where, given)


def _in_pairs(request: Request) -> Request:
    """The call with its heads as its kernels get them in `pairs`."""
    heads, kv_heads = request.heads, request.kv_heads
    kv_heads = kv_heads // 2 if heads == kv_heads else kv_heads
    return dataclasses.replace(request, heads=heads // 2, kv_heads=kv_heads, head_dim=LANES)


def _facts(request: Request, laid_out, launches: tuple[Launch, ...], gathered: bool = False) -> tuple[LaunchFacts, ...]:
    """Launches of arrays that are laid out by the tiles of `laid_out.call`; of `gathered` rows some are left out."""
    request = _padded(request, laid_out.call)
    return tuple(LaunchFacts(*one) for launch in launches for one in _each(request, launch, gathered))


def _each(request: Request, launch: Launch, gathered: bool) -> list[tuple]:
    """The fields of `LaunchFacts`, once for each chunk of keys that a launch takes."""
    call, kernel = launch.call, launch.kernel
    batch, heads, kv_heads, head_dim = request.batch, request.heads, request.kv_heads, request.head_dim
    served: tuple[int | str, int | str] = (heads, kv_heads) if launch.heads == "all" else (_VARIES, _VARIES)
    group, length, itemsize = heads // kv_heads, request.q_length, jnp.dtype(request.dtype).itemsize
    keys = "outside" if call.outside else "visible"

    def one(grid: tuple, masks: tuple[Kind, ...], keys: str = keys, backward: bool = False) -> list[tuple]:
        return [(kernel, grid, call.tiles, masks, keys, backward)]

    if kernel == "window_forward":
        return one(window_forward_grid(call, batch, served[1], length, group), _window_masks(request, call))
    if kernel == "window_backward":
        grid = window_backward_grid(call, batch, served[1], length, group, head_dim, request.dtype)
        return one(grid, _window_masks(request, call), backward=True)
    if kernel == "window_sink_gradients":
        grid = sink_gradients_grid(call, batch, kv_heads, head_dim, length // call.tiles.q_block)
        return one(grid, (), "sink-token", backward=True)
    if kernel.startswith("rows"):
        size = rows_heads_a_step(heads, head_dim, request.dtype, 2, call.tiles.q_block, length)
        return one((batch, heads // size, _VARIES), (), "all", backward=True)
    if kernel == "scheduled_backward":
        some_rows, found = launch.listed or gathered, []
        chunks, resident = key_chunks(call, request.kv_length, head_dim, itemsize)
        if len(chunks) > 1:
            call = dataclasses.replace(call, indexed=False)
        for chunk in chunks:
            part = dataclasses.replace(request, kv_length=chunk.stop - chunk.start)
            schedule = (_VARIES,) if some_rows else _schedule_grid(part, call, resident, flush=True)
            found += one((batch, served[1], group, *schedule), _masks(part, call), backward=True)
        return found
    branches, of_query = kernel == "branches_forward", served[0]
    resident = fits_vmem(request.kv_length, head_dim, jnp.dtype(request.dtype))
    if launch.listed and isinstance(of_query, int):
        of_query //= heads_side_by_side(call, group)
    schedule = (_VARIES,) if launch.listed else _schedule_grid(request, call, resident, flush=False, branches=branches)
    return one((batch, of_query, *schedule), _masks(request, call, branches), "all" if branches else keys)


def _padded(request: Request, call: Call) -> Request:
    def whole(length: int, block: int) -> int:
        return -(-length // block) * block

    q_length, kv_length = (whole(request.q_length, call.tiles.q_block), whole(request.kv_length, call.tiles.kv_block))
    return dataclasses.replace(request, q_length=q_length, kv_length=kv_length)


def _schedule_grid(padded: Request, call: Call, resident: bool, *, flush: bool, branches: bool = False) -> tuple:
    where = padded.abstract_coordinates()
    if has_default_positions(call, where):
        where = where._replace(q_segment_ids=None, kv_segment_ids=None)  # documents change no grid
        return order_pairs(call, where, resident=resident, flush=flush, only_plain=branches).grid
    if not resident:
        return (_VARIES,)
    columns = padded.kv_length // call.tiles.kv_block if flush else 0
    return (padded.q_length // call.tiles.q_block + columns,)


def _masks(padded: Request, call: Call, branches: bool = False) -> tuple[Kind, ...]:
    """The kinds of the tiles of a schedule."""
    if not has_default_positions(call, padded.abstract_coordinates()):
        return (Kind.FULL, Kind.BY_TOKEN)
    num_blocks = padded.q_length // call.tiles.q_block
    kinds = {Kind.BY_TOKEN} if "q_segment_ids" in padded.given else set()  # where the edge of a document is
    for part in (call, dataclasses.replace(call, outside=False)) if branches else (call,):
        reach = reach_of(part, num_blocks)
        kinds |= {Kind.FULL} if reach.plain else set()
        strip, tile = (math.gcd(size, part.tiles.q_block) for size in (part.tiles.strip, part.tiles.tile))
        kinds |= {
            kind_of_tile(part, distance, slice(q, q + strip), slice(k, k + tile))
            for distance in reach.partly
            for q in range(0, part.tiles.q_block, strip)
            for k in range(0, part.tiles.kv_block, tile)
        }
    return _in_order(kinds)


def _window_masks(request: Request, call: Call) -> tuple[Kind, ...]:
    strips = range(0, call.tiles.q_block, math.gcd(call.tiles.strip, call.tiles.q_block))
    present = min(blocks_back(call) + 1, -(-request.q_length // call.tiles.q_block))
    kinds = {tile.kind for start in strips for tile in window_tiles(call, start, present)}
    if request.spec.num_sink_tokens:
        kinds.add(Kind.EDGE)  # sink tokens are a tile of their own where they lie outside the window
    if "q_segment_ids" in request.given:
        kinds.add(Kind.BY_TOKEN)  # steps that the edge of a document crosses
    return _in_order(kinds)


def _in_order(kinds: set[Kind]) -> tuple[Kind, ...]:
    return tuple(kind for kind in Kind if kind in kinds and kind is not Kind.NONE)


def _decode(request: Request) -> LaunchFacts:
    entry_bytes = 2 * request.head_dim * jnp.dtype(request.dtype).itemsize
    heads, block = choose_steps(
        request.spec, request.kv_length, request.kv_heads, entry_bytes, request.device.kind, False
    )
    grid = (request.kv_heads // heads, _VARIES)
    return LaunchFacts("decode", grid, DecodeTiles(heads, block), (Kind.BY_TOKEN,))
