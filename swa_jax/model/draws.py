"""Drawing a model's first weights."""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from flax import nnx
from jax.nn.initializers import Initializer

_SPLIT = contextvars.ContextVar("split", default=False)


@contextlib.contextmanager
def split_over_devices() -> Iterator[None]:
    """Inside, parameters are drawn in their own shape, so that each device of a mesh can draw its part."""
    token = _SPLIT.set(True)
    try:
        yield
    finally:
        _SPLIT.reset(token)


def normal(stddev: float) -> Initializer:
    """`nnx.initializers.normal`, the same numbers, drawn as one row: XLA takes seconds to compile some shapes on a CPU
    ([5, 24, 12] takes twenty times as long as [1440])."""
    draw = nnx.initializers.normal(stddev)

    def init(key: jax.Array, shape: Sequence[int], dtype: Any = None, out_sharding: Any = None) -> jax.Array:
        if _SPLIT.get():
            return draw(key, shape, dtype, out_sharding)
        return draw(key, (math.prod(shape),), dtype).reshape(shape)

    return init
