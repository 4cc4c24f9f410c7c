"""What plans go by, beside real chips: counted cycles beside timings, and planned MFU beside published.

tokamax ships the times that its authors took on TPU7x chips when they chose its tiles. One head of each of these calls,
with those tiles, is counted as `swa-jax bench cycles` counts a kernel, and told in milliseconds for all heads at the
clock of `swa_jax.base.chips`. MaxText publishes the MFU of its own training runs; ours is that of the plans in
docs/plans. The runs are not the same: MaxText has its own kernels, collectives and remat.
"""

import argparse
import functools
import importlib.util
import json
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from scripts.compare.peers import PeerCall, work
from scripts.compare.runner import ROOT, Cell, Comparison, Done, key_of, markdown
from swa_jax.base.chips import TARGETS
from swa_jax.base.errors import ConfigError
from swa_jax.base.files import read_json

CHIP = "v7x"
TIMINGS = {"forward": "pallas_mosaic_tpu_splash_attention", "backward": "pallas_mosaic_tpu_splash_attention_vjp"}
LENGTHS, HEAD_DIMS, HEADS = (8192, 32768, 131072), (128, 256), 32


class Published(NamedTuple):
    """A training run of MaxText's, and our plan of the nearest one; `source` is the page in its repository (August
    2026)."""

    run: str
    mfu: float  # per cent
    source: str
    plan: str
    difference: str


TIERS, V5P = "docs/reference/models/tiering.md", "src/maxtext/configs/tpu/v5p/README.md"
PUBLISHED = (
    Published("Llama 2 70B, T 4096, 512 chips of v5p", 65.4, TIERS, "llama-70b-v5p-4x4x4", "64 chips"),
    Published("64B, one slice of v5p-128", 70.3, V5P, "llama-70b-v5p-4x4x4", "Llama 2 70B"),
    Published("Llama 3.1 8B, T 8192, 256 chips of v6e", 45.5, TIERS, "qwen3-8b-bosch-v6e-16x16", "windows, T 32768"),
)


class Timed(NamedTuple):
    """A call of `HEADS` query heads over 8 KV heads, and the call that counts one head of it."""

    call: PeerCall
    milliseconds: float  # the median of five


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS, help="default: %(default)s")


def timings(lengths: tuple[int, ...]) -> list[Timed]:
    """The calls that were timed: causal, as many keys as queries, no dropout. Raises ConfigError without tokamax."""
    library = importlib.util.find_spec("tokamax")
    if library is None or library.origin is None:
        raise ConfigError("the timings are in tokamax, which is not installed: pip install tokamax")
    folder = Path(library.origin).parent / "data" / "autotuning" / "tpu7x"
    found = [one for pass_, file in TIMINGS.items() for one in _read(pass_, read_json(folder / f"{file}.json"))]

    def shape(one: Timed) -> tuple[int, ...]:
        return tuple(one.call.settings[name] for name in "TD")

    return sorted((one for one in found if shape(one)[0] in lengths and shape(one)[1] in HEAD_DIMS), key=shape)


def _read(pass_: str, table: dict[str, Any]) -> Iterator[Timed]:
    for key, tiles in table.items():
        given = json.loads(key)
        q, k, v = (tuple(map(int, re.findall(r"\d+", given[name].partition("[")[2]))) for name in "qkv")
        alike = q == (HEADS, *k[1:]) and k == v and given["mask"]["is_causal"]
        if not alike or given["dropout_rate"]:
            continue
        for chosen, times in tiles.items():
            shape = {"T": q[1], "D": q[2], "window": None}
            settings = shape | _tiles(pass_, json.loads(chosen))
            if pass_ == "forward":
                settings["residuals"] = given["return_residuals"]
            call = PeerCall(f"tokamax_splash_{pass_}", CHIP, settings)
            yield Timed(call, statistics.median(times["evaluation_times_ms"]))


def _tiles(pass_: str, chosen: dict[str, Any]) -> dict[str, Any]:
    """tokamax's names of tiles as settings of `swa-jax bench cycles`."""
    if pass_ == "backward":
        sizes = {name: chosen[f"{name}_dkv"] for name in ("block_q", "block_kv")}
        return sizes | {"block_kv_compute": chosen["block_kv_dkv_compute"], "dq_steps": chosen["dq_reduction_steps"]}
    sizes = {name: chosen[name] for name in ("block_q", "block_kv", "block_kv_compute")}
    minor = {f"{name}_minor": chosen[f"{name}_layout"] == 2 for name in "qkv"}
    return sizes | minor | {"scheduler": chosen["use_experimental_scheduler"]}


def comparison(options: argparse.Namespace) -> Comparison:
    timed = timings(tuple(options.lengths))
    cells = [Cell(one.call.key, functools.partial(work, one.call)) for one in timed]
    return Comparison("chips", cells, lambda done: (f"{of_kernels(timed, done)}\n\n{of_plans()}", []))


def of_kernels(timed: list[Timed], done: Done) -> str:
    """A row for each call: its time, and the counted one with its error, of the kernel and of the whole program."""
    rows, errors = [], []
    for call, milliseconds in timed:
        shape = call.settings
        pass_ = call.function.rpartition("_")[2] + (" with residuals" if shape.get("residuals") else "")
        row = [f"{shape['T']}", f"{shape['D']}", pass_, f"{milliseconds:.3f}"]
        found = done.get(key_of(*call.key), {})
        for name in ("kernel_cycles", "cycles"):
            if (cycles := found.get(name)) is None:
                row.append("-")
                continue
            counted = cycles * HEADS * shape["T"] / 1024 / (TARGETS[CHIP].gigahertz * 1e6)
            error = counted / milliseconds - 1
            row.append(f"{counted:.3f} ({100 * error:+.0f} %)")
            errors += [abs(error)] if name == "cycles" else []
        rows.append(row)
    head = ["T", "head_dim", "pass", "timed, ms", "counted: kernel", "counted: program"]
    table = markdown(head, rows)
    if not errors:
        return table
    mean, most = (f"{100 * number:.0f} %" for number in (statistics.mean(errors), max(errors)))
    return f"{table}\n\nError of the program, {len(errors)} calls: {mean} in the mean, {most} at most."


def of_plans() -> str:
    rows = []
    for run, mfu, source, name, difference in PUBLISHED:
        planned = 100 * read_json(ROOT / "docs" / "plans" / f"{name}.json")["time"]["mfu_scheduled"]
        rows.append([run, f"{mfu:.1f}", f"{planned:.1f}", f"`{name}`: {difference}", f"`{source}`"])
    return markdown(["MaxText's run", "published MFU, %", "planned MFU, %", "our plan", "source"], rows)
