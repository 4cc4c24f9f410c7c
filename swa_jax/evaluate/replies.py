"""Replies as text: to any number of prompts, each up to its end token, its stop string or the limit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from swa_jax.data.reply_text import ReplyText
from swa_jax.data.tokenizer import Tokenizer
from swa_jax.model.decoder import Decoder
from swa_jax.model.engine import Engine
from swa_jax.model.generate import by_rope_length


class PartialReply(NamedTuple):
    """What has come of one reply."""

    number: int
    new_text: str
    text: str
    tokens: int  # with those of the stop string, none behind it
    ended_by: str | None  # "end": an end token, "stop": a stop string, "length": `max_new_tokens`


def write_replies(
    decoder: Decoder,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    stop: Sequence[str],
    skip: Sequence[int] = (),
    *,
    engine: dict[str, Any],
    stream: dict[str, Any],
) -> Iterator[PartialReply]:
    """Replies to the prompts that are not in `skip`, as they come; `engine` and `stream` are options of `Engine`."""
    limit = stream["max_new_tokens"]
    for group in by_rope_length(decoder, prompts, limit):
        longest = max(len(prompts[i]) for i in group)
        # A sequence is remembered for others, of which there may be none.
        prefixes = min(engine["prefixes"], len(group) - 1)
        worker = Engine(decoder, max_length=longest + limit, **engine | {"prefixes": prefixes})
        texts: dict[int, ReplyText] = {i: ReplyText(tokenizer, stop) for i in group}
        done = [n for n, i in enumerate(group) if i in skip]
        pieces = worker.stream([prompts[i] for i in group], stop_tokens=tokenizer.end_ids, skip=done, **stream)
        for piece in pieces:
            number = group[piece.prompt]
            text = texts[number]
            new = text.push(piece.tokens)
            ended_by = None
            if text.stopped:
                worker.stop(piece.prompt)
                ended_by = "stop"
            elif piece.ended:
                new += text.close()
                ended_by = "stop" if text.stopped else "length" if len(text.tokens) == limit else "end"
            yield PartialReply(number, new, text.text, len(text.tokens), ended_by)
        del worker, pieces  # their caches, before the next group's
