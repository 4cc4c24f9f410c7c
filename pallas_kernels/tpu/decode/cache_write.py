"""Writing a decoding step's keys and values into cache pools in place, in the layout that the decode kernel reads."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.blocks import on_tpu
from pallas_kernels.math.parts import vary_alike
from pallas_kernels.tpu.tile.tiles import LANES, shape_like


def write_pool(pool: jax.Array, slots: jax.Array, values: jax.Array, entries: jax.Array) -> jax.Array:
    """Puts values [B, K, D] at `entries` [B] of rows `slots` [K] of a pool [rows, B, S, D]; absent ones are dropped.

    XLA's scatter insists on a layout of its own for some shapes; between two reads it would copy the whole pool there
    and back. This one reads, changes and writes back the tile around each new entry, in the layout that is read.
    """
    batch, kv_heads, head_dim = values.shape
    by_lanes = head_dim % LANES != 0
    num_entries = pool.shape[2]
    interpret = not on_tpu()
    size = 1 if interpret else LANES if by_lanes else 8  # of the tile; an interpreter has none
    view = pool.swapaxes(2, 3) if by_lanes else pool
    values = values.astype(jnp.float32).reshape(batch * kv_heads, head_dim)
    values = values[:, :, None] if by_lanes else values[:, None]
    tile = (head_dim, size) if by_lanes else (size, head_dim)

    def kernel(slots, entries, values_ref, _, pool, buffer, arrived):
        def each(do) -> None:
            """`do(i, tile in the pool)` for the i-th (sequence, head) that is here."""

            def one(i, _):
                sequence, head = lax.div(i, kv_heads), lax.rem(i, kv_heads)
                span = pl.ds(pl.multiple_of(lax.div(entries[sequence], size) * size, size), size)
                place = (slots[head], sequence, *((slice(None), span) if by_lanes else (span,)))
                present = (slots[head] < pool.shape[0]) & (entries[sequence] < num_entries)
                pl.when(present)(lambda: do(i, pool.at[place]))

            lax.fori_loop(0, batch * kv_heads, one, None)

        def change(i, _) -> None:
            entry = lax.rem(entries[lax.div(i, kv_heads)], size)
            new = lax.broadcasted_iota(jnp.int32, tile, 1 if by_lanes else 0) == entry
            old = buffer[i].astype(jnp.float32)
            changed = jnp.where(new, jnp.broadcast_to(values_ref[i], tile), old)
            buffer[i] = changed.astype(buffer.dtype)

        each(lambda i, source: pltpu.make_async_copy(source, buffer.at[i], arrived).start())
        each(lambda i, source: pltpu.make_async_copy(source, buffer.at[i], arrived).wait())
        each(change)
        each(lambda i, target: pltpu.make_async_copy(buffer.at[i], target, arrived).start())
        each(lambda i, target: pltpu.make_async_copy(buffer.at[i], target, arrived).wait())

    slots, entries, values, view = vary_alike((slots, entries, values, view))
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    out = pl.pallas_call(
        kernel,
        out_shape=shape_like(view.shape, view.dtype, view),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(),
            in_specs=[pl.BlockSpec(memory_space=pltpu.VMEM), anywhere],
            out_specs=anywhere,
            scratch_shapes=[pltpu.VMEM((batch * kv_heads, *tile), pool.dtype), pltpu.SemaphoreType.DMA(())],
        ),
        input_output_aliases={3: 0},
        interpret=interpret,
        name="write_pool",
    )(slots.astype(jnp.int32), entries.astype(jnp.int32), values, view)
    return out.swapaxes(2, 3) if by_lanes else out
