"""The rows of a table by token, on one device or a mesh."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from swa_jax.model.sharding import Partition, whole


def rows_of(table: jax.Array, tokens: jax.Array, partition: Partition | None = None) -> jax.Array:
    """table [V, d], tokens [B, T] int32 -> [B, T, d]; NaN for a token that the table does not have.

    On a mesh each device gathers the table's channels, as it does the layers' weights, and looks its own tokens up in
    its part of the vocabulary. XLA by itself would gather the tokens of all rows, and sum the gradient on every device.
    """
    if partition is None:
        return _rows(table, tokens)
    split = partition.size("vocab") > 1

    def local(table: jax.Array, tokens: jax.Array) -> jax.Array:
        table = whole(table, partition, "embed", 1)
        if not split:
            return _rows(table, tokens)
        (axis,) = partition.rules.axes("vocab")
        own = tokens - jax.lax.axis_index(axis) * len(table)
        mine = (own >= 0) & (own < len(table))
        known = (tokens >= 0) & (tokens < len(table) * partition.size("vocab"))
        return jax.lax.psum(jnp.where((mine | ~known)[..., None], _rows(table, own), 0), axis)

    return jax.shard_map(
        local,
        mesh=partition.mesh,
        in_specs=(partition.spec("vocab", "embed"), partition.spec("batch", "sequence")),
        out_specs=partition.spec("batch", "sequence", None),
        check_vma=False,  # as in `loss`
    )(table, tokens)


def _rows(table: jax.Array, tokens: jax.Array) -> jax.Array:
    return table.at[tokens].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
