"""The verbs `swa-jax bench cycles`, `swa-jax bench attention` and `swa-jax bench generation`."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Argument, Option

from swa_jax.base.errors import ConfigError
from swa_jax.base.files import write_json
from swa_jax.cli.groups import Options, expand
from swa_jax.cli.options import (
    BatchSize,
    ComputeDtype,
    Json,
    Model,
    Seed,
    SinkTokens,
    WindowSize,
    check_output,
    check_window,
    find_model,
    in_output,
    in_pattern,
    in_prompts,
    in_running,
    note_context,
    panel,
    print_report,
    show,
    write_report,
)
from swa_jax.model.window import Window

if TYPE_CHECKING:
    from swa_jax.bench.candidates import BenchCase

app = typer.Typer(no_args_is_help=True, help="Measure the attention kernels, and what a pattern saves.")


@app.command()
def cycles(
    names: Annotated[
        list[str] | None,
        Argument(
            metavar="[NAME]...",
            help="Functions of swa_jax/bench/tpu_kernels.py. Default: all of them. From other libraries: "
            "jax_splash_forward, tokamax_splash_forward, flywheel_forward, and the same with backward.",
        ),
    ] = None,
    chip: Annotated[list[str] | None, Option(help="v5e, v5p, v6e or v7x, repeatable. Default: v6e.")] = None,
    set_: Annotated[
        list[str] | None,
        Option("--set", metavar="NAME=VALUE", help="A setting of them, such as T=8192 or window=2048, repeatable."),
    ] = None,
    ops: Annotated[int, Option(help="Ops to list below each total.", min=0)] = 4,
    as_json: Json = False,
    write: Annotated[
        Path | None, Option(help="Add the kernels' cycles to this table, such as swa_jax/plan/kernel_cycles.json.")
    ] = None,
) -> None:
    """Cycles of the TPU kernels, by libtpu's own simulator: no TPU is needed. Takes seconds a function and chip."""
    from swa_jax.bench.cycle_table import check_writable, write_row
    from swa_jax.bench.cycles import check, measure, read_settings
    from swa_jax.bench.tpu_kernels import FUNCTIONS
    from swa_jax.report.bench_tables import HOW_TO_READ_CYCLES, cycles_table
    from swa_jax.report.progress import counted

    settings = read_settings(set_ or [])
    functions, chips = names or list(FUNCTIONS), chip or ["v6e"]
    check(functions, chips, settings)
    check_output("--write", write)
    if write is not None:
        check_writable(functions, settings)
    measured = []
    if not as_json:
        typer.echo(HOW_TO_READ_CYCLES)
    with counted("kernels compiled", len(functions) * len(chips), at_once=False) as advance:
        for name, target in itertools.product(functions, chips):
            measurement = measure(name, target, settings)
            measured.append(measurement.to_dict())
            advance(1)
            if write is not None and (missing := write_row(write, measurement)) is not None:
                typer.echo(missing, err=True)
            if not as_json:
                show(cycles_table(measured[-1], ops))
    print_report(measured, None, as_json)


in_shapes, in_doing = panel("Shapes"), panel("What to do")


@dataclasses.dataclass
class Shapes(Options):
    """The calls to time: every pass at every length and window."""

    passes: Annotated[
        list[str] | None, in_shapes("--pass", help="forward, forward+backward or decode, repeatable. Default: all.")
    ] = None
    length: Annotated[
        list[int] | None, in_shapes(help="Tokens, repeatable. Default: 4096 to 131072; on a CPU 512 and 1024.", min=1)
    ] = None
    window: Annotated[
        list[int] | None,
        in_shapes(
            help="Keys that a query sees, repeatable; 0 is full. Default: 1024, 2048, 0; on a CPU 128, 0.", min=0
        ),
    ] = None
    heads: Annotated[int, in_shapes(help="Query heads.", min=1)] = 32
    kv_heads: Annotated[int, in_shapes(help="KV heads.", min=1)] = 8
    head_dim: Annotated[int, in_shapes(help="Channels of a head.", min=1)] = 128
    batch: Annotated[int, in_shapes(help="Sequences of the forward and backward passes.", min=1)] = 1
    decode_batch: Annotated[int, in_shapes(help="Sequences when decoding.", min=1)] = 8
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"], in_shapes(help="The dtype of queries, keys and values.")
    ] = "bfloat16"
    documents: Annotated[
        int | None,
        in_shapes(
            help="Tokens of a document. Rows are packed and have segment ids, as in training. Default: no segment ids.",
            min=1,
        ),
    ] = None
    variant: Annotated[
        Literal["plain", "sink-tokens", "full-rows", "sigmoid", "routed"],
        in_shapes(
            help="With 4 sink tokens, with 256 full rows at the end of each document, with sigmoid and ALiBi, or with "
            "13 % of the rows routed to full attention. Other libraries have only 'plain'."
        ),
    ] = "plain"

    def cases(self, on_cpu: bool) -> list[BenchCase]:
        """Raises `ConfigError` where an option is wrong, or nothing is left to time."""
        from swa_jax.bench.attention import grid
        from swa_jax.bench.candidates import PASSES

        for name in self.passes or []:
            if name not in PASSES:
                raise ConfigError(f"--pass is '{name}'; the choices are: {', '.join(PASSES)}")
        if self.heads % self.kv_heads:
            raise ConfigError(f"--heads is {self.heads}, which is no multiple of --kv-heads {self.kv_heads}")
        lengths = self.length or ([512, 1024] if on_cpu else [4096 << i for i in range(6)])
        windows = self.window if self.window is not None else ([128, 0] if on_cpu else [1024, 2048, 0])
        cases = list(
            grid(
                self.passes or PASSES, lengths, [window or None for window in windows],
                heads=self.heads, kv_heads=self.kv_heads, head_dim=self.head_dim, batch=self.batch,
                decode_batch=self.decode_batch, dtype=self.dtype, documents=self.documents,
                variant=self.variant,
            )
        )  # fmt: skip
        if not cases:
            raise ConfigError(
                "nothing to time: no --window is shorter than a --length, and none is 0"
                if self.variant == "plain"
                else f"nothing to time: --variant {self.variant} is for forward and forward+backward, with a --window "
                "shorter than a --length"
            )
        return cases


def attention(
    shapes: Shapes,
    rounds: Annotated[int, in_doing(help="Rounds, each of which times every candidate once.", min=1)] = 20,
    search: Annotated[bool, in_doing("--search", help="Find the fastest tile sizes for this device instead.")] = False,
    write: Annotated[
        Path | None, in_doing(help="With --search: add the winners to this table. PALLAS_KERNELS_TILES=FILE uses it.")
    ] = None,
    dry_run: Annotated[
        bool, in_doing("--dry-run", help="List what would run, with the kernels. Nothing is compiled.")
    ] = False,
    out: Annotated[Path | None, in_output(help="Also write the results to this JSON file.")] = None,
    as_json: Json = False,
) -> None:
    """Time attention on this machine beside whatever peers are installed, as ratios from one run.

    A ratio is a candidate's time over that of the first: above 1 it is slower. Results are compared before they are
    timed; what differs or fails has no ratio but a reason.
    """
    import jax

    from pallas_kernels.dispatch import describe, dispatched
    from swa_jax.bench.attention import candidates
    from swa_jax.report.progress import counted

    check_output("--out", out)
    if write is not None and not search:
        raise ConfigError("--write is for the winners of --search; --out takes the results of a comparison")
    cases = shapes.cases(on_cpu=jax.default_backend() == "cpu")
    if dry_run:
        planned = [
            {
                "case": str(case),
                "candidates": [candidate.name for candidate in candidates(case)],
                "launches": [str(launch) for launch in describe(dispatched(case.request()))],
            }
            for case in cases
        ]
        lines = ["\n    ".join([f"{p['case']}  {', '.join(p['candidates'])}", *p["launches"]]) for p in planned]
        print_report(planned, "\n".join(lines), as_json)
        return
    device = jax.devices()[0].device_kind
    results: list[dict[str, Any]] = []
    report = {"device": device, "jax": jax.__version__, "rounds": rounds, "results": results}
    with counted("calls timed", len(cases), at_once=False) as advance:
        for case in cases:
            if search:
                results += _search(case, rounds, write, not as_json)
            else:
                results.append(_compare(case, rounds, device, not as_json))
            if out is not None:
                write_json(out, report)  # a later case may end the process
            advance(1)
    print_report(report, None, as_json)
    write_report(report, out, as_json)


app.command()(expand(attention))


def _search(case: BenchCase, rounds: int, table: Path | None, printed: bool) -> list[dict[str, Any]]:
    """The best tile sizes, added to the table if there is one; with `printed`, printed as JSON lines."""
    import jax

    from swa_jax.bench.search import search, write_rows

    rows = [row for row, _ in search(case, rounds)]
    if table is not None:
        write_rows(table, jax.default_backend(), rows)
    for row in rows if printed else ():
        typer.echo(json.dumps(row))
    return rows


def _compare(case: BenchCase, rounds: int, device: str, printed: bool) -> dict[str, Any]:
    """Times of all candidates; with `printed`, printed as a table."""
    from swa_jax.bench.attention import candidates, measure
    from swa_jax.report.bench_tables import attention_table

    measured = measure(case, candidates(case), rounds).to_dict()
    if printed:
        title = (
            f"{case}, {case.dtype}, {case.heads} heads, {case.kv_heads} KV heads, head_dim {case.head_dim}, "
            f"batch {case.batch}, on {device}"
        )
        show(attention_table(measured, title))
    return measured


@app.command()
def generation(
    model: Model,
    window: WindowSize = None,
    sink_tokens: SinkTokens = None,
    ratio: Annotated[
        list[float] | None,
        in_pattern(help="Share of windowed KV heads, repeatable. Default: 0, 0.25, 0.5, 0.75 and 1."),
    ] = None,
    length: Annotated[int, in_prompts(help="Tokens of a prompt.", min=1)] = 4096,
    new_tokens: Annotated[int, in_prompts(help="Tokens that are then written.", min=2)] = 64,
    batch_size: BatchSize = 4,
    rounds: Annotated[int, in_running(help="Rounds, each of which times every ratio once.", min=1)] = 5,
    dtype: ComputeDtype = None,
    seed: Seed = 0,
    out: Annotated[Path | None, in_output(help="Also write the results to this JSON file.")] = None,
    as_json: Json = False,
) -> None:
    """Cache memory, prefill and decode speed of this model on this machine, by the share of windowed KV heads.

    Heads are drawn: how much is saved depends on how many they are, what is lost on which.
    """
    import jax

    from swa_jax.bench.generation import measure
    from swa_jax.checkpoint.folder import load_model, open_checkpoint
    from swa_jax.report.bench_tables import generation_table
    from swa_jax.report.progress import Progress
    from swa_jax.select.heads import windowed_count

    check_output("--out", out)
    ratios = ratio or [0, 0.25, 0.5, 0.75, 1]
    for share in ratios:
        windowed_count(share, 1)  # a wrong one is said now
    model = find_model(model)
    opened = open_checkpoint(model)
    seen = Window(window, sink_tokens, False).of(opened.pattern.window)
    check_window(seen.size, length)
    note_context(opened.config, length + new_tokens)
    decoder = load_model(opened, dtype=dtype)
    settings = {"length": length, "batch_size": batch_size, "new_tokens": new_tokens, "rounds": rounds, "seed": seed}
    with Progress("rounds of generation") as progress:
        rows = measure(decoder, ratios, seen, **settings, progress=progress.update)
    device = jax.devices()[0].device_kind
    title = f"{batch_size} prompts of {length} tokens, {new_tokens} new, window {seen.size}, on {device}"
    report = {"model": str(model), "device": device, "jax": jax.__version__} | seen.fields | settings | {"rows": rows}
    print_report(report, generation_table(rows, title), as_json)
    write_report(report, out, as_json)
