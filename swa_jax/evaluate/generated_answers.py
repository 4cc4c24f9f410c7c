"""Needle accuracy by real generation, with what it took: time and cache memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from swa_jax.base.errors import ConfigError
from swa_jax.data.tokenizer import Tokenizer
from swa_jax.evaluate.examples import Example
from swa_jax.evaluate.ruler import Score, string_match_all
from swa_jax.evaluate.samples import NO_SAMPLES, Samples
from swa_jax.model.decoder import Decoder
from swa_jax.model.generate import NOTHING, decode, drawing, prefill, prepare


@dataclass(frozen=True)
class Answers:
    """Generated answers to N examples, in batches of `batch_size`. Times exclude compilation."""

    texts: list[str]
    scores: np.ndarray  # [N] f64, from 0 to 1; as a rule the share of each example's references found in its text
    batch_size: int
    max_length: int  # T_max of the caches, tokens
    prefill_seconds: float  # a prompt: of a batch, divided by its size
    decode_tokens_per_second: float  # of the whole batch together
    kv_cache_bytes: int  # a sequence, from the allocated arrays


def needle_accuracy(
    model: Decoder, tokenizer: Tokenizer, examples: Sequence[Example], *, max_new_tokens: int, batch_size: int = 16
) -> np.ndarray:
    """The share of each example's references found in its greedy continuation: [N] float64, from 0 to 1."""
    return generate_answers(
        model, tokenizer, examples, max_new_tokens=max_new_tokens, batch_size=batch_size, timed=False
    ).scores


def generate_answers(
    model: Decoder,
    tokenizer: Tokenizer,
    examples: Sequence[Example],
    *,
    max_new_tokens: int,
    batch_size: int = 16,
    timed: bool = True,
    stop_tokens: Sequence[int] = (),
    score: Score = string_match_all,
    samples: Samples = NO_SAMPLES,
    advance: Callable[[int], None] = lambda _: None,
) -> Answers:
    """Greedy answers to all examples, scored by string match (RULER); `stop_tokens` end one before `max_new_tokens`.

    Times are the median over the batches after the first of their shape, which compiles. If there are none, `timed`
    runs the first batch again, twice where that has to compile; without it the times are NaN. Batches that `samples`
    knows are not run, and those that are run are kept there. `advance` is called with how many more examples are done.

    Raises:
      ConfigError: no examples.
    """
    if not examples:
        raise ConfigError("examples is empty: give at least one example")
    batch_size = min(batch_size, len(examples))
    longest = max((e.prompt for e in examples), key=len)
    max_length = prepare(model, [longest], max_new_tokens).max_length
    settings: list[Any] = [batch_size, max_new_tokens, max_length, list(map(int, stop_tokens))]
    if score is not string_match_all:
        settings.append(getattr(score, "__name__", ""))
    runs: list[_TimedBatch] = []
    records: list[dict[str, Any]] = []
    for i in range(0, len(examples), batch_size):
        batch = examples[i : i + batch_size]
        known = samples.find("answer", batch, settings)
        if known is None:
            runs.append(_run_batch(model, batch, batch_size, max_new_tokens, max_length, stop_tokens))
            known = _records(tokenizer, batch, runs[-1], batch_size, score)
            samples.add("answer", batch, settings, known)
        records += known
        advance(len(batch))
    warm = [run for i, run in enumerate(runs) if run.prompt_tokens in {r.prompt_tokens for r in runs[:i]}]
    while timed and not warm:
        again = _run_batch(model, examples[:batch_size], batch_size, max_new_tokens, max_length, stop_tokens)
        warm = [run for run in [again] if run.prompt_tokens in {r.prompt_tokens for r in runs}]
        runs.append(again)
    prefill_seconds, steps_per_second = (
        float(np.median(values)) if warm else float("nan")
        for values in ([run.prefill_seconds for run in warm], [run.decode_steps / run.decode_seconds for run in warm])
    )
    return Answers(
        texts=[record["answer"] for record in records],
        scores=np.array([record["score"] for record in records], np.float64),
        batch_size=batch_size,
        max_length=max_length,
        prefill_seconds=prefill_seconds / batch_size,
        decode_tokens_per_second=batch_size * steps_per_second,
        kv_cache_bytes=records[0]["kv_cache_bytes"],
    )


def _records(
    tokenizer: Tokenizer, examples: Sequence[Example], run: _TimedBatch, batch_size: int, score: Score
) -> list[dict[str, Any]]:
    """What is kept of each example of a batch."""
    texts = [tokenizer.decode(row[row != NOTHING].tolist()) for row in run.new]
    return [
        {"answer": text, "score": score(text, example.references), "kv_cache_bytes": run.cache_bytes // batch_size}
        for text, example in zip(texts, examples, strict=True)
    ]


class _TimedBatch(NamedTuple):
    """One batch through prefill and decode."""

    new: np.ndarray  # [B, max_new_tokens] int32
    prompt_tokens: int  # a row, with padding
    prefill_seconds: float
    decode_seconds: float
    decode_steps: int  # one fewer than the tokens drawn: the first comes with the prefill
    cache_bytes: int


def _run_batch(
    model: Decoder,
    examples: Sequence[Example],
    batch_size: int,
    max_new_tokens: int,
    max_length: int,
    stop_tokens: Sequence[int],
) -> _TimedBatch:
    rows = [*examples, *[examples[-1]] * (batch_size - len(examples))]  # one shape, hence one compilation, for all
    batch = prepare(model, [e.prompt for e in rows], max_new_tokens, max_length=max_length)
    start = time.perf_counter()
    logits, cache = jax.block_until_ready(prefill(model, batch))
    middle = time.perf_counter()
    cache_bytes = cache.nbytes
    new = np.asarray(decode(model, batch, logits, cache, max_new_tokens, drawing(stop_tokens=stop_tokens))[0])
    end = time.perf_counter()
    drawn = (new != NOTHING).sum(1)  # [B], without the stop token
    steps = int((drawn + (drawn < max_new_tokens)).max()) - 1
    return _TimedBatch(new[: len(examples)], batch.tokens.shape[1], middle - start, end - middle, steps, cache_bytes)
