"""The verb `distill`: a model's own replies as training data."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from swa_jax.cli.generate_options import (
    Chunk,
    MaxNewTokens,
    Samples,
    Slots,
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
    check_output,
    find_model,
    in_output,
    in_prompts,
    in_running,
    note_context,
    open_model,
    parse_mesh,
)

PREFIXES = 4  # prompts whose caches are remembered: samples of one prompt follow each other

PromptFile = Annotated[
    Path, in_prompts(help="A file of prompts, as of generate --prompts, with the fields that the filter needs.")
]
Out = Annotated[Path, in_output(help="A new file for the data. The same command goes on after an interruption.")]
Keep = Annotated[
    str,
    in_output(
        "--filter",
        help="What keeps a reply: none, exact (it is the answer), contains (the answer is in it), judge:JUDGE (as of "
        "evaluate questions) or program:COMMAND (by status 0).",
    ),
]
AnswerField = Annotated[str, in_output(help="The field of a prompt's line with the right answer.")]
KeepCut = Annotated[bool, in_output("--keep-cut", help="Keep replies that --max-new-tokens cuts off.")]
TopLogprobs = Annotated[
    int, in_output(help="Store log-probabilities of the K likeliest tokens, for training by KL.", metavar="K", min=0)
]
ShareText = Annotated[str, in_running(help="K/N: take the K-th of N shares of the prompts.")]


def distill(
    model: Model,
    prompts: PromptFile,
    out: Out,
    samples: Samples = 4,
    chat: WithTemplate = False,
    thinking: Thinking = None,
    keep: Keep = "none",
    answer_field: AnswerField = "answer",
    keep_cut: KeepCut = False,
    top_logprobs: TopLogprobs = 0,
    share: ShareText = "1/1",
    max_new_tokens: MaxNewTokens = 1024,
    temperature: Temperature = 1.0,
    top_k: TopK = None,
    top_p: TopP = None,
    slots: Slots = 8,
    chunk: Chunk = 512,
    mesh: Mesh = None,
    dtype: ComputeDtype = None,
    seed: Seed = 0,
) -> None:
    """Make training data of a model's own replies (SWAA's self-distillation)."""
    from swa_jax.adapt.distill import Drawing, distill, parse_share, samples_of
    from swa_jax.adapt.reply_filters import check_records, find_filter
    from swa_jax.base.errors import ConfigError
    from swa_jax.checkpoint.folder import load_model, weights_sum
    from swa_jax.data.chat import prompt_tokens
    from swa_jax.data.prompt_file import ReplyFile, read_prompts
    from swa_jax.report.progress import counted

    check_output("--out", out)
    part = parse_share(share)
    chosen = find_filter(keep, answer_field)
    sampling_options(temperature, top_k, top_p, samples)
    drawing = Drawing(samples, max_new_tokens, temperature, top_k, top_p, seed, top_logprobs, keep_cut)
    texts = read_prompts(prompts)
    records = [prompt.record or {} for prompt in texts]
    where = f"{prompts}, prompt"
    check_records(keep, answer_field, records, where)
    partition = parse_mesh(mesh)
    model = find_model(model)
    opened, tokenizer = open_model(model)
    if top_logprobs >= opened.config.vocab_size:
        raise ConfigError(
            f"--top-logprobs is {top_logprobs}: the vocabulary has {opened.config.vocab_size} tokens, and some must "
            "be left over"
        )
    tokens = prompt_tokens(model, tokenizer, texts, chat, thinking)
    wanted = samples_of(tokens, samples, part)
    if not wanted:
        raise ConfigError(f"--share {share} has no prompt: {prompts} has {len(tokens)}")
    note_context(opened.config, max(map(len, tokens)) + max_new_tokens)
    settings = [
        weights_sum(model), opened.pattern.to_json(), dtype or opened.dtype.name, tokens, records,
        dataclasses.asdict(drawing), keep, answer_field, part,
    ]  # fmt: skip
    file = ReplyFile(out, settings)
    decoder = load_model(opened, dtype=dtype, partition=partition)
    file.tell_found(len(wanted))
    with counted("replies", len(wanted)) as advance:
        advance(len(file.replies))
        for _ in distill(
            decoder, tokenizer, wanted, records, chosen, drawing, file, where=where,
            partition=partition, slots=slots, chunk=chunk, prefixes=PREFIXES,
        ):  # fmt: skip
            advance(1)
    kept = sum(reply["kept"] for reply in file.replies.values())
    file.finish(lambda reply: reply["kept"])
    cut = 0 if keep_cut else sum(reply["ended_by"] == "length" for reply in file.replies.values())
    note = f"; --max-new-tokens {max_new_tokens} cut off {cut} of them: give more, or keep them with --keep-cut"
    typer.echo(f"{out}: {kept} of {len(wanted)} replies kept, the others are in {out}.rejected{note if cut else ''}")
