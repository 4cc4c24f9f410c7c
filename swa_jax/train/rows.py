"""The rows of a batch as the devices of a mesh hold them: in their own order, or in zig-zag order."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax

from pallas_kernels.math.spec import segment_positions
from swa_jax.model.pattern import AttentionPattern
from swa_jax.model.sequence_order import SequenceOrder, in_zigzag, zigzag
from swa_jax.model.sharding import Partition, constrain

Batch = dict[str, jax.Array]


class Rows(NamedTuple):
    """What a pass through a model reads of a batch."""

    partition: Partition | None
    tokens: jax.Array  # [B, T] int32
    segment_ids: jax.Array  # [B, T] int32
    positions: jax.Array | None  # [B, T] int32; None: they follow from the segments

    def as_held[X](self, arrays: X) -> X:
        """Arrays [B, T, ...] of the batch, in the order of the rows' tokens."""
        return _as_held(self.partition, arrays)


def held_rows(
    batch: Batch,
    partition: Partition | None,
    order: SequenceOrder,
    patterns: Sequence[AttentionPattern],
    *,
    dropping: bool = False,
) -> Rows:
    """A batch's rows for passes under `patterns`. `dropping`: dropout is drawn for the places of a row, which it is not
    to lose its order for."""
    ids, segments = batch["tokens"], batch["segment_ids"]
    pieces = 1 if partition is None or dropping else partition.size("sequence")
    if partition is None or not in_zigzag(order, patterns, ids.shape[1], pieces):
        return Rows(partition, ids, segments, None)
    layout = dataclasses.replace(partition, zigzag=True)
    return Rows(layout, *_as_held(layout, (ids, segments, segment_positions(segments))))


def _as_held[X](layout: Partition | None, arrays: X) -> X:
    if layout is None or not layout.zigzag:
        return arrays
    pieces = layout.size("sequence")
    return jax.tree.map(lambda x: constrain(zigzag(x, pieces), layout, "batch", "sequence"), arrays)
