"""What the TPU kernels do with a call, told without running it: the launches, their grids, tiles and kinds of masks.

It asks the very functions that the kernels ask (`passes`, `scheduled_forward`, `scheduled_backward`, `walk`, `window`);
`tests/kernels/test_dispatch.py` holds the result to the launches in traced programs.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax.numpy as jnp

from pallas_kernels.blocks import backward_tiles
from pallas_kernels.request import Launch, Request
from pallas_kernels.schedule import Kind
from pallas_kernels.tpu.decode import choose_steps
from pallas_kernels.tpu.passes import (
    attention_call,
    beyond_backward,
    beyond_forward,
    choose_kernel,
    make_call,
    with_own_tiles,
)
from pallas_kernels.tpu.routed import outside_backward_call
from pallas_kernels.tpu.rows import heads_a_step as rows_heads_a_step
from pallas_kernels.tpu.scheduled_backward import keys_at_once
from pallas_kernels.tpu.scheduled_forward import fits_vmem, serves_branches
from pallas_kernels.tpu.side_by_side import heads_side_by_side
from pallas_kernels.tpu.sink_gradients import heads_at_once
from pallas_kernels.tpu.tiles import Call
from pallas_kernels.tpu.walk import has_default_positions, kind_of_tile, reach_of, walk_over
from pallas_kernels.tpu.window import blocks_back, heads_a_step, sink_slots, window_tiles

_VARIES = "data"  # a dimension of a grid whose size is known when the program runs


class DecodeTiles(NamedTuple):
    """A step of the decoding kernel: KV heads, and entries of their caches."""

    kv_heads: int
    entries: int


def launches(request: Request) -> tuple[Launch, ...]:
    """Those of the forward pass, then those of the backward pass."""
    if request.op == "decode_attention":
        return (_decode(request),)
    call = _make_call(request)
    if request.op == "attention":
        call = attention_call(call, *_where_and_heads(request))
        return tuple(_forward(request, call) + _backward(request, call))
    if request.inference:
        window, outside = (
            attention_call(
                dataclasses.replace(call, outside=out, indexed=call.indexed and not out, in_parts=True),
                *_where_and_heads(request),
            )
            for out in (False, True)
        )
        return tuple(_forward(request, window) + _forward(request, outside))
    return _routed(request, call)


def _make_call(request: Request) -> Call:
    return make_call(
        request.spec,
        request.abstract_coordinates(),
        request.head_dim,
        request.dtype,
        has_slopes="alibi_slopes" in request.given,
        has_bias="sigmoid_bias" in request.given,
        kind=request.device.kind,
    )


def _where_and_heads(request: Request) -> tuple:
    where = request.abstract_coordinates()
    return where, request.head_dim, "full_heads" in request.given, request.device.kind


def _routed(request: Request, call: Call) -> tuple[Launch, ...]:
    call = dataclasses.replace(call, in_parts=not call.softmax)
    where, head_dim, some_full, kind = _where_and_heads(request)
    together = not some_full and serves_branches(call, where, head_dim, jnp.dtype(request.dtype))
    if together:
        call = with_own_tiles(call, where, head_dim, kind)
    padded = _padded(request, call)
    outside = dataclasses.replace(call, outside=True)
    together = not some_full and serves_branches(
        call, padded.abstract_coordinates(), head_dim, jnp.dtype(request.dtype)
    )
    if together:
        forward = [_scheduled(request, outside, request.heads, "branches_forward", keys="all")]
    else:
        window = choose_kernel(dataclasses.replace(call, in_parts=True), padded.abstract_coordinates())
        forward = _forward(request, window) + _forward(request, outside)
    backward = _backward(request, choose_kernel(call, padded.abstract_coordinates()))
    gathered = outside_backward_call(call)
    backward += [_moving(request, gathered, "rows_together", 2), _moving(request, gathered, "rows_added", 2)]
    return tuple(forward + backward + _backward(request, gathered, gathered=True))


def _moving(request: Request, call: Call, kernel: str, arrays: int) -> Launch:
    """The rows of the pass outside, on their way to it or back."""
    length = -(-request.q_length // call.tiles.q_block) * call.tiles.q_block
    heads = rows_heads_a_step(request.heads, request.head_dim, request.dtype, arrays, call.tiles.q_block, length)
    grid = (request.batch, request.heads // heads, _VARIES)
    return Launch(kernel, grid, call.tiles, (), "all", backward=True)


def _parts(request: Request, call: Call, heads: int) -> list[tuple[Call, int | str]]:
    """The launches' calls and numbers of heads, as `passes` divides them."""
    if "full_heads" not in request.given:
        return [(call, heads)]
    full = dataclasses.replace(call, spec=dataclasses.replace(call.spec, window=None), window_kernel=False)
    return [(call, _VARIES), (full, _VARIES)]


def _forward(request: Request, call: Call) -> list[Launch]:
    found = []
    for part, heads in _parts(request, call, request.heads):
        if part.window_kernel:
            steps, group = -(-request.q_length // part.tiles.q_block), request.heads // request.kv_heads
            kv_heads = heads if heads == _VARIES else request.kv_heads
            grid, masks = (request.batch, kv_heads, steps, group), _window_masks(request, part)
            found.append(Launch("window_forward", grid, part.tiles, masks, _keys(part)))
            if "full_from" in request.given:
                beyond, few = beyond_forward(part, *_keys_held(request, part))
                if few and isinstance(heads, int):
                    heads //= heads_side_by_side(beyond, group)
                name, keys = "scheduled_forward", _keys(beyond)
                found.append(_scheduled(request, beyond, heads, name, keys=keys, few=few))
        else:
            found.append(_scheduled(request, part, heads, "scheduled_forward", keys=_keys(part)))
    return found


def _backward(request: Request, call: Call, *, gathered: bool = False) -> list[Launch]:
    group, found = request.heads // request.kv_heads, []
    for part, heads in _parts(request, call, request.kv_heads):
        if part.window_kernel:
            padded = -(-request.q_length // part.tiles.q_block) * part.tiles.q_block
            tiles = backward_tiles(part.tiles, request.device.kind, request.head_dim, part.spec.window)
            window = dataclasses.replace(part, tiles=tiles)
            parts = group // heads_a_step(window, group, request.head_dim, request.dtype)
            grid = (request.batch, heads, padded // tiles.q_block + blocks_back(window), parts)
            masks = _window_masks(request, window)
            found.append(Launch("window_backward", grid, tiles, masks, _keys(part), backward=True))
            if request.spec.num_sink_tokens and "q_segment_ids" in request.given:
                entries = padded // tiles.q_block * sink_slots(window, True)
                heads_in_turn = request.kv_heads // heads_at_once(window, request.kv_heads, request.head_dim)
                entries_grid = request.batch, heads_in_turn, entries
                found.append(Launch("window_sink_gradients", entries_grid, tiles, (), "sink-token", backward=True))
            if "full_from" in request.given:
                beyond, few = beyond_backward(part, *_keys_held(request, part))
                found += _sweeps(request, beyond, heads, group, few)
        else:
            found += _sweeps(request, part, heads, group, gathered)
    return found


def _keys(call: Call) -> str:
    return "outside" if call.outside else "visible"


def _padded(request: Request, call: Call) -> Request:
    def whole(length: int, block: int) -> int:
        return -(-length // block) * block

    q_length, kv_length = (whole(request.q_length, call.tiles.q_block), whole(request.kv_length, call.tiles.kv_block))
    return dataclasses.replace(request, q_length=q_length, kv_length=kv_length)


def _keys_held(request: Request, call: Call) -> tuple[int, int, jnp.dtype]:
    """The length, head_dim and dtype of the keys as the kernels get them."""
    return _padded(request, call).kv_length, request.head_dim, jnp.dtype(request.dtype)


def _scheduled(request: Request, call: Call, heads: int | str, kernel: str, *, keys: str, few: bool = False) -> Launch:
    padded = _padded(request, call)
    resident = fits_vmem(padded.kv_length, request.head_dim, jnp.dtype(request.dtype))
    branches = kernel == "branches_forward"
    walk = (_VARIES,) if few else _walk_grid(padded, call, resident, flush=False, branches=branches)
    return Launch(kernel, (request.batch, heads, *walk), call.tiles, _masks(padded, call, branches), keys)


def _sweeps(request: Request, call: Call, heads: int | str, group: int, some_rows: bool) -> list[Launch]:
    padded = _padded(request, call)
    itemsize = jnp.dtype(request.dtype).itemsize
    chunk, resident = keys_at_once(call, padded.kv_length, request.head_dim, itemsize)
    if padded.kv_length > chunk:
        call = dataclasses.replace(call, indexed=False)
    make = functools.partial(Launch, "scheduled_backward", keys=_keys(call), backward=True)
    found = []
    for start in range(0, padded.kv_length, chunk):
        part = dataclasses.replace(padded, kv_length=min(chunk, padded.kv_length - start))
        walk = (_VARIES,) if some_rows else _walk_grid(part, call, resident, flush=True)
        grid = (request.batch, heads, group, *walk)
        found.append(make(grid, call.tiles, _masks(part, call)))
    return found


def _walk_grid(padded: Request, call: Call, resident: bool, *, flush: bool, branches: bool = False) -> tuple:
    where = padded.abstract_coordinates()
    if has_default_positions(call, where):
        where = where._replace(q_seg=None, kv_seg=None)  # documents change no grid
        return walk_over(call, where, resident=resident, flush=flush, only_plain=branches).grid
    if not resident:
        return (_VARIES,)
    columns = padded.kv_length // call.tiles.kv_block if flush else 0
    return (padded.q_length // call.tiles.q_block + columns,)


def _masks(padded: Request, call: Call, branches: bool = False) -> tuple[Kind, ...]:
    """The kinds of the tiles of a walk."""
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


def _decode(request: Request) -> Launch:
    entry_bytes = 2 * request.head_dim * jnp.dtype(request.dtype).itemsize
    heads, block = choose_steps(
        request.spec, request.kv_length, request.kv_heads, entry_bytes, request.device.kind, False
    )
    grid = (request.kv_heads // heads, _VARIES)
    return Launch("decode", grid, DecodeTiles(heads, block), (Kind.BY_TOKEN,))
