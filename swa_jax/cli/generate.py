"""The verb `generate`: continue a prompt, or all prompts of a file."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import typer

from swa_jax.base.errors import ConfigError
from swa_jax.cli.generate_options import (
    Chunk,
    MaxNewTokens,
    Pattern,
    Prefixes,
    PromptFile,
    PromptText,
    ReplyPath,
    Samples,
    Slots,
    Stop,
    Temperature,
    Thinking,
    TopK,
    TopP,
    WithTemplate,
    sampling_options,
)
from swa_jax.cli.options import (
    ComputeDtype,
    Mesh,
    Model,
    Seed,
    WindowGiven,
    Yarn,
    check_output,
    choose_patterns,
    find_model,
    note_context,
    open_model,
    parse_mesh,
)

if TYPE_CHECKING:
    from pathlib import Path

    from swa_jax.data.prompt_file import Prompt, ReplyFile
    from swa_jax.evaluate.replies import PartialReply


def generate(
    model: Model,
    prompt: PromptText = None,
    prompts: PromptFile = None,
    samples: Samples = 1,
    chat: WithTemplate = False,
    thinking: Thinking = None,
    out: ReplyPath = None,
    pattern: Pattern = None,
    *,
    window: WindowGiven,
    yarn: Yarn = None,
    max_new_tokens: MaxNewTokens = 128,
    temperature: Temperature = 0.0,
    top_k: TopK = None,
    top_p: TopP = None,
    stop: Stop = None,
    slots: Slots = 8,
    chunk: Chunk = 512,
    prefixes: Prefixes = 4,
    mesh: Mesh = None,
    dtype: ComputeDtype = None,
    seed: Seed = 0,
) -> None:
    """Continue a prompt and print the new text, or all prompts of a file."""
    from swa_jax.checkpoint.folder import load_model, weights_sum
    from swa_jax.data.chat import prompt_tokens
    from swa_jax.data.prompt_file import ReplyFile
    from swa_jax.data.reply_text import check_stop
    from swa_jax.evaluate.replies import write_replies
    from swa_jax.model.generate import check_generation

    texts = _prompts(prompt, prompts)
    check_output("--out", out)
    drawn = sampling_options(temperature, top_k, top_p, samples)
    partition = parse_mesh(mesh)
    check_stop(stop or ())
    folder = find_model(model)
    opened, tokenizer = open_model(folder, yarn)
    ((_, chosen),) = choose_patterns(opened, [] if pattern is None else [pattern], window.as_window)
    if partition is not None:
        check_generation(partition, opened.config)
    tokens = [ids for ids in prompt_tokens(folder, tokenizer, texts, chat, thinking) for _ in range(samples)]
    if not all(tokens):
        where = "the prompt" if prompts is None else f"prompt {tokens.index([]) // samples + 1} of {prompts}"
        raise ConfigError(f"{where} is empty: a prompt needs at least one token")
    note_context(opened.config, max(map(len, tokens)) + max_new_tokens)
    settings = [
        weights_sum(folder), chosen.to_json(), yarn, dtype or opened.dtype.name, tokens, max_new_tokens, temperature,
        top_k, top_p, stop, seed,
    ]  # fmt: skip
    file = None if out is None else ReplyFile(out, settings)
    if file is not None and file.is_finished:
        return
    decoder = load_model(opened, chosen, dtype=dtype, partition=partition)
    pieces = 1 if partition is None else partition.size("batch")
    slots = -(-min(slots, len(tokens)) // pieces) * pieces

    def replies(skip: Sequence[int] = ()) -> Iterator[PartialReply]:
        return write_replies(
            decoder,
            tokenizer,
            tokens,
            stop or (),
            skip,
            engine={"slots": slots, "chunk": chunk, "prefixes": prefixes, "partition": partition},
            stream={"max_new_tokens": max_new_tokens, "sampling": drawn, "seed": seed},
        )

    if file is not None:
        _write_file(file, samples, len(tokens), replies)
    elif len(tokens) == 1:
        for reply in replies():
            typer.echo(reply.new_text, nl=False)
        typer.echo()
    else:
        _print_in_order(replies())


def _write_file(file: ReplyFile, samples: int, count: int, replies: Any) -> None:
    from swa_jax.report.progress import counted

    file.tell_found(count)
    done = [prompt * samples + sample for prompt, sample in file.replies]
    with counted("replies", count) as advance:
        advance(len(done))
        for reply in replies(done) if len(done) < count else ():
            if reply.ended_by is not None:
                prompt, sample = divmod(reply.number, samples)
                found = {"text": reply.text, "tokens": reply.tokens, "ended_by": reply.ended_by}
                file.add({"prompt": prompt, "sample": sample, **found, "settings": file.settings})
                advance(1)
    file.finish()
    typer.echo(f"{file.file}: {count} replies")


def _print_in_order(replies: Iterator[PartialReply]) -> None:
    """Each reply as one JSON line, in the order of the prompts."""
    import json

    ended: dict[int, PartialReply] = {}
    printed = 0
    for reply in replies:
        if reply.ended_by is not None:
            ended[reply.number] = reply
        while (next_one := ended.pop(printed, None)) is not None:
            typer.echo(json.dumps(next_one.text, ensure_ascii=False))
            printed += 1


def _prompts(prompt: str | None, file: Path | None) -> list[Prompt]:
    """The prompt, of which bytes that are no text arrive as surrogates, or what standard input or a file holds."""
    from swa_jax.data.prompt_file import Prompt, read_prompts

    if (prompt is None) == (file is None):
        raise ConfigError("give either a prompt or --prompts FILE")
    if file is not None:
        return read_prompts(file)
    data = sys.stdin.buffer.read() if prompt == "-" else os.fsencode(str(prompt))
    try:
        return [Prompt(data.decode(), None)]
    except UnicodeDecodeError as error:
        raise ConfigError(f"the prompt is not UTF-8 text, from its byte {error.start} on") from None
