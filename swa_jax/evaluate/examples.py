"""The example that needle tasks, answer NLL and layer selection share, and such examples from a user's file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from swa_jax.base.errors import ConfigError
from swa_jax.data.chat import Wrap
from swa_jax.data.documents import read_records
from swa_jax.data.haystack import TextTokenizer
from swa_jax.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Example:
    """A prompt with its gold answer, both as token ids.

    `answer` follows `prompt` directly. The first query of the answer, which `full_from` names, is at position
    `len(prompt)`. `references` are the strings that a generated answer must contain. `value` are the places in `answer`
    of the tokens that spell them, by which an answer is right or wrong; None: the whole answer is its value.
    """

    prompt: list[int]
    answer: list[int]
    references: list[str]
    meta: dict[str, Any] = field(default_factory=dict)
    value: tuple[int, ...] | None = None

    def queries(self, full_decode: bool | None) -> int:
        """The queries that windows apply to: up to the prompt's last, or to that of the answer's last token."""
        return len(self.prompt) + (0 if full_decode else len(self.answer) - 1)


def value_places(tokenizer: TextTokenizer, answer: str, references: Sequence[str]) -> tuple[int, ...] | None:
    """`Example.value` of an answer: the tokens that hold a part of a reference, where the answer first has it.

    A token that holds more, such as ": 4" or "3.", counts whole. None if the answer has none of the references.
    """
    found = [(start, start + len(one)) for one in references if one and (start := answer.find(one)) >= 0]
    spans = tokenizer.spans(answer)
    places = [i for i, (a, b) in enumerate(spans) if any(a < stop and b > start for start, stop in found)]
    return tuple(places) or None


def prompt_examples(
    tokenizer: Tokenizer,
    file: Path,
    *,
    num_examples: int,
    length: int,
    min_answer: int = 1,
    wrap: Wrap | None = None,
    seed: int = 0,
) -> list[Example]:
    """Examples from records with the fields `prompt` and `answer`, drawn by `seed`. Nothing is cut.

    Their value is the whole answer.

    Args:
      file: a `.jsonl`, `.parquet` or `.array_record` file.
      length: prompt and answer together have at most so many tokens.
      min_answer: an answer has at least so many tokens.
      wrap: what a chat model wants around a prompt.

    Raises:
      ConfigError: the file cannot be read, lacks a field, or has fewer than `num_examples` such records.
    """
    fits, total, wrap = [], 0, wrap or Wrap()
    for prompt, answer in read_records(file, {"prompt": "prompt", "answer": "answer"}):
        total += 1
        tokens = wrap.opening(tokenizer) + tokenizer.encode(wrap.around(prompt))
        said = tokenizer.encode(wrap.begun(answer))
        if tokens and len(said) >= max(1, min_answer) and len(tokens) + len(said) <= length:
            fits.append(Example(tokens, said, [answer]))
    if len(fits) < num_examples:
        raise ConfigError(
            f"{num_examples} examples are asked for, but {len(fits)} of the {total} records of {file} are at most "
            f"{length} tokens long with an answer of at least {min_answer}: ask for fewer, or allow longer prompts "
            "or shorter answers"
        )
    chosen = np.random.default_rng(seed).choice(len(fits), num_examples, replace=False)
    return [fits[i] for i in chosen]
