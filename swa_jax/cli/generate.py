"""The verb `generate`: continue a prompt."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer
from typer import Argument, Option

from swa_jax.cli.options import (
    PATTERN,
    ComputeDtype,
    FullDecode,
    Model,
    Overrides,
    Seed,
    SinkTokens,
    Window,
    Yarn,
    load_checkpoint,
    note_context,
    with_patterns,
)
from swa_jax.errors import ConfigError

SAMPLING = "Sampling"


def generate(
    model: Model,
    prompt: Annotated[str, Argument(help="The text to continue; - reads it from standard input.")],
    pattern: Annotated[
        str | None,
        Option(
            help="A recipe or a pattern JSON. Default: the checkpoint's own.",
            show_default=False,
            rich_help_panel=PATTERN,
        ),
    ] = None,
    window: Window = None,
    sink_tokens: SinkTokens = None,
    fa_decode: FullDecode = None,
    yarn: Yarn = None,
    max_new_tokens: Annotated[
        int, Option(help="Tokens to write at most.", min=1, rich_help_panel=SAMPLING)
    ] = 128,
    temperature: Annotated[
        float, Option(help="0 takes the likeliest token.", min=0, rich_help_panel=SAMPLING)
    ] = 0.0,
    top_k: Annotated[
        int | None, Option(help="Sample among the K likeliest tokens.", min=1, rich_help_panel=SAMPLING)
    ] = None,
    top_p: Annotated[
        float | None,
        Option(help="Sample among the likeliest tokens that make up P.", rich_help_panel=SAMPLING),
    ] = None,
    dtype: ComputeDtype = None,
    seed: Seed = 0,
) -> None:
    """Continue a prompt and print the new text."""
    from swa_jax.model.generate import generate as run

    decoder, tokenizer = load_checkpoint(model, dtype, yarn=yarn)
    sources = [] if pattern is None else [pattern]
    ((_, decoder),) = with_patterns(decoder, sources, Overrides(window, sink_tokens, fa_decode))
    tokens = tokenizer.start_ids + tokenizer.encode(_text(prompt))
    note_context(decoder.config, len(tokens) + max_new_tokens)
    new = run(
        decoder,
        [tokens],
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
