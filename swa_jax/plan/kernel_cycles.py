"""What the TPU kernels cost by static measurement: a table that `swa-jax bench cycles --write` fills.

A row of `kernel_cycles.json` has the cycles of one call's kernels per 1024 query rows and head, on one core, without
what XLA does around them, and the command that measured them. `add_rows` adds those of calls that it lacks.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

TABLE = Path(__file__).with_name("kernel_cycles.json")
Row = dict[str, Any]
# What rotating the queries adds (RoPE), at most, in cycles per 1024 query rows and head; the table is without. "rows"
# is what it adds to the memory's time of moving routed rows there and back. Measured on v6e with
# `swa-jax bench cycles NAME --set rotated=true`: docs/kernels.md.
ROTATING = {"forward": 300, "backward": 640, "rows": 280}


class MeasuredCall(NamedTuple):
    """What a row is found by, its window and length aside.

    Attributes:
      function: of `swa_jax.bench.tpu_kernels`.
      packed: whether segment ids are given.
      group: query heads of a KV head.
    """

    chip: str
    function: str
    head_dim: int
    packed: bool = False
    num_sink_tokens: int = 0
    group: int = 1


class MissingCall(NamedTuple):
    """A call that the table has no row for; `window` None is full attention."""

    call: MeasuredCall
    window: int | None


class Cost(NamedTuple):
    """Cycles per 1024 query rows and head of a call on rows of `length` tokens."""

    cycles: float
    length: int


def find_cost(call: MeasuredCall, window: int | None, rows: Sequence[Row] | None = None) -> Cost | None:
    """The cost of a call by the table; None where it has no row for it.

    Rows with fewer query heads a KV head stand in for the call, and rows without segment ids for one that has them; of
    these, the table's nearest are taken. Cycles grow linearly with the window, and are interpolated so. Below the
    smallest window of the table they are that one's, which is too much rather than too little; above the largest they
    grow with the keys.

    Args:
      window: visible keys; None is full attention.
    """
    rows = read_table() if rows is None else rows
    alike = [
        row
        for row in rows
        if all(row[name] == value for name, value in call._asdict().items() if name not in ("packed", "group"))
        and row["packed"] <= call.packed
        and row["group"] <= call.group
    ]
    nearest = max(((row["group"], row["packed"]) for row in alike), default=None)
    found = [row for row in alike if (row["group"], row["packed"]) == nearest]
    found.sort(key=lambda row: row["window"] or 0)
    if window is None or not found or found[0]["window"] is None:
        same = [row for row in found if row["window"] is None]
        return Cost(same[0]["cycles"], same[0]["length"]) if same else None
    above = next((row for row in found if row["window"] >= window), None)
    if above is None:
        last = found[-1]
        return Cost(last["cycles"] * window / last["window"], last["length"])
    below = [row for row in found if row["window"] < window]
    if not below or above["window"] == window:
        return Cost(above["cycles"], above["length"])
    part = (window - below[-1]["window"]) / (above["window"] - below[-1]["window"])
    cycles = below[-1]["cycles"] + part * (above["cycles"] - below[-1]["cycles"])
    return Cost(cycles, min(above["length"], below[-1]["length"]))


def read_table() -> tuple[Row, ...]:
    return (*_shipped(), *_added)


def add_rows(rows: Sequence[Row]) -> None:
    """Adds rows to the table for as long as this process runs: those of the calls of one model, since a row stands in
    for calls with other windows."""
    _added.extend(rows)


_added: list[Row] = []


@functools.cache
def _shipped() -> tuple[Row, ...]:
    return tuple(json.loads(TABLE.read_text())["rows"])
