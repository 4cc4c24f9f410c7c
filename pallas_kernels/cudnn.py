"""cuDNN for unpacked rows, through `jax.nn.dot_product_attention`: causal softmax over a window or over all keys.

What else cuDNN could take, JAX keeps from us: its log-sum-exp is rounded to the queries' dtype and has no gradient, so
that nothing can be merged with it (sink tokens, sink logits, routing), and packed rows need a private function.
"""

from typing import Literal

import jax
from jax.extend.backend import get_backend

from pallas_kernels.math.spec import AttentionSpec, Coordinates, PerHead
from pallas_kernels.request import Request

DTYPES = ("bfloat16", "float16")
FORWARD = "dot_product_attention_fwd_wrapper"  # the primitive whose results the backward pass needs
_BACKEND: Literal["cudnn", "xla"] = "cudnn"  # XLA stands in for it in tests


def installed() -> bool:
    """Whether this process computes on an NVIDIA GPU: JAX asks cuDNN for its version when it traces."""
    return "cuda" in get_backend().platform_version


def missing(request: Request) -> str | None:
    """What keeps cuDNN from the call, as a sentence; None if nothing does."""
    spec, device = request.spec, request.device
    if not device.cudnn:
        return "JAX asks cuDNN for its version when it traces, and this process has no NVIDIA GPU."
    if request.op != "attention":
        return f"cuDNN has no {request.op}."
    if request.dtype not in DTYPES:
        return f"q is {request.dtype}; cuDNN takes {' and '.join(DTYPES)}."
    most = 128 if device.capability is not None and device.capability < 90 else 256
    if request.head_dim > most or request.head_dim % 8:
        return f"head_dim is {request.head_dim}; cuDNN takes multiples of 8 up to {most} on this GPU."
    if request.q_length != request.kv_length:
        return f"there are {request.q_length} queries and {request.kv_length} keys; for cuDNN they must be equal."
    plain = AttentionSpec(spec.window, scale=spec.scale)
    if spec != plain:
        return "cuDNN takes causal softmax in a plain window, without sink tokens and without a softcap."
    if others := request.given - {"logit_scales"}:  # these are in the queries already
        return f"cuDNN does not take {', '.join(sorted(others))}."
    return None


def attention(
    q: jax.Array,  # [B, T, H, D]
    k: jax.Array,  # [B, T, K, D]
    v: jax.Array,  # [B, T, K, D]
    spec: AttentionSpec,
    where: Coordinates,
    per_head: PerHead,
) -> tuple[jax.Array, None]:
    """Returns out [B, T, H, D] in q's dtype, and no log-sum-exp."""
    del where, per_head  # `missing` has seen that they are the default ones
    # JAX counts the keys before the query's own.
    window = None if spec.window is None else (spec.window - 1, 0)
    return jax.nn.dot_product_attention(
        q, k, v, scale=spec.scale, is_causal=True, local_window_size=window, implementation=_BACKEND
    ), None
