"""The verb `chat`: talk to a model in the terminal."""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from swa_jax.base.errors import ConfigError
from swa_jax.cli.generate_options import (
    Chunk,
    MaxNewTokens,
    Pattern,
    Temperature,
    Thinking,
    TopK,
    TopP,
    sampling_options,
)
from swa_jax.cli.options import (
    ComputeDtype,
    Model,
    Seed,
    WindowGiven,
    Yarn,
    choose_patterns,
    find_model,
    in_prompts,
    in_running,
    note_context,
    open_model,
)

if TYPE_CHECKING:
    from swa_jax.data.tokenizer import Tokenizer
    from swa_jax.model.engine import Engine

HELP = "/new starts a new conversation, /exit or Ctrl-D ends it, Ctrl-C ends a reply, twice the program"


def chat(
    model: Model,
    system: Annotated[str | None, in_prompts(help="What the model is told before the first message.")] = None,
    thinking: Thinking = None,
    length: Annotated[
        int | None,
        in_running(help="Tokens that a conversation may have. Default: the model's context, or 4096 if less.", min=2),
    ] = None,
    pattern: Pattern = None,
    *,
    window: WindowGiven,
    yarn: Yarn = None,
    max_new_tokens: MaxNewTokens = 512,
    temperature: Temperature = 0.0,
    top_k: TopK = None,
    top_p: TopP = None,
    chunk: Chunk = 512,
    dtype: ComputeDtype = None,
    seed: Seed = 0,
) -> None:
    """Talk to a model: its chat template, one line a message. What has been said is not computed again."""
    from swa_jax.checkpoint.folder import load_model
    from swa_jax.data.chat import chat_tokens, load_chat_template, thinking_options
    from swa_jax.model.engine import Engine

    drawn = sampling_options(temperature, top_k, top_p)
    folder = find_model(model)
    opened, tokenizer = open_model(folder, yarn)
    template = load_chat_template(folder)
    if template is None:
        raise ConfigError(
            f"{model} has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json): use "
            "`swa-jax generate`, which takes plain text"
        )
    switch = thinking_options(template, thinking)
    ((_, chosen),) = choose_patterns(opened, [] if pattern is None else [pattern], window.as_window)
    length = length or min(opened.config.max_position_embeddings, 4096)
    note_context(opened.config, length)
    decoder = load_model(opened, chosen, dtype=dtype)
    engine = Engine(decoder, slots=1, max_length=length, chunk=chunk, prefixes=2)
    begin: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
    messages = list(begin)
    if sys.stdin.isatty():
        typer.echo(HELP, err=True)
    while (line := _line()) is not None and line != "/exit":
        if line == "/new":
            messages = list(begin)
        elif line:
            question = {"role": "user", "content": line}
            try:
                prompt = chat_tokens(tokenizer, template, [*messages, question], **switch)
            except ConfigError as error:  # what has been said stays
                typer.echo(str(error), err=True)
                continue
            room = length - len(prompt)
            if room < 1:
                typer.echo(
                    f"the conversation has {len(prompt)} tokens and --length is {length}: /new starts anew", err=True
                )
                continue
            options = {"max_new_tokens": min(max_new_tokens, room), "sampling": drawn, "seed": seed}
            reply = _reply(engine, tokenizer, prompt, options)
            messages += [question, {"role": "assistant", "content": reply}]


def _line() -> str | None:
    """The next message, None at the end of the input."""
    while True:
        try:
            data = os.fsencode(input("> ")) if sys.stdin.isatty() else sys.stdin.buffer.readline()
            return data.decode().strip() if data or sys.stdin.isatty() else None
        except UnicodeDecodeError:
            typer.echo("the message is not UTF-8", err=True)
        except EOFError:
            return None


def _reply(engine: Engine, tokenizer: Tokenizer, prompt: list[int], options: dict[str, Any]) -> str:
    """The reply to a prompt, printed as it comes; Ctrl-C ends it where it is."""
    from swa_jax.data.reply_text import ReplyText

    text = ReplyText(tokenizer)
    interrupts: list[int] = []

    def interrupt(*_: Any) -> None:
        if interrupts:  # asked twice: it is the prompt that takes long
            raise KeyboardInterrupt
        interrupts.append(1)

    # Between two pieces, never inside a step, which takes the caches and gives them back.
    before = signal.signal(signal.SIGINT, interrupt)
    try:
        for piece in engine.stream([prompt], stop_tokens=tokenizer.end_ids, **options):
            typer.echo(text.push(piece.tokens), nl=False)
            if interrupts:
                engine.stop(0)
    finally:
        signal.signal(signal.SIGINT, before)
    typer.echo(text.close())
    return text.text
