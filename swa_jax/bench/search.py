"""Tries tile sizes on this machine's device, and keeps the fastest as rows of a table (`pallas_kernels.blocks`)."""

import dataclasses
import functools
import itertools
import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from pallas_kernels.blocks import FIELDS, Row, preferring
from swa_jax.base.errors import ConfigError
from swa_jax.base.files import read_json, write_text
from swa_jax.bench.attention import Result, measure
from swa_jax.bench.candidates import BenchCase, Candidate, Program, Runner, ours

# By platform and pass of a case: the kernels that it runs and that have tiles of their own.
KERNELS = {
    "tpu": {"forward": ("forward",), "forward+backward": ("backward",), "decode": ()},
    "gpu": {"forward": ("forward",), "forward+backward": ("dq", "dkv"), "decode": ("decode",)},
}
TRIED = {
    "tpu": {"block": (512, 1024, 2048), "strip": (128, 256), "tile": (128, 256, 512)},
    "gpu": {"q_block": (32, 64, 128), "kv_block": (32, 64, 128), "num_warps": (4, 8), "num_stages": (2, 3, 4)},
}


def device_key(platform: str, case: BenchCase) -> Row:
    """What rows for this machine's device and the case are found by, the kernel aside."""
    if platform == "tpu":
        kind = jax.devices()[0].device_kind
        return {"chip": kind, "head_dim": case.head_dim, "window": case.window}
    from pallas_kernels.gpu.triton import compute_capability

    itemsize = jax.numpy.dtype(case.dtype).itemsize
    return {"capability": compute_capability(), "head_dim": case.head_dim, "itemsize": itemsize}


def rows_to_try(platform: str, kernel: str, key: Row) -> list[Row]:
    """One row for each combination of sizes; on GPUs a decoding step's queries are one block of their own."""
    sizes = dict(TRIED[platform])
    if kernel == "decode":
        sizes["q_block"] = (16,)
    combinations = itertools.product(*sizes.values())
    return [{"pass": kernel} | key | dict(zip(sizes, values, strict=True)) for values in combinations]


def search(case: BenchCase, rounds: int) -> Iterator[tuple[Row, tuple[Result, ...]]]:
    """For each kernel of the case: the winning row, and the results of all, the present tiles first.

    Raises:
      ConfigError: the device has no tile sizes to search.
    """
    platform = jax.default_backend()
    if platform not in KERNELS:
        raise ConfigError(f"--search has tile sizes to try on TPUs and GPUs, but JAX runs on {platform}")
    if platform == "tpu" and case.window is None:
        return  # the table's rows are for windows
    present = ours(platform)[0]
    key = device_key(platform, case)
    for kernel in KERNELS[platform][case.which]:
        rows = rows_to_try(platform, kernel, key)
        tried = compiled([with_row(present, platform, row) for row in rows], case)
        results = measure(case, [present, *tried], rounds).results
        yield winner(rows, results[1:], case, str(key.get("chip", jax.devices()[0].device_kind))), results


def with_row(candidate: Candidate, platform: str, row: Row) -> Candidate:
    """The candidate with other tiles: they are chosen while it is traced."""

    def prepare(case: BenchCase) -> Runner:
        program = candidate.prepare(case)
        assert isinstance(program, Program)
        with preferring(platform, [row]):
            return dataclasses.replace(program, function=program.function.lower(*program.arguments))

    sizes = " ".join(f"{name}={row[name]}" for name in TRIED[platform])
    return candidate._replace(name=sizes, prepare=prepare)


def compiled(candidates: Sequence[Candidate], case: BenchCase) -> list[Candidate]:
    """Those candidates of `with_row`, compiled side by side; what fails raises when it is prepared."""

    def prepared(program: Program, compiling: Future, case: BenchCase) -> Runner:
        return dataclasses.replace(program, function=compiling.result())

    def refused(error: Exception, case: BenchCase) -> Runner:
        raise error

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        done = []
        for candidate in candidates:
            try:
                program = candidate.prepare(case)
                assert isinstance(program, Program)
            except Exception as error:  # what refuses a tile must not end the search
                done.append(candidate._replace(prepare=functools.partial(refused, error)))
                continue
            compiling = pool.submit(program.function.compile)
            done.append(candidate._replace(prepare=functools.partial(prepared, program, compiling)))
    return done


def winner(rows: Sequence[Row], results: Sequence[Result], case: BenchCase, device: str) -> Row:
    """The row with the least median ratio, its source beside it."""
    timed = [(result.ratio, i) for i, result in enumerate(results) if result.ratio is not None]
    if not timed:
        raise ConfigError(f"no tile sizes ran for {case.which}: {results[0].missing}")
    ratio, best = min(timed)
    source = (
        f"swa-jax bench attention --search, {device}, T={case.length} window={case.window} H={case.heads} "
        f"K={case.kv_heads} batch={case.batch}: {ratio:.3f} of the time before"
    )
    return rows[best] | {"source": source}


def write_rows(file: Path, platform: str, rows: Sequence[Row]) -> None:
    """Adds rows to a table, in place of those that are found by the same key."""
    table: dict[str, list[dict[str, Any]]] = read_json(file) if file.exists() else {}
    key = FIELDS[platform][0]
    new = {tuple(row[name] for name in key): row for row in rows}
    old = {tuple(row[name] for name in key): row for row in table.get(platform, [])}
    table = {name: table.get(name, []) for name in FIELDS} | {platform: list((old | new).values())}
    lines = [f"  {json.dumps(name)}: [\n{_listed(rows)}\n  ]" for name, rows in table.items()]
    write_text(file, "{\n" + ",\n".join(lines) + "\n}\n")


def _listed(rows: Sequence[Row]) -> str:
    return ",\n".join(f"    {json.dumps(row)}" for row in rows)
