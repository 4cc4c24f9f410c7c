"""A window's forward pass in Triton itself, called by jax-triton: a prototype of what outlives Pallas' Triton lowering.

Nothing dispatches to it yet; docs/data/gpu-lowering.md says why this way was chosen. It needs the extra `triton`. The
algorithm is that of `triton.py`: a program for each block of queries, query head and row of the batch, over masked and
whole blocks of keys. The scale and the maximum are applied in one step, inside the exponential.
"""

import jax
import jax.numpy as jnp
import jax_triton
import triton
import triton.language as tl

from pallas_kernels.math.parts import LOG2E


@triton.jit
def _visit(
    q, k, v, first, last, state, row, scale, T,
    WINDOW: tl.constexpr, MASKED: tl.constexpr, BLOCK_K: tl.constexpr, D: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """The maximum, the sum and the weighted values of each row, with the blocks of keys from `first` up to `last`."""
    most, total, out = state
    column, channel = tl.arange(0, BLOCK_K), tl.arange(0, D)
    for start in range(first, last, BLOCK_K):
        key = start + column
        here = key[:, None] * STRIDE + channel[None, :]
        inside = key[:, None] < T
        logits = tl.dot(q, tl.trans(tl.load(k + here, mask=inside, other=0.0)))  # [BLOCK_Q, BLOCK_K]
        if MASKED:
            back = row[:, None] - key[None, :]
            logits = tl.where((back >= 0) & (back < WINDOW), logits, -float("inf"))
        now = tl.maximum(most, tl.max(logits, 1) * scale)
        kept, weights = tl.exp2(most - now), tl.exp2(logits * scale - now[:, None])
        total = total * kept + tl.sum(weights, 1)
        values = tl.load(v + here, mask=inside, other=0.0)
        out = tl.dot(weights.to(values.dtype), values, out * kept[:, None])
        most = now
    return most, total, out


@triton.jit
def window_forward_kernel(
    q, k, v, T, scale, out, lse,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """q, out: [B, T, H, D]; k, v: [B, T, K, D]; lse: [B, H, T] float32, base 2."""
    block, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, channel = block * BLOCK_Q + tl.arange(0, BLOCK_Q), tl.arange(0, D)
    there = ((batch * T + row[:, None]) * H + head) * D + channel[None, :]
    q_tile = tl.load(q + there, mask=row[:, None] < T, other=0.0)
    k += (batch * T * K + head // (H // K)) * D
    v += (batch * T * K + head // (H // K)) * D
    start, stop = block * BLOCK_Q, tl.minimum((block + 1) * BLOCK_Q, T)
    first, diagonal = tl.maximum(start - WINDOW + 1, 0) // BLOCK_K * BLOCK_K, start // BLOCK_K * BLOCK_K
    # From here to the diagonal every query of the block sees every key.
    whole = tl.cdiv(tl.maximum(stop - WINDOW, 0), BLOCK_K) * BLOCK_K
    whole = tl.minimum(tl.maximum(whole, first), diagonal)
    state = tl.full([BLOCK_Q], -1e30, tl.float32), tl.zeros([BLOCK_Q], tl.float32), tl.zeros([BLOCK_Q, D], tl.float32)
    state = _visit(q_tile, k, v, first, whole, state, row, scale, T, WINDOW, True, BLOCK_K, D, K * D)
    state = _visit(q_tile, k, v, whole, diagonal, state, row, scale, T, WINDOW, False, BLOCK_K, D, K * D)
    most, total, sums = _visit(q_tile, k, v, diagonal, stop, state, row, scale, T, WINDOW, True, BLOCK_K, D, K * D)
    tl.store(out + there, (sums / total[:, None]).to(out.dtype.element_ty), mask=row[:, None] < T)
    tl.store(lse + (batch * H + head) * T + row, most + tl.log2(total), mask=row < T)


def window_forward(
    q: jax.Array, k: jax.Array, v: jax.Array, window: int, block_q: int = 128, block_k: int = 64
) -> tuple[jax.Array, jax.Array]:
    """Out [B, T, H, D] and lse [B, H, T] float32, base 2, of causal softmax over the last `window` keys.

    Args:
      q: [B, T, H, D], D a power of two of at least 16; k, v: [B, T, K, D].
    """
    B, T, H, D = q.shape
    out: tuple[jax.Array, jax.Array] = jax_triton.triton_call(
        *(q, k, v, T, D**-0.5 * LOG2E),
        kernel=window_forward_kernel,
        out_type=(jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct((B, H, T), jnp.float32)),
        grid=(triton.cdiv(T, block_q), H, B),
        num_warps=8,
        num_stages=3,
        backend_options={"enable_fp_fusion": True},
        H=H,
        K=k.shape[2],
        D=D,
        WINDOW=window,
        BLOCK_Q=block_q,
        BLOCK_K=block_k,
    )
    return out
