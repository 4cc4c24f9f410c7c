"""The command line, `swa-jax <verb>`. Each verb imports what it needs when it runs, so that `--help` is quick."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer import Argument, Option

import swa_jax
from swa_jax.base.errors import ConfigError, sentence
from swa_jax.base.files import check_local
from swa_jax.cli.adapt import adapt, demo
from swa_jax.cli.bench import app as bench_app
from swa_jax.cli.chat import chat
from swa_jax.cli.compare import compare
from swa_jax.cli.compile import compile_
from swa_jax.cli.data import app as data_app
from swa_jax.cli.distill import distill
from swa_jax.cli.evaluate import app as evaluate_app
from swa_jax.cli.generate import generate
from swa_jax.cli.generate_options import Pattern
from swa_jax.cli.groups import expand
from swa_jax.cli.kept_programs import keep_programs
from swa_jax.cli.options import (
    BatchedTokens,
    Device,
    Model,
    Server,
    WindowSize,
    find_model,
    in_serving,
    resolve_patterns,
)
from swa_jax.cli.pattern import app as pattern_app
from swa_jax.cli.select import app as select_app
from swa_jax.cli.train import train
from swa_jax.cli.usage import UsageError, usage_sentence, without_types_of_flags
from swa_jax.model.window import Window


class Verbs(typer.core.TyperGroup):
    """Verbs whose expected errors are one red sentence and a status (2 by default); all others keep their traceback."""

    def __init__(self, **attributes: Any):
        super().__init__(**attributes)
        without_types_of_flags(self)

    def main(self, *args: Any, **options: Any) -> Any:
        try:
            status = super().main(*args, **options | {"standalone_mode": False})
        except UsageError as error:
            status = error.exit_code
            if message := usage_sentence(error):
                _complain(message)
        except OSError as error:  # of the help, printed to a full disk
            if (full := sentence(error)) is None:
                raise
            status = 2
            _complain(full)
        except typer.Abort:  # the end of the input, where something was asked
            status = 1
        sys.exit(status)

    def invoke(self, ctx: Any) -> Any:
        try:
            verb, *arguments = [*ctx._protected_args, *ctx.args] or [""]
            for argument in [] if verb == "import" else arguments:  # import reads buckets, and checks for itself
                key, _, value = argument.rpartition("=")
                check_local(value, f"'{key}' =" if key else "the argument")
            return super().invoke(ctx)
        except Exception as error:
            message = sentence(error)
            if message is None:
                raise
            _complain(message)
            raise typer.Exit(getattr(error, "status", 2)) from None
        except KeyboardInterrupt:
            goes_on = "" if not _keeps(verb, arguments) else ": it goes on when the same command is started again"
            typer.echo(f"interrupted{goes_on}", err=True)
            raise typer.Exit(130) from None


def _keeps(verb: str, arguments: Sequence[str]) -> bool:
    """Whether a command keeps its progress."""
    if verb in ("select", "compare", "evaluate", "generate", "distill"):
        return any(argument.split("=")[0] == "--out" for argument in arguments)
    return verb in ("import", "adapt", "demo", "train")


def _complain(message: str) -> None:
    Console(stderr=True).print(message, style="red", markup=False, highlight=False, soft_wrap=True)


app = typer.Typer(cls=Verbs, no_args_is_help=True, rich_markup_mode="rich", pretty_exceptions_show_locals=False)
app.add_typer(pattern_app, name="pattern")
app.add_typer(select_app, name="select")
app.add_typer(bench_app, name="bench")
app.add_typer(data_app, name="data")
app.add_typer(evaluate_app, name="evaluate")


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"swa-jax {swa_jax.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
    keep: Annotated[
        bool,
        Option(
            "--keep-programs/--compile-anew",
            help="Whether compiled programs are kept in the cache folder (SWA_JAX_CACHE), for the next command.",
        ),
    ] = True,
) -> None:
    """Sliding-window attention for long context: import a model, choose its layers, measure what that costs."""
    if keep:
        keep_programs()


# ---- verbs ----


@app.command("import")
def import_(
    source: Annotated[
        str,
        Argument(
            help="A Hugging Face folder, a GGUF file, a Hub id such as Qwen/Qwen3-0.6B, a folder in a bucket, "
            "gs://..., or a PEFT adapter folder, which is merged onto its base."
        ),
    ],
    destination: Annotated[Path, Argument(help="A new folder for the checkpoint.")],
    pattern: Annotated[
        str | None, Option(help="A recipe or a pattern JSON. Default: what the model's config.json says.")
    ] = None,
) -> None:
    """Turn a model into a checkpoint folder."""
    from swa_jax.checkpoint.folder import PATTERN_FILE
    from swa_jax.checkpoint.named import import_named
    from swa_jax.model.pattern import AttentionPattern

    import_named(source, destination, pattern=pattern, describe=lambda note: typer.echo(note, err=True))
    typer.echo(f"{destination}\n{AttentionPattern.from_json(destination / PATTERN_FILE)}")


@app.command()
def export(
    checkpoint: Model,
    destination: Annotated[Path, Argument(help="A new folder in Hugging Face format.")],
    pattern: Pattern = None,
    window: WindowSize = None,
    server: Server = None,
    as_full: Annotated[
        bool, in_serving("--as-full", help="Full attention in every layer where the server cannot do better.")
    ] = False,
    serve_length: Annotated[
        int | None,
        in_serving(metavar="N", help="Tokens of the sequence that is counted. Default: the model's context.", min=1),
    ] = None,
    batched_tokens: BatchedTokens = None,
    device: Device = None,
    canary: Annotated[
        bool,
        in_serving(
            help="Write canary.json and check_server.py, which tell what a server really computes. Takes seconds for a "
            "small model and minutes for a large one, longer with windows."
        ),
    ] = True,
) -> None:
    """Write a model in Hugging Face format, so that a server runs its pattern, or the one given, as it is."""
    from swa_jax.checkpoint.folder import open_checkpoint
    from swa_jax.checkpoint.hf_export import export_model
    from swa_jax.report.progress import Progress

    if as_full and server is None:
        raise ConfigError("--as-full needs --for SERVER: whose full attention is meant")
    if server is None and (serve_length or batched_tokens or device):
        raise ConfigError("--serve-length, --batched-tokens and --device are for a server: name it with --for")
    if window is not None and pattern is None:
        raise ConfigError("--window is the window of a recipe: name one with --pattern")
    folder, chosen = find_model(checkpoint), None
    if pattern is not None:
        source = open_checkpoint(folder)
        (chosen,) = resolve_patterns([pattern], source.config, Window(window), source.pattern.sliding_window)
    notes: list[str] = []
    options: dict[str, Any] = {"pattern": chosen, "server": server, "as_full": as_full, "canary": canary}
    options |= {"serve_length": serve_length, "batched_tokens": batched_tokens, "device": device}
    with Progress("canary (--no-canary does without): texts") as progress:
        export_model(folder, destination, **options, describe=notes.append, progress=progress.update)
    typer.echo(destination)
    for note in notes:
        typer.echo(note)


app.command()(expand(adapt))
app.command()(demo)
app.command()(train)
app.command("compile")(expand(compile_))
app.command()(expand(compare))
app.command()(expand(generate))
app.command()(distill)
app.command()(expand(chat))
