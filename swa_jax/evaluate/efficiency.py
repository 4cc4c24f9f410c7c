"""How fast models answer on the device at hand: several of them in turn, in one run, so that they can be compared."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from swa_jax.base.errors import ConfigError
from swa_jax.model.decoder import Decoder
from swa_jax.model.generate import Batch, decode, prefill, prepare


def measure_efficiency(
    models: Mapping[str, Decoder],
    prompts: Sequence[Sequence[int]],
    *,
    new_tokens: int = 32,
    repeats: int = 5,
    advance: Callable[[int], None] = lambda _: None,
) -> dict[str, dict[str, Any]]:
    """Time to the first token and time per further token of each model, on the same prompts as one batch.

    A round times every model once, in turn, so that what slows the machine slows all of them. The first round compiles
    and does not count. Answers are greedy and all of the same length.

    Args:
      models: by name; usually one model under several patterns.
      prompts: token ids [B][T], of about the same length.
      new_tokens: of each answer, at least 2.
      repeats: rounds that count; the figures are medians over them.
      advance: called with 1 after each model and round, `(repeats + 1) * len(models)` times.

    Returns:
      For each model `first_token_seconds` (the prompts and the first token of the answers), `token_seconds` (each
      further token of the batch), `tokens_per_second` (prompts and answers), `kv_cache_bytes` (a sequence, of the
      allocated arrays), `memory_bytes` (the weights and the caches of all sequences) and all times,
      `first_token_seconds_all` and `token_seconds_all` [repeats].

    Raises:
      ConfigError: no prompts, fewer than 2 new tokens, or no repeats.
    """
    if new_tokens < 2 or repeats < 1:
        raise ConfigError(f"new_tokens must be at least 2 and repeats at least 1, got {new_tokens} and {repeats}")
    batches = {name: prepare(model, prompts, new_tokens) for name, model in models.items()}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    cache_bytes: dict[str, int] = {}
    for number in range(repeats + 1):
        for name, model in models.items():
            first, rest, cache_bytes[name] = _time(model, batches[name], new_tokens)
            if number:
                times[name].append((first, rest))
            advance(1)
    weight_bytes = {name: sum(x.nbytes for x in jax.tree.leaves(nnx.state(model))) for name, model in models.items()}
    return {
        name: _figures(times[name], prompts, new_tokens, cache_bytes[name])
        | {"memory_bytes": cache_bytes[name] + weight_bytes[name]}
        for name in models
    }


def _time(model: Decoder, batch: Batch, new_tokens: int) -> tuple[float, float, int]:
    """Seconds to the first token, seconds of a further one, and the bytes of the caches."""
    start = time.perf_counter()
    logits, cache = jax.block_until_ready(prefill(model, batch))
    jax.block_until_ready(logits.argmax(-1))
    middle = time.perf_counter()
    size = cache.nbytes  # decoding takes the arrays over
    jax.block_until_ready(decode(model, batch, logits, cache, new_tokens)[0])
    return middle - start, (time.perf_counter() - middle) / (new_tokens - 1), size


def _figures(
    times: Sequence[tuple[float, float]], prompts: Sequence[Sequence[int]], new_tokens: int, cache_bytes: int
) -> dict[str, Any]:
    first, rest = (np.array(column) for column in zip(*times, strict=True))
    whole = float(np.median(first + (new_tokens - 1) * rest))
    tokens = sum(map(len, prompts)) + new_tokens * len(prompts)
    return {
        "first_token_seconds": float(np.median(first)),
        "token_seconds": float(np.median(rest)),
        "request_seconds": whole / len(prompts),
        "tokens_per_second": tokens / whole,
        "kv_cache_bytes": cache_bytes // len(prompts),
        "first_token_seconds_all": first.tolist(),
        "token_seconds_all": rest.tolist(),
    }


def break_even(cost_seconds: float, before: Mapping[str, Any], after: Mapping[str, Any]) -> int | None:
    """How many requests it takes until a cost is saved again; None where the model is not faster.

    Args:
      before, after: figures of `measure_efficiency`.
    """
    saved = before["request_seconds"] - after["request_seconds"]
    return None if saved <= 0 else int(-(-cost_seconds // saved))
