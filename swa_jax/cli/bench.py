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
    find_model,
    in_output,
    in_pattern,
    in_prompts,
    in_running,
    load_checkpoint,
    note_context,
    print_json,
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
            help="Functions of swa_jax/bench/tpu_kernels.py; default: all of them. Of other libraries: "
            "jax_splash_forward, tokamax_splash_forward, and the same with backward.",
        ),
    ] = None,
    chip: Annotated[list[str] | None, Option(help="v5e, v5p, v6e or v7x, repeatable; default: v6e.")] = None,
    set_: Annotated[
        list[str] | None, Option("--set", metavar="NAME=VALUE", help="Such as T=8192 or window=2048, repeatable.")
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
    from swa_jax.report import table_console
    from swa_jax.report.bench_tables import HOW_TO_READ_CYCLES, cycles_table
    from swa_jax.report.progress import counted

    settings = read_settings(set_ or [])
    functions, chips = names or list(FUNCTIONS), chip or ["v6e"]
    check(functions, chips, settings)
    if write is not None:
        check_output("--write", write)
        check_writable(functions, settings)
    console, measured = table_console(), []
    if not as_json:
        for line in HOW_TO_READ_CYCLES:
            console.print(line, highlight=False)
    with counted("kernels compiled", len(functions) * len(chips), at_once=False) as advance:
        for name, target in itertools.product(functions, chips):
            measured.append(measure(name, target, settings))
            advance(1)
            if write is not None and (missing := write_row(write, measured[-1])) is not None:
                typer.echo(missing, err=True)
            if not as_json:
                console.print(cycles_table(measured[-1].to_dict(), ops))
    if as_json:
        print_json([measurement.to_dict() for measurement in measured])


SHAPES, DOING = "Shapes", "What to do"


@dataclasses.dataclass
class Shapes(Options):
    """The calls to time: every pass at every length and window."""

    passes: Annotated[
        list[str] | None,
        Option("--pass", help="forward, forward+backward or decode, repeatable. Default: all.", rich_help_panel=SHAPES),
    ] = None
    length: Annotated[
        list[int] | None,
        Option(
            help="Tokens, repeatable. Default: 4096 to 131072; on a CPU 512 and 1024.", min=1, rich_help_panel=SHAPES
        ),
    ] = None
    window: Annotated[
        list[int] | None,
        Option(
            help="Visible keys of a query, repeatable; 0 is full. Default: 1024, 2048, 0; on a CPU 128, 0.",
            min=0,
            rich_help_panel=SHAPES,
        ),
    ] = None
    heads: Annotated[int, Option(help="Query heads.", min=1, rich_help_panel=SHAPES)] = 32
    kv_heads: Annotated[int, Option(help="KV heads.", min=1, rich_help_panel=SHAPES)] = 8
    head_dim: Annotated[int, Option(help="Channels of a head.", min=1, rich_help_panel=SHAPES)] = 128
    batch: Annotated[int, Option(help="Sequences, decoding aside.", min=1, rich_help_panel=SHAPES)] = 1
    decode_batch: Annotated[int, Option(help="Sequences when decoding.", min=1, rich_help_panel=SHAPES)] = 8
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"],
        Option(help="The dtype of queries, keys and values.", rich_help_panel=SHAPES),
    ] = "bfloat16"
    documents: Annotated[
        int | None,
        Option(
            help="Tokens of a document. Rows are packed and have segment ids, as in training. Default: no segment ids.",
            min=1,
            rich_help_panel=SHAPES,
        ),
    ] = None
    variant: Annotated[
        Literal["plain", "sink-tokens", "sigmoid", "routed"],
        Option(
            help="With 4 sink tokens, with sigmoid and ALiBi, or with 13 % of the rows routed to full attention. "
            "Other libraries have only 'plain'.",
            rich_help_panel=SHAPES,
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
    rounds: Annotated[int, Option(help="Each times every candidate once, in turn.", min=1, rich_help_panel=DOING)] = 20,
    search: Annotated[
        bool, Option("--search", help="Try tile sizes for this device instead.", rich_help_panel=DOING)
    ] = False,
    write: Annotated[
        Path | None,
        Option(
            help="With --search: add the winners to this table. PALLAS_KERNELS_TILES=FILE uses it.",
            rich_help_panel=DOING,
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        Option("--dry-run", help="List what would run, with the kernels. Nothing is compiled.", rich_help_panel=DOING),
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
    from swa_jax.base.files import write_json
    from swa_jax.bench.attention import candidates
    from swa_jax.report.progress import counted

    if out is not None:
        check_output("--out", out)
    if write is not None and not search:
        raise ConfigError("--write is for the winners of --search; --out takes the results of a comparison")
    cases = shapes.cases(on_cpu=jax.default_backend() == "cpu")
    if dry_run:
        for case in cases:
            typer.echo(f"{case}  {', '.join(c.name for c in candidates(case))}")
            for launch in describe(dispatched(case.request())):
                typer.echo(f"    {launch}")
        return
    device = jax.devices()[0].device_kind
    results: list[dict[str, Any]] = []
    with counted("calls timed", len(cases), at_once=False) as advance:
        for case in cases:
            if search:
                results += _search(case, rounds, write, not as_json)
            else:
                results.append(_compare(case, rounds, device, not as_json))
            advance(1)
    report = {"device": device, "jax": jax.__version__, "rounds": rounds, "results": results}
    if as_json:
        print_json(report)
    if out is not None:
        write_json(out, report)


app.command()(expand(attention))


def _search(case: BenchCase, rounds: int, table: Path | None, show: bool) -> list[dict[str, Any]]:
    """The best tile sizes, added to the table if there is one; with `show`, printed as JSON lines."""
    import jax

    from swa_jax.bench.search import search, write_rows

    rows = [row for row, _ in search(case, rounds)]
    if table is not None:
        write_rows(table, jax.default_backend(), rows)
    for row in rows if show else ():
        typer.echo(json.dumps(row))
    return rows


def _compare(case: BenchCase, rounds: int, device: str, show: bool) -> dict[str, Any]:
    """Times of all candidates; with `show`, printed as a table."""
    from swa_jax.bench.attention import candidates, measure
    from swa_jax.report import table_console
    from swa_jax.report.bench_tables import attention_table

    measured = measure(case, candidates(case), rounds).to_dict()
    if show:
        title = (
            f"{case}, {case.dtype}, {case.heads} heads, {case.kv_heads} KV heads, head_dim {case.head_dim}, "
            f"batch {case.batch}, on {device}"
        )
        table_console().print(attention_table(measured, title))
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
    rounds: Annotated[int, in_running(help="Each times every ratio once, in turn.", min=1)] = 5,
    dtype: ComputeDtype = None,
    seed: Seed = 0,
    out: Annotated[Path | None, in_output(help="Also write the results to this JSON file.")] = None,
    as_json: Json = False,
) -> None:
    """Cache memory, prefill and decode speed of this model on this machine, by the share of windowed KV heads.

    Heads are drawn: how much is saved depends on how many they are, what is lost on which.
    """
    import jax

    from swa_jax.base.files import write_json
    from swa_jax.bench.generation import measure
    from swa_jax.report import table_console
    from swa_jax.report.bench_tables import generation_table
    from swa_jax.report.progress import Progress
    from swa_jax.select.heads import windowed_count

    if out is not None:
        check_output("--out", out)
    ratios = ratio or [0, 0.25, 0.5, 0.75, 1]
    for share in ratios:
        windowed_count(share, 1)  # a wrong one is said now
    model = find_model(model)
    decoder, _ = load_checkpoint(model, dtype)
    seen = Window(window, sink_tokens, False).of(decoder.pattern.window)
    note_context(decoder.config, length + new_tokens)
    settings = {"length": length, "batch_size": batch_size, "new_tokens": new_tokens, "rounds": rounds, "seed": seed}
    with Progress("rounds of generation") as progress:
        rows = measure(decoder, ratios, seen, **settings, progress=progress.update)
    device = jax.devices()[0].device_kind
    title = f"{batch_size} prompts of {length} tokens, {new_tokens} new, window {seen.size}, on {device}"
    report = {"model": str(model), "device": device, "jax": jax.__version__} | seen.fields | settings | {"rows": rows}
    if as_json:
        print_json(report)
    else:
        table_console().print(generation_table(rows, title))
    if out is not None:
        write_json(out, report)
        typer.echo(f"written to {out}", err=as_json)
