"""The command line, `swa-jax <verb>`. Each verb imports what it needs when it runs, so that `--help` is quick."""

from __future__ import annotations

import glob
import importlib.metadata
import importlib.util
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer import Argument, Option

from swa_jax.cli.bench import app as bench_app
from swa_jax.cli.compare import compare
from swa_jax.cli.data import app as data_app
from swa_jax.cli.evaluate import evaluate
from swa_jax.cli.options import (
    ComputeDtype,
    FullDecode,
    Model,
    Seed,
    SinkTokens,
    Window,
    Yarn,
    check_output,
    load_checkpoint,
    resolve_pattern,
    with_options,
)
from swa_jax.cli.pattern import PatternVerbs, diff
from swa_jax.cli.select import app as select_app
from swa_jax.cli.train import compile_, train
from swa_jax.errors import ConfigError, sentence
from swa_jax.families.pattern_files import is_pattern_file, layers_of_file
from swa_jax.files import check_local
from swa_jax.model.config import ModelConfig


class Verbs(typer.core.TyperGroup):
    """Verbs whose expected errors are one red sentence and a status (2 by default); all others keep their traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            for argument in [*ctx._protected_args, *ctx.args]:  # before any verb has done anything
                key, _, value = argument.rpartition("=")
                check_local(value, f"'{key}' =" if key else "the argument")
            return super().invoke(ctx)
        except Exception as error:
            message = sentence(error)
            if message is None:
                raise
            Console(stderr=True).print(message, style="red", markup=False, highlight=False, soft_wrap=True)
            raise typer.Exit(getattr(error, "status", 2)) from None
        except KeyboardInterrupt:
            typer.echo(
                "interrupted: what keeps its progress goes on when the same command is started again",
                err=True,
            )
            raise typer.Exit(130) from None


app = typer.Typer(
    cls=Verbs,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
)
pattern_app = typer.Typer(
    cls=PatternVerbs, no_args_is_help=True, help="Print a pattern (`pattern RECIPE`), or compare two."
)
pattern_app.command()(diff)
app.add_typer(pattern_app, name="pattern")
app.add_typer(select_app, name="select")
app.add_typer(bench_app, name="bench")
app.add_typer(data_app, name="data")


# Where Linux shows TPUs and GPUs.
_ACCELERATORS = ("/dev/accel*", "/dev/vfio/[0-9]*", "/dev/nvidia[0-9]*", "/dev/kfd")


def main() -> None:
    # libtpu may be there to compile only; looking for a TPU in vain, it would fill the terminal with errors.
    compiles_only = importlib.util.find_spec("libtpu") and not any(map(glob.glob, _ACCELERATORS))
    if compiles_only and "JAX_PLATFORMS" not in os.environ:
        os.environ["JAX_PLATFORMS"] = "cpu"
        if "jax" in sys.modules:
            sys.modules["jax"].config.update("jax_platforms", "cpu")
    app()


def _version(asked: bool) -> None:
    if asked:
        try:
            typer.echo(f"swa-jax {importlib.metadata.version('swa-jax')}")
        except importlib.metadata.PackageNotFoundError:
            typer.echo("swa-jax, run from its sources without an installation")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Sliding-window attention for long context: import a model, choose its layers, measure what that costs."""


# ---- verbs ----


@app.command()
def demo(
    out: Annotated[Path, Option(help="Folder of the report and its pictures.")] = Path("runs/demo"),
    model: Annotated[
        Path | None, Option(help="A model in Hugging Face format; default: the bundled one.")
    ] = None,
) -> None:
    """The whole path in a few minutes: import a small model, window its attention, measure what it costs."""
    from swa_jax.demo import run_demo

    run_demo(out, model)


@app.command("import")
def import_(
    source: Annotated[str, Argument(help="A Hugging Face folder, or a Hub id such as Qwen/Qwen3-0.6B.")],
    destination: Annotated[Path, Argument(help="A new folder for the checkpoint.")],
    pattern: Annotated[
        str | None, Option(help="A recipe or a pattern JSON; default: what the model's config.json says.")
    ] = None,
) -> None:
    """Turn a Hugging Face model into a checkpoint folder."""
    from swa_jax.checkpoint.folder import open_checkpoint
    from swa_jax.checkpoint.hf_import import import_model
    from swa_jax.data.tokenizer import load_tokenizer

    import_model(source, destination, pattern=pattern)
    typer.echo(f"{destination}\n{open_checkpoint(destination).pattern}")
    try:
        load_tokenizer(destination)
    except ConfigError as error:
        typer.echo(
            f"without a tokenizer that can be read, this model takes token ids only: {error}", err=True
        )


@app.command()
def export(
    checkpoint: Model,
    destination: Annotated[Path, Argument(help="A new folder in Hugging Face format.")],
) -> None:
    """Write a checkpoint back in Hugging Face format."""
    from swa_jax.checkpoint.hf_export import export_model

    typer.echo(export_model(checkpoint, destination))


@pattern_app.command("print")
def pattern(
    recipe: Annotated[str, Argument(help="Such as interleave-1-in-4+fa-decode, or a pattern JSON.")],
    layers: Annotated[int | None, Option(help="Layers of the model.", min=1)] = None,
    model: Annotated[Path | None, Option(help="A checkpoint folder, in place of --layers.")] = None,
    window: Window = None,
    sink_tokens: SinkTokens = None,
    fa_decode: FullDecode = None,
    out: Annotated[Path | None, Option(help="Write the pattern to this JSON file.")] = None,
) -> None:
    """Print which layer attends how: F full, w window, h head hybrid, S switch."""
    if out is not None:
        check_output("--out", out)
    size: int | ModelConfig
    if model is not None and layers is None:
        from swa_jax.checkpoint.folder import open_checkpoint

        size = open_checkpoint(model).config
    elif layers is not None and model is None:
        size = layers
    elif model is None and is_pattern_file(recipe) and (stated := layers_of_file(recipe)) is not None:
        size = stated
    else:
        raise ConfigError(
            "give one of --layers N and --model DIR: a recipe needs to know how deep the model is"
        )
    chosen = resolve_pattern(recipe, size, window, sink_tokens, fa_decode)
    typer.echo(chosen)
    if out is not None:
        chosen.to_json(out)
        typer.echo(f"written to {out}")


app.command()(train)
app.command("compile")(compile_)
app.command()(evaluate)
app.command()(compare)


@app.command()
def generate(
    model: Model,
    prompt: Annotated[str, Argument(help="The text to continue; - reads it from standard input.")],
    pattern: Annotated[
        str | None, Option(help="A recipe or a pattern JSON; default: the checkpoint's own.")
    ] = None,
    window: Window = None,
    sink_tokens: SinkTokens = None,
    fa_decode: FullDecode = None,
    max_new_tokens: Annotated[int, Option(min=1)] = 128,
    temperature: Annotated[float, Option(help="0 takes the likeliest token.", min=0)] = 0.0,
    top_k: Annotated[int | None, Option(help="Sample among the K likeliest tokens.", min=1)] = None,
    top_p: Annotated[float | None, Option(help="Sample among the likeliest tokens that make up P.")] = None,
    yarn: Yarn = None,
    dtype: ComputeDtype = None,
    seed: Seed = 0,
) -> None:
    """Continue a prompt and print the new text."""
    from swa_jax.model.generate import generate as run

    decoder, tokenizer = load_checkpoint(model, dtype, yarn=yarn)
    decoder = with_options(decoder, pattern, window, sink_tokens, fa_decode)
    new = run(
        decoder,
        [tokenizer.start_ids + tokenizer.encode(_text(prompt))],
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        stop_tokens=() if tokenizer.eos_id is None else (tokenizer.eos_id,),
        seed=seed,
    )
    typer.echo(tokenizer.decode(new[0]))


def _text(prompt: str) -> str:
    """The prompt, or what standard input holds; bytes that are no text arrive as surrogates."""
    try:
        return (sys.stdin.buffer.read() if prompt == "-" else os.fsencode(prompt)).decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"the prompt is not UTF-8 text, from its byte {error.start} on") from None


if __name__ == "__main__":
    main()
