"""Perplexity over evaluation windows and lengths (SWAT, arXiv:2502.18845, Table 2)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from swa_jax.base.errors import ConfigError
from swa_jax.base.estimates import Estimate, bootstrap
from swa_jax.evaluate.nll import perplexity
from swa_jax.model.decoder import Decoder
from swa_jax.model.pattern import AttentionPattern
from swa_jax.model.window import Window

MAX_BLOCKS = 100  # of consecutive tokens, which the bootstrap draws: neighbours are not independent
MIN_BLOCK = 64  # tokens


@dataclass(frozen=True)
class SweepScore:
    """Perplexity at one evaluation window and length; `nll` in nats a token."""

    window: int | None  # None: full attention in every layer
    length: int
    perplexity: float
    # Of the perplexity: 95 % bootstrap over blocks of consecutive tokens; None if they fill one block only.
    interval: list[float] | None
    nll: float
    num_tokens: int
    num_blocks: int
    past_training_length: bool  # the length exceeds the model's max_position_embeddings


def perplexity_sweep(
    model: Decoder,
    tokens: Sequence[int],
    *,
    windows: Sequence[int | None] | None,
    lengths: Sequence[int],
    start: Sequence[int] = (),
    batch_size: int = 16,
    advance: Callable[[int], None] = lambda _: None,
) -> list[SweepScore]:
    """Perplexity of one text under every window, cut into sequences of every length (SWAT, Table 2).

    The list has all lengths of the first window, then those of the next. Every cell scores the same tokens, each once:
    all, but for the text's first where there are no start tokens. At a longer length a token has more text before it.
    The blocks of the bootstrap are the same for all cells.

    Args:
      tokens: the text's ids without start tokens; those and the text are more than the greatest length.
      windows: visible keys of a windowed query; a None among them gives every layer full attention. None in place
        of the list keeps the pattern as it is.
      lengths: tokens a sequence, its start tokens included.
      start: the start tokens before each sequence, which are not scored.
      batch_size: sequences of the greatest length at once; shorter ones fill as many tokens.
      advance: called with how many more tokens are scored, in each cell all of them.

    Raises:
      ConfigError: the text is too short for a length, or the pattern has no windowed layer for a window to change.
    """
    least, total = max(len(start), 1), len(start) + len(tokens)
    for length in lengths:
        if length < least or length >= total:
            raise ConfigError(
                f"the text has {total} tokens, too few for sequences of {length} and the token after each: "
                f"give a longer text or lengths from {least} to {total - 1}"
            )
    scores = []
    models = [(None if model.pattern.is_full else model.pattern.sliding_window, model)]
    if windows is not None:
        models = [(window, model.with_pattern(with_window(model.pattern, window))) for window in windows]
    for window, measured in models:
        for length in lengths:
            size = batch_size * max(lengths) // length
            result = perplexity(measured, tokens, context=length, start=start, batch_size=size, advance=advance)
            nll, num_blocks = block_interval(result.token_nll)
            scores.append(
                SweepScore(
                    window=window,
                    length=length,
                    perplexity=result.perplexity,
                    interval=nll.map(math.exp).interval,
                    nll=nll.mean,
                    num_tokens=result.num_tokens,
                    num_blocks=num_blocks,
                    past_training_length=length > model.config.max_position_embeddings,
                )
            )
    return scores


def with_window(pattern: AttentionPattern, window: int | None) -> AttentionPattern:
    """The pattern with another window; None: full attention everywhere. `ConfigError` if nothing would change."""
    if window is None:
        return dataclasses.replace(pattern.opened, provenance={"method": "full"})
    if pattern.is_full:
        raise ConfigError(
            f"a window of {window} changes nothing: every layer of this pattern has full attention; choose a pattern "
            "with windowed layers, such as --pattern window"
        )
    return pattern.with_window(Window(window))


def block_interval(token_nll: np.ndarray) -> tuple[Estimate, int]:
    """The mean of token losses [N], with a 95 % interval by bootstrap over blocks of consecutive ones; their number."""
    blocks = max(1, min(MAX_BLOCKS, token_nll.size // MIN_BLOCK))
    cut = np.array_split(token_nll, blocks)
    return bootstrap([block.mean() for block in cut], weights=[block.size for block in cut]), blocks
