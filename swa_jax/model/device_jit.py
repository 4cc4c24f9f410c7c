"""`jax.jit` for generation, with what the compiler of the device has to be told."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

# On a GPU, cuBLAS multiplies by a layer's weights where they lie among those of all layers. XLA's own matrix products,
# and the one that it makes of two with the same operand, are handed a copy of each weight for each new token.
GPU_OPTIONS: dict[str, Any] = {"xla_gpu_enable_triton_gemm": False, "xla_disable_hlo_passes": "dot-merger"}


def device_jit(**options: Any) -> Callable[[Callable], Any]:
    """A decorator: `jax.jit` with these options and those of the default device, which is asked at the first call.

    The function that it makes has `program`, which returns what `jax.jit` did.
    """

    def decorate(function: Callable) -> Any:
        @functools.cache
        def program(platform: str) -> Any:
            chosen = GPU_OPTIONS if platform == "gpu" else None
            return jax.jit(function, compiler_options=chosen, **options)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return program(jax.default_backend())(*args, **kwargs)

        call.program = lambda: program(jax.default_backend())  # type: ignore[attr-defined]
        return call

    return decorate
