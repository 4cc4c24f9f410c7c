"""Simulates single calls for plans, and keeps each row until libtpu, JAX or the code that it follows from changes."""

import functools
import importlib.metadata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pallas_kernels
from swa_jax.base.errors import ConfigError
from swa_jax.base.files import cache_folder, read_json, sum_of_json, write_json
from swa_jax.bench.cycle_table import Row, missing_figure, row_of
from swa_jax.bench.cycles import measure

LENGTH = 8192  # tokens of a row at least; four windows, so that the first ones do not weigh
Say = Callable[[str], None]


def simulated_row(function: str, chip: str, settings: dict[str, Any], say: Say = lambda line: None) -> Row | None:
    """The row of a call whose rows have segment ids, or of the same call without them; None where neither has a figure.

    Takes a minute or two the first time. `say` is given a line before it is simulated, and one where it cannot be.

    Args:
      function: of `swa_jax.bench.tpu_kernels`.
      settings: H, K, D, window and num_sink_tokens.
    """
    file = cache_folder("kernel-cycles") / f"{sum_of_json([function, chip, settings, _code()])}.json"
    if file.exists():
        return read_json(file)["row"]
    say(f"simulating {function}, which the table of cycles lacks: a minute or two, once; kept in {file.parent}")
    window = settings["window"]
    given = settings | {"T": max(LENGTH, 0 if window is None else -(-4 * window // 1024) * 1024)}
    packed = () if function.startswith("sigmoid") else ({"packed": True},)  # the sigmoid kernels have one way only
    row, why = None, None
    for more in (*packed, {}):
        try:
            measured = measure(function, chip, given | more)
        except ConfigError as error:  # too much for the chip's VMEM, or for the time that is given
            say(f"{error}; its time is assumed")
            return None
        why = missing_figure(measured)
        if why is None:
            row = row_of(measured)
            break
    if row is None:
        say(f"{why}; its time is assumed")
    write_json(file, {"row": row})
    return row


@functools.cache
def _code() -> str:
    """A sum over everything that a count depends on."""
    folders = (Path(pallas_kernels.__file__).parent, Path(__file__).parent)
    files = sorted(file for folder in folders for file in folder.rglob("*") if file.suffix in (".py", ".json"))
    versions = [importlib.metadata.version(name) for name in ("jax", "libtpu")]
    return sum_of_json([versions, [file.read_text() for file in files]])
