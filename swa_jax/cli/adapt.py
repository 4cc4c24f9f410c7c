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
    Chat,
    Dtype,
    Model,
    Seed,
    few_prompts,
    in_prompts,
    in_running,
    in_serving,
    numbers,
    panel,
    print_report,
)
from swa_jax.cli.select_options import Counted, Running

if TYPE_CHECKING:
    from swa_jax.adapt.job import AdaptOptions

in_search, in_tuning = panel("Search"), panel("Fine-tuning")


@dataclasses.dataclass
class Measured(Options):
    """What the model must still be able to do."""

    data: Annotated[
        Path | None,
        in_prompts(
            metavar="FILE", help="Prompts with answers: JSONL, Parquet or ArrayRecord, fields prompt and answer."
        ),
    ] = None
    text: Annotated[
        list[Path] | None,
        in_prompts(
            metavar="FILE",
            help="A text to hide numbers in and to read, repeatable. Default, without --data: Python's library.",
        ),
    ] = None
    chat: Chat = None
    length: Annotated[
        int | None,
        in_prompts(metavar="N", help="Tokens of an example. Default: the model's context, at most 2048.", min=64),
    ] = None
    examples: Annotated[
        int | None,
        in_prompts(
            metavar="N",
            help="Prompts of each task to measure on. Default: by --effort 12, 48 or 96.",
            min=2,
            callback=few_prompts,
        ),
    ] = None
    choose_by: Annotated[
        int | None,
        in_prompts(
            metavar="N",
            help="Other prompts to choose by. Default: by --effort 4, 8 or 16.",
            min=2,
            callback=few_prompts,
        ),
    ] = None
    seed: Seed = 0


@dataclasses.dataclass
class Searched(Options):
    """What may be chosen."""

    window: Annotated[
        str | None,
        in_search(
            metavar="N,N", help="Windows to try, such as 512,1024. Default: its own, and 1/32 to 1/4 of --length."
        ),
    ] = None
    unit: Annotated[
        Literal["layers", "heads"], in_search(help="What stays full: whole layers, or single KV heads.")
    ] = "layers"
    effort: Annotated[Literal["quick", "normal", "full"], in_search(help="How many prompts and layers to try.")] = (
        "normal"
    )
    force: Annotated[bool, in_search("--force", help="Search even by prompts that tell nothing.")] = False


@dataclasses.dataclass
class Tuned(Options):
    """Fine-tuning by LoRA under the pattern."""

    tune: Annotated[
        int, in_tuning(metavar="N", help="Steps of fine-tuning by LoRA. Default: none.", min=0, show_default=False)
    ] = 0
    tune_data: Annotated[
        list[str] | None, in_tuning(metavar="FILE", help="Texts, or JSONL with prompt and answer, repeatable.")
    ] = None
    tune_prompts: Annotated[
        Path | None,
        in_tuning(metavar="FILE", help="Or prompts alone, for which the original model's replies are learned."),
    ] = None
    reply_tokens: Annotated[
        int | None, in_tuning(metavar="N", help="Most tokens of such a reply. Default: 256.", min=1)
    ] = None


@dataclasses.dataclass
class Computing(Running):
    """How the model computes: in a type that suits the device."""

    dtype: Annotated[
        Dtype | None, in_running(metavar="DTYPE", help="float32 or bfloat16. Default: float32 on CPUs, else bfloat16.")
    ] = None


@dataclasses.dataclass
class Serving(Counted):
    """Where the result is to run, and what it may take there."""

    kv_budget: Annotated[float, in_serving(help="Share of full attention's cache that the result may take.")] = 0.3
    canary: Annotated[
        bool, in_serving(help="With --for: write check_server.py, to test the server with.", show_default=False)
    ] = True


def adapt(
    model: Annotated[str, Argument(help=Model.__metadata__[0].help)],
    out: Annotated[Path, Argument(help="A new folder, or that of an interrupted run to go on with.")],
    measured: Measured,
    searched: Searched,
    tuned: Tuned,
    served: Serving,
    plan: Annotated[
        bool, in_running("--plan", help="Say what would be done and how long it may take, and stop.")
    ] = False,
    as_json: Annotated[bool, in_running("--json", help="With --plan: print JSON.")] = False,
    *,
    running: Computing,
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
    if not plan:
        carry_out_and_report(options)
        return
    from swa_jax.adapt.estimate import estimate_report, estimate_text
    from swa_jax.adapt.job import prepare

    report = estimate_report(prepare(options))
    print_report(report, estimate_text(report), as_json)


def carry_out_and_report(options: AdaptOptions) -> None:
    from swa_jax.adapt.card import write_card
    from swa_jax.adapt.job import prepare
    from swa_jax.adapt.report import summary, write_report
    from swa_jax.adapt.stages import carry_out

    def say(line: str) -> None:
        typer.echo(line, err=True)

    job = prepare(options)
    results = carry_out(job, say, lambda found: say(f"Report: {write_report(job, found)}"))
    report = write_report(job, results)  # again, with the receipt
    write_card(job, results)
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
