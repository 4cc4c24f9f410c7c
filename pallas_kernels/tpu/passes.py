"""What every entry to the TPU kernels does: the static side of a call, the layout of arrays, a pass over all heads.

Kernels want arrays head-major and padded to whole blocks; padding is at position -1, so nothing sees it. Calls with
default positions and a causal window of moderate length run in the window kernels; all others in the scheduled ones.
What full rows see beside the window comes from a scheduled kernel, which goes on with the window's results; where VMEM
holds the keys, it walks over the blocks with full rows alone (`few_rows`) and changes the window's results in place.
With full heads, one launch serves the windowed heads and a second the full ones, each with its own grid, both writing
to the same arrays.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.blocks import Tiles, backward_tiles, choose_tiles, device_kind, longest_window, on_tpu
from pallas_kernels.ring import RowOrder
from pallas_kernels.spec import AttentionSpec, Coordinates, PerHead
from pallas_kernels.tpu.packed_sinks import FEW_DOCUMENTS
from pallas_kernels.tpu.scheduled_backward import keys_at_once, scheduled_backward
from pallas_kernels.tpu.scheduled_forward import fits_vmem, scheduled_forward
from pallas_kernels.tpu.tiles import Call, Heads, with_scale
from pallas_kernels.tpu.walk import has_default_positions
from pallas_kernels.tpu.window import sink_slots, window_kernel_serves
from pallas_kernels.tpu.window_backward import window_backward
from pallas_kernels.tpu.window_forward import window_forward

# Numbers of keys of a head in VMEM. Beside more of them, blocks of 2048 did not fit a v5p; a v6e has room.
_MOST_BESIDE_LARGE_BLOCKS = 24576 * 128
# Queries of a block with full rows: small, so that it holds few others; backward, as wide as the widest matrix unit.
_FEW_FORWARD, _FEW_BACKWARD = 128, 256
_BEYOND_BLOCK = 1024  # of keys, and of queries where all blocks are visited


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
        spec=with_scale(spec, head_dim),
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


def attention_call(call: Call, where: Coordinates, head_dim: int, some_full_heads: bool, kind: str) -> Call:
    """The call with its kernel, and where one launch serves all heads that kernel's own tiles."""
    call = choose_kernel(call, where)
    return call if some_full_heads else with_own_tiles(call, where, head_dim, kind)


def is_indexed(where: Coordinates) -> bool:
    """Whether queries and keys lie where their index says; `coordinates` gives such an order as NumPy arrays."""
    return isinstance(where.q_order, np.ndarray) and where.q_order.shape == where.kv_order.shape


def choose_kernel(call: Call, where: Coordinates) -> Call:
    """Marks a call that the window kernels serve, its window cut to the sequence."""
    if not window_kernel_serves(call, where):
        return call
    assert call.spec.window is not None  # no window kernel without a window
    spec = dataclasses.replace(call.spec, window=min(call.spec.window, where.q_order.shape[1]))
    return dataclasses.replace(call, spec=spec, window_kernel=True)


def with_own_tiles(call: Call, where: Coordinates, head_dim: int, kind: str) -> Call:
    """The kernel's own tiles, for a call whose arrays no other kernel reads."""
    window = call.spec.window if call.window_kernel else None
    walk = not call.window_kernel and has_default_positions(call, where)
    if not (call.window_kernel or walk) or (walk and call.spec.num_sink_tokens):
        return call
    length = where.q_order.shape[1] // (1 if call.order is None else call.order.chunks)
    large = walk and ("v6" in kind or where.kv_order.shape[1] * head_dim <= _MOST_BESIDE_LARGE_BLOCKS)
    tiles = choose_tiles(kind, length, length, head_dim, window=window, walk=large)
    own = dataclasses.replace(call, tiles=tiles)
    # A large block would hold the sink tokens of many documents.
    return call if own.spec.num_sink_tokens and sink_slots(own, True) > FEW_DOCUMENTS else own


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
        q_seg=pad(where.q_seg, tiles.q_block, 1, 0),
        full_rows=pad(where.full_rows, tiles.q_block, 1, False),
        q_cos=pad(where.q_cos, tiles.q_block, 1, 0),
        q_sin=pad(where.q_sin, tiles.q_block, 1, 0),
    )


def pad_keys(where: Coordinates, tiles: Tiles) -> Coordinates:
    return where._replace(
        kv_pos=pad(where.kv_pos, tiles.kv_block, 1, -1),
        kv_order=pad(where.kv_order, tiles.kv_block, 1, -1),
        kv_seg=pad(where.kv_seg, tiles.kv_block, 1, 0),
    )


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


def forward(
    call: Call, q, k, v, head_bias, where: Coordinates, full_heads, initial: tuple[jax.Array, ...] = ()
) -> tuple[jax.Array, ...]:
    """out [B, H, T, D] and, for softmax, lse [B, H, 1, T] in base 2, of head-major, padded arrays and
    multiplied queries.

    Args:
      head_bias: [2, H] f32, ALiBi slopes and biases.
      initial: results over other keys, which these shall include.
    """
    results: tuple[jax.Array, ...] = ()
    for part, heads in _launches(call, k.shape[1], full_heads):
        if part.window_kernel and where.full_rows is not None:
            beyond, few = beyond_forward(part, k.shape[2], k.shape[3], k.dtype)
            window = window_forward(part if few else in_parts(part), q, k, v, head_bias, where, heads)
            arguments = q, k, v, head_bias, of_full_rows(where), heads
            results = scheduled_forward(beyond, *arguments, initial=window, few=few)
        elif part.window_kernel:
            results = window_forward(part, q, k, v, head_bias, where, heads, results)
        else:
            results = scheduled_forward(part, q, k, v, head_bias, where, heads, results, initial)
    return results


def backward(
    call: Call, q, k, v, head_bias, where: Coordinates, full_heads, dout, statistics, num_active=None, added=()
) -> tuple[jax.Array, ...]:
    """dq, dk, dv and, with a bias, its gradient by row [B, H, 1, T].

    Args:
      dout: [B, H, T, D].
      statistics: [B, H, 8, T] f32, lse in base 2 and delta, the rest unused; None for sigmoid.
      num_active: [] int32: query blocks behind so many have no cotangents; what is returned of them is undefined.
      added: dk and dv of other keys than a window's, to be added to these.
    """
    results: tuple[jax.Array, ...] = ()
    for part, heads in _launches(call, k.shape[1], full_heads):
        if part.window_kernel:
            tiles = backward_tiles(part.tiles, device_kind(), q.shape[3], part.spec.window)
            window = dataclasses.replace(part, tiles=tiles)
            results = window_backward(window, q, k, v, head_bias, where, heads, dout, statistics, results)
            if where.full_rows is not None:
                beyond, few = beyond_backward(part, k.shape[2], k.shape[3], k.dtype)
                arguments = q, k, v, head_bias, of_full_rows(where), heads, dout, statistics
                results = _with_full_rows(functools.partial(scheduled_backward, beyond, *arguments), few, results)
        else:
            results = scheduled_backward(
                part, q, k, v, head_bias, where, heads, dout, statistics, results, num_active, added
            )
    return results


def _with_full_rows(
    sweep: Callable[..., tuple[jax.Array, ...]], few: bool, results: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
    """The window's gradients, and those of a sweep over what full rows see beside it."""
    if few:
        dq, dk, dv, *dbias = results
        return sweep(added=(dk, dv), of_few=(dq, *dbias))
    return tuple(a + b for a, b in zip(results, sweep(), strict=True))


def in_parts(call: Call) -> Call:
    return dataclasses.replace(call, in_parts=True)


def by_position(call: Call) -> Call:
    """Of queries whose index says nothing."""
    return dataclasses.replace(call, indexed=False, order=None)


def beyond_forward(call: Call, length: int, head_dim: int, dtype) -> tuple[Call, bool]:
    """The call of what full rows see beside what a window kernel has done for all rows, and whether it is to walk over
    the blocks with full rows alone, which takes all keys in VMEM."""
    few = fits_vmem(length, head_dim, dtype)
    return _beyond(call, _FEW_FORWARD if few else _BEYOND_BLOCK), few


def beyond_backward(call: Call, length: int, head_dim: int, dtype) -> tuple[Call, bool]:
    """As `beyond_forward`, of the backward pass."""
    of_few = _beyond(call, _FEW_BACKWARD)
    few = keys_at_once(of_few, length, head_dim, jnp.dtype(dtype).itemsize)[1]
    return (of_few if few else _beyond(call, _BEYOND_BLOCK)), few


def _beyond(call: Call, q_block: int) -> Call:
    q_block, kv_block = math.gcd(call.tiles.q_block, q_block), math.gcd(call.tiles.kv_block, _BEYOND_BLOCK)
    tiles = dataclasses.replace(call.tiles, q_block=q_block, kv_block=kv_block)
    return dataclasses.replace(by_position(call), outside=True, window_kernel=False, tiles=tiles)


def of_full_rows(where: Coordinates) -> Coordinates:
    """The full rows as the only ones that see anything, for what these see beside the window."""
    assert where.full_rows is not None
    position = jnp.where(where.full_rows, jnp.asarray(where.q_pos), -1)
    return where._replace(q_pos=position, full_rows=None)


def _launches(call: Call, kv_heads: int, full_heads) -> list[tuple[Call, Heads]]:
    """One launch for all heads; or one for the windowed and one for the full ones."""
    if full_heads is None:
        return [(call, Heads(kv_heads))]
    order = jnp.argsort(full_heads, stable=True).astype(jnp.int32)
    num_full = full_heads.sum(dtype=jnp.int32)
    full = dataclasses.replace(call, spec=dataclasses.replace(call.spec, window=None), window_kernel=False)
    return [(call, Heads(kv_heads - num_full, order)), (full, Heads(num_full, order[::-1]))]
