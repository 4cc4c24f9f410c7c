"""Dense attention straight from the equations: the oracle that every other implementation is held to.

It builds the whole [T, S] matrix in float32 (float64 if given float64) at the highest matmul precision, and lets
JAX differentiate it. Nothing here is meant to be fast.

With s_mn the logits, M the mask of `spec.visible`, d = head_dim and slope_h, b the ALiBi slope and the bias:

    s_mn = softcap(scale * t_h * q_m . k_n) + slope_h * (m - n) + b    SWAT, Eq. 5 (which has no softcap and b = 0)
    softmax: o_m = sum_n M_mn exp(s_mn) v_n / (exp(sink_h) + sum_n M_mn exp(s_mn))
    sigmoid: o_m = sum_n M_mn sigmoid(s_mn) v_n

`sink_h` is the learned sink logit of the query head (absent: exp(sink_h) is 0). It joins the denominator only.
`t_h` is the head's factor in `logit_scales` (absent: 1).
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.math.nonfinite import finite, nan_marks
from pallas_kernels.math.spec import AttentionSpec, Coordinates, PerHead, dense_mask


def attention(
    q: jax.Array,  # [B, T, H, D]
    k: jax.Array,  # [B, S, K, D]
    v: jax.Array,  # [B, S, K, D]
    spec: AttentionSpec,
    where: Coordinates,
    per_head: PerHead,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns out [B, T, H, D] and lse [B, T, H] (None for sigmoid), both in float32 or wider.

    lse is the natural log of the softmax denominator, -inf in rows that see no key.
    """
    alibi_slopes, full_heads = per_head.alibi_slopes, per_head.full_heads
    batch, q_length, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    q, k, v = (x.astype(dtype) for x in (q, k, v))

    def by_kv_head(x):  # [H] -> [K, G, 1, 1]
        return jnp.asarray(x, dtype).reshape(kv_heads, -1, 1, 1)

    q = q.reshape(batch, q_length, kv_heads, heads // kv_heads, head_dim)
    query_nan = nan_marks(q).transpose(0, 2, 3, 1)[..., None]  # [B, K, G, T, 1]
    key_nan = nan_marks(k, v).transpose(0, 2, 1)[:, :, None, None]  # [B, K, 1, 1, S]
    q, k, v = finite(q), finite(k), finite(v)
    scale = spec.scale_for(head_dim)
    logits = scale * jnp.einsum("btkgd,bskd->bkgts", q, k, precision=lax.Precision.HIGHEST)
    if per_head.logit_scales is not None:
        logits = logits * by_kv_head(per_head.logit_scales)
    if spec.logit_softcap is not None:
        logits = spec.logit_softcap * jnp.tanh(logits / spec.logit_softcap)
    if alibi_slopes is not None:
        distance = (where.q_pos[:, :, None] - where.kv_pos[:, None, :])[:, None, None]  # [B, 1, 1, T, S]
        logits = logits + by_kv_head(lax.stop_gradient(alibi_slopes)) * distance
    logits = logits + (query_nan + key_nan)
    mask = dense_mask(spec, where)[:, None, None]  # [B, 1, 1, T, S]
    if full_heads is not None:
        all_keys = dense_mask(spec.full, where)[:, None, None]
        mask = jnp.where(full_heads[:, None, None, None], all_keys, mask)  # [B, K, 1, T, S]

    weights, lse = _weights(spec, logits, mask, per_head, by_kv_head)
    if lse is not None:
        lse = lse.transpose(0, 3, 1, 2).reshape(batch, q_length, heads)
    out = jnp.einsum("bkgts,bskd->btkgd", weights, v, precision=lax.Precision.HIGHEST)
    return out.reshape(batch, q_length, heads, head_dim), lse


def _weights(spec: AttentionSpec, logits, mask, per_head: PerHead, by_kv_head) -> tuple[jax.Array, jax.Array | None]:
    """The weights [B, K, G, T, S], and lse [B, K, G, T] (None for sigmoid)."""
    if spec.activation == "sigmoid":
        if per_head.sigmoid_bias is not None:
            logits = logits + by_kv_head(per_head.sigmoid_bias)
        # Both choices are needed: a masked NaN logit has weight 0, but sigmoid's derivative there would be NaN.
        return jnp.where(mask, jax.nn.sigmoid(jnp.where(mask, logits, 0)), 0), None
    no_sinks = jnp.full((logits.shape[1], 1, 1, 1), -jnp.inf, logits.dtype)
    sinks = no_sinks if per_head.sink_logits is None else by_kv_head(per_head.sink_logits)
    logits = jnp.where(mask, logits, -jnp.inf)
    # The maximum cancels, so it needs no gradient; rows that see nothing have none to subtract.
    top = lax.stop_gradient(jnp.maximum(logits.max(axis=-1, keepdims=True), sinks))
    top = jnp.where(jnp.isfinite(top), top, 0)
    weights = jnp.where(mask, jnp.exp(jnp.where(mask, logits, 0) - top), 0)
    total = weights.sum(axis=-1, keepdims=True) + jnp.exp(sinks - top)
    sees_any = mask.any(axis=-1, keepdims=True)
    total = jnp.where(sees_any, total, 1)
    lse = jnp.where(sees_any, top + jnp.log(total), -jnp.inf)[..., 0]
    return jnp.where(mask, weights / total, 0), lse  # a total may be NaN


def routed_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    gate: jax.Array,
    spec: AttentionSpec,
    where: Coordinates,
    per_head: PerHead,
    *,
    inference: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Two separate attentions mixed by `gate` [B, T] (SwiAttn): returns out and the branch disagreement [B, T]."""
    full, _ = attention(q, k, v, spec.full, where, per_head)
    window, _ = attention(q, k, v, spec, where, per_head)
    share = gate.astype(full.dtype)[:, :, None, None]
    if inference:
        full = jnp.where(share == 0, window, full)
    return share * full + (1 - share) * window, jnp.square(full - window).mean(axis=(2, 3))


def decode_attention(q, k_cache, v_cache, spec: AttentionSpec, where: Coordinates, per_head: PerHead) -> jax.Array:
    """Decoding is attention whose keys are a cache; see `pallas_kernels.decode_attention`."""
    return attention(q, k_cache, v_cache, spec, where, per_head)[0]
