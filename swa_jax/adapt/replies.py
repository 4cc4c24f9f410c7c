"""What `swa-jax adapt --tune-prompts` trains on: the original model's own replies (SWAA, section 3.2.2), by KL."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from swa_jax.adapt.distill import Drawing, Sample, distill, samples_of
from swa_jax.adapt.reply_filters import check_records, find_filter
from swa_jax.base.errors import ConfigError
from swa_jax.base.files import sum_of_json
from swa_jax.data.chat import prompt_tokens
from swa_jax.data.prompt_file import Prompt, ReplyFile, read_prompts
from swa_jax.data.tokenizer import Tokenizer
from swa_jax.model.config import ModelConfig
from swa_jax.model.decoder import Decoder

TOP_LOGPROBS = 16  # of the vocabulary, for each token of a reply; the others count as one
ANSWER = "answer"  # the field of a prompt's record with the right answer
FILE = "replies.jsonl"
REPLY_TOKENS = 256  # of a reply, at most, where nothing is said


@dataclasses.dataclass(frozen=True)
class Replies:
    """Replies to be drawn.

    Attributes:
      where: the file of the prompts.
      tokens: of each prompt, as the model reads it.
      drawing: replies of plain prompts may be cut off by the limit; those of chats may not, as chats end.
    """

    where: Path
    prompts: Sequence[Prompt]
    tokens: Sequence[list[int]]
    drawing: Drawing

    @property
    def records(self) -> list[dict[str, Any]]:
        return [prompt.record or {} for prompt in self.prompts]

    @property
    def keep(self) -> str:
        """The filter: right answers, where every prompt has one to compare with."""
        answered = all(ANSWER in record for record in self.records)
        return "contains" if answered else "none"

    @property
    def samples(self) -> list[Sample]:
        return samples_of(self.tokens, self.drawing.samples)

    def content(self, model: str) -> str:
        """The sum of everything that the replies depend on; `model` is that of the model."""
        return sum_of_json([model, list(self.tokens), self.records, dataclasses.asdict(self.drawing)])


def find_replies(
    file: Path,
    folder: str | Path,
    tokenizer: Tokenizer,
    config: ModelConfig,
    *,
    max_new_tokens: int,
    length: int,
    seed: int,
) -> Replies:
    """The replies to the prompts of `file`, of at most `max_new_tokens` each.

    Args:
      folder: the model's, which may have a chat template.
      length: tokens of a row of training; a prompt and its reply must fit.

    Raises:
      ConfigError: the file has no such prompts, or one that is too long; the sentence names it.
    """
    prompts = read_prompts(file)
    tokens = prompt_tokens(folder, tokenizer, prompts, chat=False)
    longest = max(range(len(tokens)), key=lambda number: len(tokens[number]))
    if len(tokens[longest]) + max_new_tokens > length:
        raise ConfigError(
            f"{file}, prompt {longest} has {len(tokens[longest])} tokens, and with a reply of {max_new_tokens} it is "
            f"longer than {length}: leave it out, or take a smaller --reply-tokens or a greater --length"
        )
    drawing = Drawing(
        max_new_tokens=max_new_tokens,
        seed=seed,
        top_logprobs=min(TOP_LOGPROBS, config.vocab_size - 1),
        keep_cut=all(prompt.messages is None for prompt in prompts),
    )
    replies = Replies(file, prompts, tokens, drawing)
    check_records(replies.keep, ANSWER, replies.records, f"{file}, prompt")
    return replies


def draw_replies(replies: Replies, model: Decoder, tokenizer: Tokenizer, model_sum: str, out: Path) -> Iterator[int]:
    """Write the file `out`; gives how many replies there are so far. A killed drawing goes on where it was.

    Raises:
      ConfigError: no reply is kept.
    """
    if out.exists():
        return
    keep = find_filter(replies.keep, ANSWER)
    file = ReplyFile(out, replies.content(model_sum))
    file.tell_found(len(replies.samples))
    yield len(file.replies)
    for _ in distill(
        model,
        tokenizer,
        replies.samples,
        replies.records,
        keep,
        replies.drawing,
        file,
        where=f"{replies.where}, prompt",
    ):
        yield len(file.replies)
    if not any(reply["kept"] for reply in file.replies.values()):
        why = "has the right answer" if replies.keep != "none" else "came to its end"
        raise ConfigError(
            f"of the model's {len(file.replies)} replies to the prompts of {replies.where} none {why}: give "
            "prompts that it can answer, or --tune-data"
        )
    file.finish(lambda reply: reply["kept"])
