"""Distilled data: what a model replied to prompts, token by token, in the form that training reads.

One JSON object a line, as `swa-jax distill` writes it:

    prompt, sample   the number of the prompt in its file, and that of the sample, both from 0
    text             the reply as text
    tokens           how many tokens the model drew, an end token not counted
    ended_by         "end": an end token, "length": the limit on new tokens
    kept             true; false for what a filter has refused
    prompt_tokens    token ids [m] of the prompt, as the model read them
    reply_tokens     token ids [n] of the reply; the end token is the last, if there was one
    top_tokens       token ids [n, K]: the K likeliest tokens at the place of each reply token, likeliest first
    top_logprobs     their log-probabilities [n, K], in nats, at temperature 1

The last two are there if log-probabilities were asked for. Ids are little-endian uint32 and log-probabilities
little-endian float16, row by row, in base64: 8 characters for each of the n * K pairs.
"""

from __future__ import annotations

import base64
import binascii
import functools
from pathlib import Path
from typing import Any

import numpy as np

from swa_jax.base.errors import ConfigError
from swa_jax.data.documents import Answered, Top, read_records
from swa_jax.data.tokenizer import Tokenizer

TOKENS, LOGPROBS = np.dtype("<u4"), np.dtype("<f2")
FIELDS = {"prompt": "prompt_tokens", "reply": "reply_tokens"}
TOP_FIELDS = {"top tokens": "top_tokens", "top log-probabilities": "top_logprobs"}


def encoded(array: Any, dtype: np.dtype) -> str:
    """The bytes of an array in base64."""
    return base64.b64encode(np.ascontiguousarray(array, dtype).tobytes()).decode()


def decoded(text: str, dtype: np.dtype, where: str) -> np.ndarray:
    """The array [n] that `encoded` wrote. Raises `ConfigError` if it did not."""
    try:
        data = base64.b64decode(text, validate=True)
        return np.frombuffer(data, dtype)
    except (binascii.Error, ValueError):
        raise ConfigError(
            f"{where} is not what `swa-jax distill` writes: base64 of whole {dtype.itemsize * 8}-bit numbers"
        ) from None


def token_fields(prompt: Any, reply: Any, top: Top | None) -> dict[str, str]:
    """The fields of a line that hold arrays: ids [m] and [n] and, if there is one, `top` [n, K]."""
    fields = {"prompt_tokens": encoded(prompt, TOKENS), "reply_tokens": encoded(reply, TOKENS)}
    if top is not None:
        fields |= {"top_tokens": encoded(top.tokens, TOKENS), "top_logprobs": encoded(top.logprobs, LOGPROBS)}
    return fields


@functools.lru_cache(maxsize=4)  # the stages of a run read the same data
def read_distilled(files: tuple[Path, ...], tokenizer: Tokenizer, top: int = 0) -> list[Answered]:
    """Each sample's prompt and reply, as tokens, and the `top` likeliest of its log-probabilities, if any.

    Raises:
      ConfigError: a field is missing or damaged, the ids are not the tokenizer's, or there are fewer log-probabilities
        than `top`; the sentence names the file and the sample.
    """
    prompts: list[Answered] = []
    for file in files:
        for number, texts in enumerate(read_records(file, FIELDS | (TOP_FIELDS if top else {})), 1):
            where = f"{file}, sample {number}"
            prompts.append(_sample(texts, tokenizer, top, where))
    return prompts


def _sample(texts: list[str], tokenizer: Tokenizer, top: int, where: str) -> Answered:
    prompt, reply = (
        decoded(text, TOKENS, f"{where}, {name}").astype(np.int32)
        for text, name in zip(texts, FIELDS.values(), strict=False)
    )
    tops = None
    if top:
        ids = decoded(texts[2], TOKENS, f"{where}, top_tokens")
        values = decoded(texts[3], LOGPROBS, f"{where}, top_logprobs")
        if len(ids) != len(values) or len(ids) % len(reply):
            raise ConfigError(
                f"{where}: {len(ids)} top tokens and {len(values)} log-probabilities do not fit "
                f"{len(reply)} reply tokens"
            )
        shape = (len(reply), len(ids) // len(reply))
        if shape[1] < top:
            raise ConfigError(
                f"{where} has {shape[1]} log-probabilities a token, but 'distill.top_k' is {top}: lower it, or distill "
                f"with --top-logprobs {top}"
            )
        tops = Top(ids.astype(np.int32).reshape(shape)[:, :top], values.reshape(shape)[:, :top])
    for ids in (prompt, reply, *(() if tops is None else (tops.tokens,))):
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < tokenizer.num_ids:
            raise ConfigError(
                f"{where} holds token {int(ids.max())}, but the tokenizer and the model have {tokenizer.num_ids}: it "
                "was distilled with another tokenizer"
            )
    return Answered(np.concatenate([prompt, reply]), len(prompt), tops)
