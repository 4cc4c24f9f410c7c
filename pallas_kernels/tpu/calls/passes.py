"""Runs the launches of one set of keys: `launches` has made the list."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.math.spec import Coordinates
from pallas_kernels.tpu.calls.launches import Launch
from pallas_kernels.tpu.schedule.scheduled_backward import scheduled_backward
from pallas_kernels.tpu.schedule.scheduled_forward import scheduled_forward
from pallas_kernels.tpu.tile.tiles import LaunchHeads, OutGradients, TpuOperands
from pallas_kernels.tpu.window.geometry import packed_segments
from pallas_kernels.tpu.window.sink_gradients import add_to_sinks
from pallas_kernels.tpu.window.window_backward import window_backward
from pallas_kernels.tpu.window.window_forward import window_forward


def forward(launches: Sequence[Launch], x: TpuOperands, initial: tuple[jax.Array, ...] = ()) -> tuple[jax.Array, ...]:
    """out [B, H, T, D] and, for softmax, lse [B, H, 1, T] in base 2.

    Args:
      initial: results over other keys, which these shall include.
    """
    served, results = _heads(x), tuple[jax.Array, ...]()
    for one in launches:
        call, heads = one.call, served[one.heads]
        here = x._replace(where=of_full_rows(x.where)) if one.full_rows else x
        if one.kernel == "window_forward":
            results = window_forward(call, x, heads, results)
        elif one.full_rows:
            results = scheduled_forward(call, here, heads, initial=results, listed=one.listed)
        else:
            results = scheduled_forward(call, x, heads, results, initial)
    return results


def backward(
    launches: Sequence[Launch], x: TpuOperands, gradients: OutGradients, num_active=None, added=()
) -> tuple[jax.Array, ...]:
    """dq, dk, dv and, with a bias, its gradient by row [B, H, 1, T].

    Args:
      num_active: [] int32: query blocks behind so many have no cotangents; what is returned of them is undefined.
      added: dk and dv of other keys than a window's, to be added to these.
    """
    served, results, segments = _heads(x), tuple[jax.Array, ...](), None
    for one in launches:
        call, here = one.call, x._replace(where=of_full_rows(x.where)) if one.full_rows else x
        arrays = here, served[one.heads], gradients
        if one.kernel == "window_backward":
            segments = None if x.where.q_segment_ids is None else packed_segments(call, x.where)
            results = window_backward(call, *arrays, segments, results)
        elif one.kernel == "window_sink_gradients":
            results = add_to_sinks(call, segments, results)
        elif one.listed:
            dq, dk, dv, *dbias = results
            results = scheduled_backward(call, *arrays, added=(dk, dv), listed_results=(dq, *dbias))
        elif one.full_rows:
            more = scheduled_backward(call, *arrays)
            results = tuple(a + b for a, b in zip(results, more, strict=True))
        else:
            results = scheduled_backward(call, *arrays, results, num_active, added)
    return results


def of_full_rows(where: Coordinates) -> Coordinates:
    """The full rows as the only ones that see anything, for what these see outside the window."""
    assert where.full_rows is not None
    position = jnp.where(where.full_rows, jnp.asarray(where.q_pos), -1)
    return where._replace(q_pos=position, full_rows=None)


def _heads(x: TpuOperands) -> dict[str, LaunchHeads]:
    """The heads of a launch, by `Launch.heads`."""
    kv_heads, full_heads = x.k.shape[1], x.full_heads
    every = {"all": LaunchHeads(kv_heads)}
    if full_heads is None:
        return every
    order = jnp.argsort(full_heads, stable=True).astype(jnp.int32)
    num_full = full_heads.sum(dtype=jnp.int32)
    return every | {"windowed": LaunchHeads(kv_heads - num_full, order), "full": LaunchHeads(num_full, order[::-1])}
