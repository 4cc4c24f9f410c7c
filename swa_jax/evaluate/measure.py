"""One pattern measured: a row of the tables and reports."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from swa_jax.base.estimates import accuracy_interval, bootstrap
from swa_jax.data.tokenizer import Tokenizer
from swa_jax.evaluate.examples import Example
from swa_jax.evaluate.generated_answers import Answers, generate_answers
from swa_jax.evaluate.nll import score_answers
from swa_jax.evaluate.samples import NO_SAMPLES, Samples
from swa_jax.model.decoder import Decoder


def measure_pattern(
    name: str,
    model: Decoder,
    tokenizer: Tokenizer,
    examples: Sequence[Example],
    *,
    max_new_tokens: int,
    batch_size: int = 16,
    samples: Samples = NO_SAMPLES,
    advance: Callable[[int], None] = lambda _: None,
) -> tuple[dict[str, Any], Answers]:
    """Needle accuracy, answer NLL, memory and speed of a model under its pattern: the row, and the answers behind it.

    Args:
      max_new_tokens: generated for each needle; at least as many as the longest answer.
      samples: where what is known of the examples is found and kept.
      advance: called with how many more examples have been answered or scored.
    """
    answers = generate_answers(
        model,
        tokenizer,
        examples,
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        samples=samples,
        advance=advance,
    )
    found = accuracy_interval(answers.scores)
    nll = bootstrap(score_answers(model, examples, batch_size=batch_size, samples=samples, advance=advance).nll)
    row = {
        "name": name,
        "full_layers": list(model.pattern.full_layers),
        "needle_accuracy": found.mean,
        "answer_nll": nll.mean,
        "kv_cache_bytes": answers.kv_cache_bytes,
        "prefill_seconds": answers.prefill_seconds,
        "decode_tokens_per_second": answers.decode_tokens_per_second,
        "needle_interval": found.interval,
        "answer_nll_interval": nll.interval,
        "n": len(examples),
        "answer_nll_n": len(examples),
        "batch_size": answers.batch_size,
        "cache_tokens": answers.max_length,
        "num_layers": model.config.num_hidden_layers,
    }
    return row, answers


def score_by_depth(scores: np.ndarray, depths: int) -> list[float]:
    """The mean score at each of `depths` places, which examples [N] take in turn; NaN where there is none."""
    return [float(here.mean()) if (here := scores[i::depths]).size else float("nan") for i in range(depths)]
