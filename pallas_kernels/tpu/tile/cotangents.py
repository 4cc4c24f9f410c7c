"""The cotangents of both branches of a routed layer from that of their mixture (`parts.mix`).

With F = s_f O_full and W = s_w O_window, the branches times their share s = sigmoid(lse - sink) of what sink logits
leave (1 without them), g the gate and a the share of the window in the full softmax (1 for sigmoid):

    out = g F + (1 - g) W                        disagreement = mean over heads and channels of (F - W)^2
    u_f = g dout + c (F - W)                     with c = 2 ddisagreement / (H D)
    u_w = dout - u_f
    of the keys outside the window:  dO = s_f u_f
    of those in it, for both branches:  dO = s_w u_w + a s_f u_f
    gate: the sum of dout (F - W)                lse and sinks: sums by row of u_f O_full and u_w O_window

Written so that every sum and product is of the same three arrays, in the kernels' layout: the compiler then makes all
of it where the product that gives dout ends, in one pass over memory, and dout itself is never written.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.math.parts import LOG2E


class Branch(NamedTuple):
    """A branch's results, head-major."""

    out: jax.Array  # [B, H, T, D]
    lse: jax.Array | None  # [B, H, T] f32 in base 2 (softmax)


class Cotangents(NamedTuple):
    """The cotangents of a pass over some of the keys, head-major."""

    out: jax.Array  # [B, H, T, D]
    lse: jax.Array | None = None  # [B, H, T] in base 2, the forward pass's own (softmax)
    delta: jax.Array | None = None  # [B, H, T]: the row sums of cotangent and out, less that of lse (softmax)


def divide(
    gate: jax.Array,  # [B, T]
    sink_logits: jax.Array | None,  # [H]
    window: Branch,
    full: Branch,
    dout: jax.Array,  # [B, H, T, D]
    ddisagreement: jax.Array,  # [B, T]
) -> tuple[Cotangents, Cotangents, jax.Array, jax.Array | None]:
    """The cotangents of the pass over the window, which serves both branches, and of that over the keys outside, in
    dout's dtype; the gradients of gate [B, T] f32 and sink logits."""
    d, w, f = (x.astype(jnp.float32) for x in (dout, window.out, full.out))
    s_w = s_f = None
    if sink_logits is not None and window.lse is not None and full.lse is not None:
        sink = sink_logits.astype(jnp.float32)[:, None]
        s_w, s_f = (jax.nn.sigmoid(lse / LOG2E - sink) for lse in (window.lse, full.lse))  # [B, H, T]
    difference = _times(s_f, f) - _times(s_w, w)
    slope = ddisagreement.astype(jnp.float32) * (2 / (dout.shape[1] * dout.shape[3]))
    g, c = (x.astype(jnp.float32)[:, None, :, None] for x in (gate, slope))
    u_full = g * d + c * difference
    u_window = d - u_full
    dgate = (d * difference).sum(axis=(1, 3))
    dfull = _times(s_f, u_full)
    if window.lse is None or full.lse is None:
        return Cotangents(dout), Cotangents(dfull.astype(dout.dtype)), dgate, None
    share = jnp.where(window.lse == -jnp.inf, 0, jnp.exp2(window.lse - full.lse))
    joint = _times(s_w, u_window) + share[..., None] * dfull
    window_sum, full_sum = (u_window * w).sum(axis=3), (u_full * f).sum(axis=3)
    dsinks = None
    if sink_logits is not None and s_w is not None and s_f is not None:
        lost = s_w * (1 - s_w) * window_sum + s_f * (1 - s_f) * full_sum
        dsinks = -lost.sum(axis=(0, 2)).astype(sink_logits.dtype)
        window_sum, full_sum = s_w**2 * window_sum, s_f**2 * full_sum
    of_window = Cotangents(joint.astype(dout.dtype), window.lse, window_sum + share * full_sum)
    return of_window, Cotangents(dfull.astype(dout.dtype), full.lse, full_sum), dgate, dsinks


def _times(share: jax.Array | None, x: jax.Array) -> jax.Array:
    """x [B, H, T, D] times a share [B, H, T] of each row; None is 1."""
    return x if share is None else share[..., None] * x
