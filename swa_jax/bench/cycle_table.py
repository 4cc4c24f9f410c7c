"""The table of what kernels cost (`swa_jax.plan.kernel_cycles`), which plans read: rows from measurements."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from swa_jax.base.errors import ConfigError
from swa_jax.base.files import read_json, write_text
from swa_jax.bench import tpu_kernels
from swa_jax.bench.cycles import COUNTED, CycleCount

# What a row can tell of a call; figures with other settings are of other calls.
SETTINGS = ("H", "K", "T", "D", "window", "packed", "num_sink_tokens")
Row = dict[str, Any]
FUNCTIONS = tuple(
    f"{what}_{which}"
    for what in ("window", "full", "sigmoid", "routed")
    for which in ("forward", "backward")
    if (what, which) != ("routed", "backward")
)


def check_writable(functions: Sequence[str], settings: dict[str, Any]) -> None:
    """Raises `ConfigError` for what the table has no rows for, before anything is compiled."""
    for name in functions:
        if name not in FUNCTIONS:
            raise ConfigError(f"--write takes no {name}: the table is of {', '.join(FUNCTIONS)}")
    for name in settings:
        if name not in SETTINGS:
            raise ConfigError(
                f"--write takes no --set {name}: a row of the table tells calls apart by {', '.join(SETTINGS)}"
            )


def missing_figure(measurement: CycleCount) -> str | None:
    """Why a measurement makes no row, in a sentence; None where its kernels have a figure."""
    kernels = [op for op in measurement.ops if op.name in measurement.kernels]
    # Counted, and not simulated, each step of a window kernel would run the body for a document's edge.
    edges = measurement.function.startswith("window") and measurement.settings.get("packed", False)
    counted = edges and any(op.source == COUNTED for op in kernels)
    if measurement.kernel_cycles_per_1024 is not None and not counted:
        return None
    unknown = [op.source for op in kernels if op.cycles is None]
    if counted:
        unknown = ["its steps are counted as if an edge of a document crossed each; measure it without packed"]
    why = "; ".join([*unknown, *measurement.notes]) or "there are fewer than 1024 query rows"
    return f"{measurement.function} on {measurement.chip} with {measurement.settings} makes no row: {why}"


def row_of(measurement: CycleCount) -> Row:
    """The row of a measurement that has a figure, with the command that made it."""
    name, settings, cycles = measurement.function, measurement.settings, measurement.kernel_cycles_per_1024
    assert cycles is not None
    _, (q, *_) = tpu_kernels.FUNCTIONS[name](**settings)  # [1, H, T, D]; nothing is computed
    options = "".join(f" --set {key}={json.dumps(value)}" for key, value in settings.items())
    kernels = [op for op in measurement.ops if op.name in measurement.kernels]
    return {
        "chip": measurement.chip,
        "function": name,
        "head_dim": settings.get("D", 128),
        "window": None if name.startswith("full") else settings.get("window", 1024),
        "packed": bool(settings.get("packed", False)),
        "num_sink_tokens": settings.get("num_sink_tokens", 0),
        "group": settings.get("H", 1) // settings.get("K", 1),
        "length": q.shape[-2],
        "cycles": round(cycles, 1),
        "how": ", ".join(sorted({op.source for op in kernels})),
        "source": f"swa-jax bench cycles {name} --chip {measurement.chip}{options} "
        f"(libtpu {importlib.metadata.version('libtpu')})",
    }


def write_row(file: Path, measurement: CycleCount) -> str | None:
    """Adds a measurement to a table, in place of an earlier one of the same call; or says why it cannot."""
    if (missing := missing_figure(measurement)) is not None:
        return missing
    new = row_of(measurement)
    key = ("chip", "function", "head_dim", "window", "packed", "num_sink_tokens", "group")
    old = read_json(file)["rows"] if file.exists() else []
    rows = [row for row in old if any(row[name] != new[name] for name in key)] + [new]
    rows.sort(key=lambda row: [row["window"] or 0 if name == "window" else row[name] for name in key])
    lines = ",\n".join(f"    {json.dumps(row)}" for row in rows)
    write_text(file, f'{{\n  "rows": [\n{lines}\n  ]\n}}\n')
    return None
