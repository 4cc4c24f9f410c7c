"""What a head hybrid saves when it is deployed: memory and speed against the share of windowed KV heads."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from swa_jax.model.decoder import Decoder
from swa_jax.model.generate import Batch, decode, prefill, prepare
from swa_jax.model.window import Window
from swa_jax.select.heads import head_pattern, heuristic_mask


class Deployed(NamedTuple):
    """A model under one ratio, and its times, a round each."""

    ratio: float
    windowed_heads: int
    model: Decoder
    prefill_seconds: list[float]
    decode_seconds: list[float]


def measure(
    model: Decoder,
    ratios: Sequence[float],
    window: Window,
    *,
    length: int,
    batch_size: int,
    new_tokens: int,
    rounds: int,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> list[dict[str, Any]]:
    """A row for each ratio, the share of KV heads that is windowed; which heads they are is drawn.

    Every round times each ratio once, in turn, after one that compiles; times are medians. `kv_cache_bytes` is what
    the arrays of one sequence hold. Keys that end in `_ratio` compare with the first of `ratios`.
    """
    config = model.config
    shape = (config.num_hidden_layers, config.common_kv_heads)
    rng = np.random.default_rng(seed)
    prompts = rng.integers(config.vocab_size, size=(batch_size, length)).tolist()
    batch = prepare(model, prompts, new_tokens)
    deployed = []
    for ratio in ratios:
        full = heuristic_mask("random-heads", *shape, ratio, seed)
        pattern = head_pattern(full, window)
        deployed.append(Deployed(ratio, int((~full).sum()), model.with_pattern(pattern), [], []))
    held = {}
    for number in range(rounds + 1):
        for place, one in enumerate(deployed):
            first, rest, held[one.ratio] = _time(one.model, batch, new_tokens)
            if number:  # the first compiles
                one.prefill_seconds.append(first)
                one.decode_seconds.append(rest)
            if progress:
                progress(number * len(deployed) + place + 1, (rounds + 1) * len(deployed))
    rows = []
    for one in deployed:
        first, rest = (float(np.median(seconds)) for seconds in (one.prefill_seconds, one.decode_seconds))
        rows.append(
            {
                "ratio": one.ratio,
                "windowed_heads": one.windowed_heads,
                "kv_cache_bytes": held[one.ratio] // batch_size,
                "prefill_tokens_per_second": batch_size * length / first,
                "decode_tokens_per_second": batch_size * (new_tokens - 1) / rest,
            }
        )
    for row in rows:
        for key in ("prefill_tokens_per_second", "decode_tokens_per_second", "kv_cache_bytes"):
            row[f"{key}_ratio"] = row[key] / rows[0][key]
    return rows


def _time(model: Decoder, batch: Batch, new_tokens: int) -> tuple[float, float, int]:
    """Seconds of prefill and of decoding, and the bytes of the caches."""
    start = time.perf_counter()
    logits, cache = jax.block_until_ready(prefill(model, batch))
    middle = time.perf_counter()
    held = cache.nbytes  # decoding takes the arrays over
    jax.block_until_ready(decode(model, batch, logits, cache, new_tokens)[0])
    return middle - start, time.perf_counter() - middle, held
