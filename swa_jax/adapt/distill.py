"""Self-distillation (SWAA, section 3.2.2): the original model's own replies, to train it on under windows.

Several replies are drawn to each prompt, and those that a filter keeps become training data. A reply depends on the
model, the settings, the seed, its prompt and its number alone: not on the other prompts of the file, on how many
replies are drawn at once, on which process draws it, or on interruptions (but for rounding in the logits).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from swa_jax.adapt.reply_filters import Filter
from swa_jax.base.errors import ConfigError
from swa_jax.data.distilled import token_fields
from swa_jax.data.documents import Top
from swa_jax.data.prompt_file import ReplyFile
from swa_jax.data.tokenizer import Tokenizer
from swa_jax.model.decoder import Decoder
from swa_jax.model.engine import Engine
from swa_jax.model.generate import by_rope_length, sampling, sequence_key
from swa_jax.model.sharding import Partition
from swa_jax.model.top_logprobs import top_logprobs

MOST_SAMPLES = 1 << 16  # of a prompt


@dataclasses.dataclass(frozen=True)
class Drawing:
    """How replies are drawn; the defaults are SWAA's."""

    samples: int = 4  # of each prompt
    max_new_tokens: int = 1024
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    top_logprobs: int = 0  # stored of each token of a reply
    keep_cut: bool = False  # keep replies that `max_new_tokens` cut off

    def __post_init__(self) -> None:
        if not 1 <= self.samples <= MOST_SAMPLES:
            raise ConfigError(f"samples of a prompt must be from 1 to {MOST_SAMPLES}, and there are {self.samples}")


@dataclasses.dataclass(frozen=True)
class Sample:
    """One reply to be drawn."""

    prompt: int  # its number in the file
    number: int  # among those of the prompt
    tokens: Sequence[int]  # of the prompt
    key: int  # of its random numbers


class PromptShare(NamedTuple):
    """Which of several processes this is: number `part`, from 1, of `parts`."""

    part: int = 1
    parts: int = 1


WHOLE = PromptShare()


def parse_share(text: str) -> PromptShare:
    """The share that `K/N` names. Raises `ConfigError` if it names none."""
    part, _, parts = text.partition("/")
    if part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts):
        return PromptShare(int(part), int(parts))
    raise ConfigError(f"--share must be K/N, the K-th of N shares such as 1/4, got '{text}'")


def samples_of(prompts: Sequence[Sequence[int]], count: int, share: PromptShare = WHOLE) -> list[Sample]:
    """`count` samples of each prompt [n] of this process's share, which has every N-th prompt.

    A prompt that is there several times gets other samples each time.
    """
    seen: Counter[bytes] = Counter()
    samples = []
    for number, prompt in enumerate(prompts):
        content = np.asarray(prompt, np.int32).tobytes()
        if number % share.parts == share.part - 1:
            first = seen[content] * MOST_SAMPLES
            samples += [Sample(number, i, prompt, sequence_key(prompt, first + i)) for i in range(count)]
        seen[content] += 1
    return samples


class Reply(NamedTuple):
    """What was drawn."""

    sample: Sample
    tokens: list[int]  # without an end token
    end: int | None  # the end token that was drawn; None: the limit ended it


def draw(
    model: Decoder,
    samples: Sequence[Sample],
    drawing: Drawing,
    end_ids: Sequence[int],
    done: Collection[tuple[int, int]] = (),
    *,
    partition: Partition | None = None,
    slots: int = 8,
    **engine: Any,
) -> Iterator[Reply]:
    """The replies that are not in `done` (prompt, number), each as soon as it is complete; `engine` is of `Engine`."""
    chosen = sampling(drawing.temperature, drawing.top_k, drawing.top_p)
    limit = drawing.max_new_tokens
    pieces = 1 if partition is None else partition.size("batch")
    for group in by_rope_length(model, [sample.tokens for sample in samples], limit):
        wanted = [samples[i] for i in group if (samples[i].prompt, samples[i].number) not in done]
        if not wanted:
            continue
        # Of all samples of the group, so that what is left of them meets caches of the same length.
        longest = max(len(samples[i].tokens) for i in group)
        worker = Engine(
            model,
            slots=-(-min(slots, len(wanted)) // pieces) * pieces,
            max_length=longest + limit,
            partition=partition,
            **engine,
        )
        tokens: dict[int, list[int]] = {i: [] for i in range(len(wanted))}
        for piece in worker.stream(
            [sample.tokens for sample in wanted],
            max_new_tokens=limit,
            sampling=chosen,
            stop_tokens=end_ids,
            seed=drawing.seed,
            keys=[sample.key for sample in wanted],
        ):
            tokens[piece.prompt] += piece.tokens
            if piece.ended:
                yield Reply(wanted[piece.prompt], tokens.pop(piece.prompt), piece.end)
        del worker  # its caches, before the next group's


def distill(
    model: Decoder,
    tokenizer: Tokenizer,
    samples: Sequence[Sample],
    records: Sequence[dict[str, Any]],
    keep: Filter,
    drawing: Drawing,
    file: ReplyFile,
    *,
    where: str = "prompt",
    partition: Partition | None = None,
    **engine: Any,
) -> Iterator[bool]:
    """Draw, judge and write what `file` does not have yet; tells of each reply whether it is kept.

    Args:
      records: of all prompts of the file, by number: what the filter compares with.
      where: what the file of prompts is called in sentences.
    """
    stream = draw(model, samples, drawing, tokenizer.end_ids, file.replies, partition=partition, **engine)
    for sample, tokens, end in stream:
        line: dict[str, Any] = {
            "prompt": sample.prompt,
            "sample": sample.number,
            "text": tokenizer.decode(tokens),
            "tokens": len(tokens),
            "ended_by": "length" if end is None else "end",
        }
        reply = tokens if end is None else [*tokens, end]
        line["kept"] = (
            len(reply) > 0
            and (end is not None or drawing.keep_cut)
            and keep(
                records[sample.prompt],
                line | {"prompt_text": tokenizer.decode(sample.tokens)},
                f"{where} {sample.prompt}",
            )
        )
        top = None
        if line["kept"] and drawing.top_logprobs:
            top = Top(*top_logprobs(model, sample.tokens, reply, drawing.top_logprobs, partition))
        file.add(line | token_fields(sample.tokens, reply, top))
        yield line["kept"]
