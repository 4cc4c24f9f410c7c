"""The verb `adapt`: from a model to one that a server runs with windows, in one command."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from typer import Argument, Option

from swa_jax.base.errors import ConfigError
from swa_jax.cli.groups import Options
from swa_jax.cli.options import (
    PROMPTS,
    RUNNING,
    SERVING,
    BatchedTokens,
    Chat,
    Model,
    Seed,
    ServeLength,
    Server,
    numbers,
    print_json,
)
from swa_jax.cli.select_options import Running

if TYPE_CHECKING:
    from swa_jax.adapt.job import AdaptOptions

SEARCH, TUNING = "Search", "Fine-tuning"


@dataclasses.dataclass
class Measured(Options):
    """What the model must still be able to do."""

    data: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="Prompts with answers: JSONL, Parquet or ArrayRecord with the fields prompt and answer.",
            rich_help_panel=PROMPTS,
        ),
    ] = None
    text: Annotated[
        list[Path] | None,
        Option(
            metavar="FILE",
            help="A text to hide numbers in and to read, repeatable. Default, without --data: Python's library.",
            show_default=False,
            rich_help_panel=PROMPTS,
        ),
    ] = None
    chat: Chat = None
    length: Annotated[
        int | None,
        Option(
            metavar="N",
            help="Tokens of an example. Default: the model's context, at most 2048.",
            min=64,
            show_default=False,
            rich_help_panel=PROMPTS,
        ),
    ] = None
    examples: Annotated[
        int | None,
        Option(
            metavar="N",
            help="Prompts of each task to measure on. Default: by --effort 12, 48 or 96.",
            min=2,
            show_default=False,
            rich_help_panel=PROMPTS,
        ),
    ] = None
    choose_by: Annotated[
        int | None,
        Option(
            metavar="N",
            help="Others to choose by. Default: 4, 8 or 16.",
            min=2,
            show_default=False,
            rich_help_panel=PROMPTS,
        ),
    ] = None
    seed: Seed = 0


@dataclasses.dataclass
class Searched(Options):
    """What may be chosen."""

    window: Annotated[
        str | None,
        Option(
            metavar="N,N",
            help="Windows to try, such as 512,1024. Default: 1/32, 1/16, 1/8 and 1/4 of --length.",
            show_default=False,
            rich_help_panel=SEARCH,
        ),
    ] = None
    unit: Annotated[
        Literal["layers", "heads"],
        Option(help="What stays full: whole layers, or single KV heads.", rich_help_panel=SEARCH),
    ] = "layers"
    effort: Annotated[
        Literal["quick", "normal", "full"],
        Option(help="Prompts, and layers scored in a round: few, some, all.", rich_help_panel=SEARCH),
    ] = "normal"
    force: Annotated[
        bool, Option("--force", help="Search also by prompts that tell nothing.", rich_help_panel=SEARCH)
    ] = False


@dataclasses.dataclass
class Tuned(Options):
    """Fine-tuning by LoRA under the pattern."""

    tune: Annotated[
        int,
        Option(
            metavar="N",
            help="Steps of fine-tuning by LoRA. Default: none.",
            min=0,
            show_default=False,
            rich_help_panel=TUNING,
        ),
    ] = 0
    tune_data: Annotated[
        list[str] | None,
        Option(
            metavar="FILE", help="Texts, or JSONL with prompt and answer.", show_default=False, rich_help_panel=TUNING
        ),
    ] = None
    tune_prompts: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="Or prompts; the original's replies to them are learned.",
            show_default=False,
            rich_help_panel=TUNING,
        ),
    ] = None
    reply_tokens: Annotated[
        int | None,
        Option(
            metavar="N", help="Most tokens of a reply. Default: 256.", min=1, show_default=False, rich_help_panel=TUNING
        ),
    ] = None


@dataclasses.dataclass
class Serving(Options):
    """Where the result is to run, and what it may take there."""

    kv_budget: Annotated[
        float,
        Option(
            "--kv-budget",
            help="Share of full attention's key/value cache that the result may take.",
            rich_help_panel=SERVING,
        ),
    ] = 0.3
    server: Server = None
    serve_length: ServeLength = None
    batched_tokens: BatchedTokens = None
    canary: Annotated[
        bool,
        Option(
            "--canary/--no-canary",
            help="With --for: write a receipt to check the server by.",
            show_default=False,
            rich_help_panel=SERVING,
        ),
    ] = True


def adapt(
    model: Annotated[str, Argument(help=Model.__metadata__[0].help)],
    out: Annotated[Path, Argument(help="A new folder, or that of an interrupted run to go on with.")],
    measured: Measured,
    searched: Searched,
    tuned: Tuned,
    served: Serving,
    plan: Annotated[
        bool,
        Option("--plan", help="Say what would be done and how long it may take, and stop.", rich_help_panel=RUNNING),
    ] = False,
    as_json: Annotated[bool, Option("--json", help="With --plan: print JSON.", rich_help_panel=RUNNING)] = False,
    *,
    running: Running,
) -> None:
    """Turn a model into one whose long context costs less: search, measure, export, and write a report.

    Run the same command again to go on after an interruption.
    """
    from swa_jax.adapt.job import AdaptOptions

    if as_json and not plan:
        raise ConfigError("--json prints what --plan finds: give both")
    given = vars(measured) | vars(searched) | vars(tuned) | vars(served) | vars(running)
    given["window"] = () if searched.window is None else tuple(numbers("--window", searched.window))
    given |= {name: tuple(given[name] or ()) for name in ("text", "tune_data")}
    options = AdaptOptions(model, out, **given)
    if plan:
        _print_estimate(options, as_json)
    else:
        carry_out_and_report(options)


def _print_estimate(options: AdaptOptions, as_json: bool) -> None:
    from swa_jax.adapt.estimate import estimate_report, estimate_text
    from swa_jax.adapt.job import prepare

    report = estimate_report(prepare(options))
    if as_json:
        print_json(report)
    else:
        typer.echo(estimate_text(report))


def carry_out_and_report(options: AdaptOptions) -> None:
    from swa_jax.adapt.job import prepare
    from swa_jax.adapt.report import summary, write_report
    from swa_jax.adapt.stages import carry_out

    def say(line: str) -> None:
        typer.echo(line, err=True)

    job = prepare(options)
    results = carry_out(job, say, lambda found: say(f"Report: {write_report(job, found)}"))
    report = write_report(job, results)  # again, with the receipt
    typer.echo(summary(job, results, report))


def demo(
    out: Annotated[Path, Option(help="A new folder, or that of an interrupted demo.")] = Path("runs/demo"),
) -> None:
    """Adapt the bundled model `chains` in a few minutes: which of its eight layers need full attention?"""
    from swa_jax.adapt.job import AdaptOptions

    # Few prompts to measure on; enough to choose by.
    carry_out_and_report(
        AdaptOptions("chains", out, 0.6, length=384, window=(32,), effort="full", choose_by=12, examples=24)
    )
    typer.echo(
        f"Open the report in a browser. Next, adapt a model of your own: swa-jax adapt MODEL OUT --kv-budget 0.3\n"
        f"Or see what each method would choose: swa-jax compare chains --pattern {out}/pattern.json --window 32 "
        "--chains hops=1-3,gap=32 --length 384 --method nll-gradient --out runs/compare"
    )
