"""How many tokens go through a model while a method chooses: what the choice costs, whatever the machine."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from contextvars import ContextVar

import jax

from swa_jax.model.config import ModelConfig
from swa_jax.model.flops import forward_flops, output_flops


@dataclasses.dataclass
class Work:
    """What was counted: tokens forward and, for gradients, back, keys that the forward ones read, seconds, and tokens
    whose logits were computed, twice more where gradients went through them."""

    tokens: float = 0
    back: float = 0
    keys: float = 0
    logits: float = 0
    seconds: float = 0

    def flops(self, config: ModelConfig) -> float:
        """Operations with full attention; the way back is twice the way forward, and recomputation does not count."""
        if not self.tokens:
            return 0.0
        layers = forward_flops(config, self.keys / self.tokens) - output_flops(config)
        return layers * (self.tokens + 2 * self.back) + output_flops(config) * self.logits


_COUNTED: ContextVar[tuple[Work, ...]] = ContextVar("counted", default=())


@contextlib.contextmanager
def counted() -> Iterator[Work]:
    """All that is counted inside the `with`; it may stand in another one, which then counts it too."""
    work, begin = Work(), time.monotonic()
    token = _COUNTED.set((*_COUNTED.get(), work))
    try:
        yield work
    finally:
        _COUNTED.reset(token)
        work.seconds = time.monotonic() - begin


def count_pass(tokens: jax.Array, passes: float = 1, *, back: float = 0, logits: float = 0) -> None:
    """Count passes over `tokens` [B, T], and gradients through them; what stands in a part of the layers is a part.

    `logits`: of so many tokens in all, each three times if gradients go through them.
    """
    rows, length = tokens.shape
    for work in _COUNTED.get():
        work.tokens += passes * rows * length
        work.back += back * rows * length
        work.keys += passes * rows * length * (length + 1) / 2
        work.logits += logits
