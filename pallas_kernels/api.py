"""The attention op: checks a call, puts defaults in, and hands it to an implementation.

`implementation=None` picks the best one for the device. A *named* one that cannot do the call raises and says what is
missing; nothing falls back silently.
"""

import functools
import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any, Literal, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import cudnn, tpu, xla
from pallas_kernels.dispatch import Implementation, choose, current_device
from pallas_kernels.math import reference
from pallas_kernels.math.checks import check_array, check_needs_window, check_qkv, checked_packing, checked_per_head
from pallas_kernels.math.parts import scale_queries
from pallas_kernels.math.ring import Ring
from pallas_kernels.math.rotary import Rotation, rotate
from pallas_kernels.math.spec import (
    AttentionOptions,
    AttentionSpec,
    Coordinates,
    Packing,
    PerHead,
    PerHeadOptions,
    coordinates,
    with_keywords,
)
from pallas_kernels.request import Op, Request, given_options

_log = logging.getLogger(__name__)

_IMPLEMENTATIONS: dict[str, ModuleType] = {"tpu": tpu, "cudnn": cudnn, "xla": xla, "reference": reference}
_MAX_DECODE_TOKENS = 8
_NO_PER_HEAD, _NO_PACKING = PerHead(), Packing()


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    spec: AttentionSpec,
    *,
    per_head: PerHead = _NO_PER_HEAD,
    packing: Packing = _NO_PACKING,
    return_lse: bool = False,
    rotation: Rotation | None = None,
    ring: Ring | None = None,
    implementation: Implementation | None = None,
    **options: Unpack[AttentionOptions],
) -> Any:
    """Attention of the queries q over the keys k and values v. It can be differentiated in reverse mode.

    Args:
      q: [B, T, H, D] floating, of 16 bits or more. If devices hold parts of it, kernels are called inside
        `jax.shard_map`, with check_vma=False. For softmax the TPU kernels round q times its scale to q's dtype.
      k, v: [B, S, K, D] of q's dtype; H is a multiple of K, and query head h reads KV head h // (H / K).
      spec: the window, the sink tokens and the activation; see `AttentionSpec`.
      alibi_slopes: [H] floating, without a gradient. `slope * (query position - key position)` joins the logits after
        the softcap (SWAT, Eq. 4 and 5); negative slopes favour recent keys.
      sigmoid_bias: scalar or [H], added to the logits; for sigmoid only.
      sink_logits: [H], learned logits that enter the denominator only (gpt-oss); for softmax only.
      q_segment_ids: [B, T] integers, the ids of packed sequences. A segment is one contiguous run of an id. Id 0 is
        padding: it sees nothing, nothing sees it, and its output is zero.
      kv_segment_ids: [B, S] integers. None takes q_segment_ids; then T must equal S.
      q_positions, kv_positions: [B, T] and [B, S] integers. Windows, sink tokens, ALiBi and causality compare them.
        Position 0 is the first real token of the segment; a negative position is padding. None takes the array index,
        which restarts with each segment.
      full_from: [B] or [B, segments] integers. Queries at a position >= full_from of their segment see past the
        window. Ids 1, 2, ... are columns 0, 1, ...; [B] is for rows of one segment with id 1. Under jit the ids cannot
        be checked, and a row of a segment without a column comes out as NaN.
      full_heads: [K] bool, may be traced. All queries of these KV heads see past the window.
      logit_scales: [H] floating, multiplies each head's logits before the softcap; bfloat16 queries carry it, rounded.
      per_head, packing: the options above as two values; keywords come on top.
      return_lse: also return the log-sum-exp of the logits; for softmax only.
      rotation: by which the queries are still to be rotated (RoPE). The TPU kernels do it as they read them.
      ring: inside shard_map, the devices that share the keys; `packing` has the positions of all keys, by device.
      implementation: "tpu", "triton", "cudnn", "xla" or "reference"; None is the best for the call and device.

    Returns:
      out [B, T, H, D] in q's dtype, zero in rows that see nothing. With `return_lse` also lse [B, T, H] float32, the
      natural log of the softmax denominator with its sink logits, -inf in those rows.

    Raises:
      ValueError: an argument is wrong or contradicts another; the sentence names it.
      NotImplementedError: the named implementation cannot do the call.
    """
    per_head, packing = with_keywords(options, per_head, packing)
    per_head, packing, kv_length = _checked(q, k, v, spec, per_head, packing, ring)
    if return_lse and spec.activation == "sigmoid":
        raise ValueError("return_lse is True with activation 'sigmoid', which has no log-sum-exp; leave it False.")
    backend = _backend("attention", q, k, spec, given_options(per_head, packing, return_lse=return_lse), implementation)
    where = coordinates(q.shape[1], kv_length, **packing._asdict())
    k, v, where, sharing = _of_all_devices(ring, k, v, where, backend)
    q, per_head = _scaled(q, per_head, backend)
    q, rotating = _rotated(q, rotation, backend)
    out, lse = backend.attention(q, k, v, spec, where, per_head, **sharing, **rotating)
    out = _nan_where_unassigned(out, where, packing.full_from).astype(q.dtype)
    return (out, lse) if return_lse else out


def routed_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    gate: jax.Array,
    spec: AttentionSpec,
    *,
    per_head: PerHead = _NO_PER_HEAD,
    packing: Packing = _NO_PACKING,
    inference: bool = False,
    rotation: Rotation | None = None,
    ring: Ring | None = None,
    implementation: Implementation | None = None,
    **options: Unpack[AttentionOptions],
) -> tuple[jax.Array, jax.Array]:
    """SwiAttn's layer: `gate * O_full + (1 - gate) * O_window`. One pass over the keys gives both branches.

    All other arguments and keywords are those of `attention`; `full_from` and `full_heads` widen the window
    branch.

    Args:
      gate: [B, T] floating, one gate for each token, shared by all heads. The gradient to it is exact.
      spec: `spec.window` and the sink tokens are those of the window branch. The full branch is the same without a
        window.
      inference: compute the full branch only for rows whose gate is not 0, gathered into dense blocks. The
        disagreement of the other rows is then 0, and the call cannot be differentiated.

    Returns:
      out [B, T, H, D] in q's dtype, and the disagreement of the branches [B, T] float32: the mean over heads and
      head_dim of (O_full - O_window)^2, the "MSE" of SwiAttn's Eq. 8. Both can be differentiated.

    Raises:
      ValueError: as in `attention`; also if `spec.window` is None.
      NotImplementedError: as in `attention`.
    """
    per_head, packing = with_keywords(options, per_head, packing)
    per_head, packing, kv_length = _checked(q, k, v, spec, per_head, packing, ring)
    if spec.window is None:
        raise ValueError("spec.window is None, but routed_attention needs a window for its window branch.")
    check_array("gate", gate, {"B": q.shape[0], "T": q.shape[1]}, jnp.floating, required=True)
    given = given_options(per_head, packing)
    backend = _backend("routed_attention", q, k, spec, given, implementation, inference)
    where = coordinates(q.shape[1], kv_length, **packing._asdict())
    k, v, where, sharing = _of_all_devices(ring, k, v, where, backend)
    if inference:
        q, k, v, gate = _only_forward(
            "routed_attention with inference=True cannot be differentiated, because it leaves out what the gate's "
            "gradient needs; call it with inference=False.",
            lambda *arrays: arrays,
            *(q, k, v, gate),
        )
    q, per_head = _scaled(q, per_head, backend)
    q, rotating = _rotated(q, rotation, backend)
    out, disagreement = backend.routed_attention(
        q, k, v, gate, spec, where, per_head, inference=inference, **sharing, **rotating
    )
    return _nan_where_unassigned(out, where, packing.full_from).astype(q.dtype), disagreement


def decode_attention(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    spec: AttentionSpec,
    *,
    lengths: jax.Array,
    starts: jax.Array | None = None,
    kv_positions: jax.Array | None = None,
    full_from: jax.Array | None = None,
    per_head: PerHead = _NO_PER_HEAD,
    implementation: Implementation | None = None,
    **options: Unpack[PerHeadOptions],
) -> jax.Array:
    """Attention of the newest tokens of each sequence over its cache, which already holds their keys and values.

    On a TPU and on a GPU it cannot be differentiated.

    All other keywords are those of `attention`, but segment ids and the queries' positions.

    Args:
      q: [B, T, H, D] with T <= 8, the queries of the last T tokens.
      k_cache, v_cache: [B, S, K, D] of q's dtype, with entries in any order, such as a ring.
      spec: see `AttentionSpec`. It must be causal.
      lengths: [B] integers, the number of tokens in each sequence *with* the T new ones. Query t is at position
        `lengths - T + t`. A query at a negative position (in a sequence shorter than T) sees nothing.
      starts: [B] integers. No key before this position is seen, not even a sink token. None is 0.
      kv_positions: [B, S] integers, the position that each cache entry holds; a negative one marks an empty entry.
        By default entry j holds position j. Entries at positions >= lengths are not seen.
      full_from: [B] integers. Queries at a position >= full_from see past the window.

    Returns:
      out [B, T, H, D] in q's dtype.

    Raises:
      ValueError: as in `attention`; also if T is above 8 or the spec is not causal.
      NotImplementedError: as in `attention`.
    """
    (per_head,) = with_keywords(options, per_head)
    check_qkv(q, k_cache, v_cache, ("q", "k_cache", "v_cache"))
    per_head = checked_per_head(q, k_cache, spec, per_head)
    batch, q_length = q.shape[:2]
    kv_length = k_cache.shape[1]
    if q_length > _MAX_DECODE_TOKENS:
        raise ValueError(
            f"q has {q_length} tokens (axis 1), but decode_attention takes at most {_MAX_DECODE_TOKENS}; "
            "use attention with q_positions and kv_positions for longer chunks."
        )
    if not spec.causal:
        raise ValueError("spec.causal is False, but decode_attention is causal.")
    check_array("lengths", lengths, {"B": batch}, jnp.integer, required=True)
    for name, array in (("starts", starts), ("full_from", full_from)):
        check_array(name, array, {"B": batch}, jnp.integer)
    check_array("kv_positions", kv_positions, {"B": batch, "S": kv_length}, jnp.integer)
    check_needs_window("full_from", full_from, spec)

    packing = _packing_of_cache(q_length, kv_length, lengths, starts, kv_positions)._replace(full_from=full_from)
    where = coordinates(q_length, kv_length, **packing._asdict())
    backend = _backend("decode_attention", q, k_cache, spec, given_options(per_head, packing), implementation)
    q, per_head = _scaled(q, per_head, backend)

    def decode(q, k_cache, v_cache, where, per_head):
        return backend.decode_attention(q, k_cache, v_cache, spec, where, per_head).astype(q.dtype)

    if backend in (xla, reference):
        return decode(q, k_cache, v_cache, where, per_head)
    return _only_forward(
        "decode_attention has no gradient where a kernel computes it; call attention with q_positions and "
        "kv_positions.",
        decode,
        *(q, k_cache, v_cache, where, per_head),
    )


def _packing_of_cache(q_length: int, kv_length: int, lengths, starts, kv_positions) -> Packing:
    lengths = jnp.asarray(lengths, jnp.int32)[:, None]  # [B, 1]
    q_positions = lengths - q_length + jnp.arange(q_length, dtype=jnp.int32)  # [B, T]
    kv_positions = jnp.arange(kv_length, dtype=jnp.int32)[None] if kv_positions is None else jnp.asarray(kv_positions)
    first = 0 if starts is None else jnp.asarray(starts)[:, None]
    kv_positions = jnp.where((kv_positions >= first) & (kv_positions < lengths), kv_positions, -1)  # [B, S]
    return Packing(q_positions=q_positions, kv_positions=kv_positions)


def alibi_slopes(
    num_negative: int, num_positive: int, schedule: Literal["swat", "press", "reference"] = "swat"
) -> jax.Array:
    """ALiBi slopes for `num_negative + num_positive` heads. The negative ones, which favour recent keys, come first.

    The schedule gives the size of the k-th slope of a direction that has n heads, out of h heads altogether. k counts
    1, 2, ... in each direction. "swat" is 2^-k (SWAT, Eq. 4, taken literally, also for 12:0; SWAT(-) in the paper's
    tables is "press"). "press" is 2^(-8k/n) (Press et al., ALiBi, for any n). "reference" is 2^(-8k/h), as in SWAT's
    published code. That code has one direction only, where n = h and the result equals "press"; for two directions
    our reading keeps h in the exponent. The signs are ours throughout.

    Args:
      num_negative: heads with negative slopes.
      num_positive: heads with positive slopes.
      schedule: "swat", "press" or "reference".

    Returns:
      [num_negative + num_positive] float32, to be passed as `alibi_slopes` to `attention`.

    Raises:
      ValueError: a count is negative or both are 0, or the schedule is unknown.
    """
    heads = num_negative + num_positive
    if num_negative < 0 or num_positive < 0 or heads == 0:
        raise ValueError(
            f"num_negative is {num_negative} and num_positive is {num_positive}; "
            "both must be >= 0 and at least one of them > 0."
        )

    def sizes(n: int) -> np.ndarray:
        k = np.arange(1, n + 1)
        if schedule == "swat":
            return 2.0**-k
        return 2.0 ** (-8 * k / (n if schedule == "press" else heads))

    if schedule not in ("swat", "press", "reference"):
        raise ValueError(f"schedule is {schedule!r}; it must be 'swat', 'press' or 'reference'.")
    return jnp.asarray(np.concatenate([-sizes(num_negative), sizes(num_positive)]), jnp.float32)


def _checked(
    q, k, v, spec: AttentionSpec, per_head: PerHead, packing: Packing, ring: Ring | None
) -> tuple[PerHead, Packing, int]:
    """The options as arrays, and the length of the keys of all devices."""
    check_qkv(q, k, v, ("q", "k", "v"))
    kv_length = k.shape[1] * (1 if ring is None else ring.devices)
    return checked_per_head(q, k, spec, per_head), checked_packing(q, kv_length, spec, packing), kv_length


def _backend(op: Op, q, k, spec, given: frozenset[str], implementation, inference: bool = False) -> ModuleType:
    """The implementation for a call; the log says why it is not the best one."""
    device = current_device(implementation)
    request = Request.of(op, q, k, spec, device, given, implementation, inference)
    name, fallback = choose(request)
    if fallback is not None:
        _log.info("%s on %s: implementation %r is used, because %s", op, device.platform, name, fallback)
    _log.debug("%s: %s takes %s", op, name, request)
    if name in ("tpu", "triton") and any(split := jax.typeof(q).sharding.spec):
        raise ValueError(
            f"q is split over devices as {split}, but kernels compute what one device holds; call {op} inside "
            "jax.shard_map, with check_vma=False."
        )
    if name == "triton":
        from pallas_kernels import gpu  # late, for JAX may have dropped its lowering

        return gpu
    return _IMPLEMENTATIONS[name]


def _of_all_devices(
    ring: Ring | None, k, v, where: Coordinates, backend: ModuleType
) -> tuple[jax.Array, jax.Array, Coordinates, dict[str, Any]]:
    """Keys, values and coordinates as the backend takes them, with options: of all devices, or of this one and the
    ring that they go round."""
    if ring is None:
        return k, v, where, {}
    if backend in (tpu, xla) and ring.goes_round(k):
        return k, v, where, {"ring": ring}
    k, v = ring.gather(k), ring.gather(v)
    if not ring.by_index:
        return k, v, where, {}
    return k, v, ring.in_row(where), {"order": ring.order} if backend is tpu else {}


def _scaled(q, per_head: PerHead, backend: ModuleType) -> tuple[jax.Array, PerHead]:
    """As the backend takes them; the oracle has the scales in its logits."""
    return (q, per_head) if backend is reference else scale_queries(q, per_head)


def _rotated(q: jax.Array, rotation: Rotation | None, backend: ModuleType) -> tuple[jax.Array, dict[str, Any]]:
    """The queries as the backend takes them, with its option: rotated, or with what they are to be rotated by."""
    if rotation is None:
        return q, {}
    return (q, {"rotation": rotation}) if backend is tpu else (rotate(q, rotation), {})


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _only_forward(refusal: str, function: Callable, *arrays):
    """`function` of the arrays, and the refusal where it is differentiated."""
    return function(*arrays)


def _refuse_backward(refusal: str, *_):
    raise NotImplementedError(refusal)


_only_forward.defvjp(lambda _, function, *arrays: (function(*arrays), None), _refuse_backward)


def _nan_where_unassigned(out: jax.Array, where: Coordinates, full_from) -> jax.Array:
    """Marks rows whose segment has no column in `full_from`: under tracing that cannot raise."""
    if full_from is None or where.q_segment_ids is None:
        return out
    columns = jnp.shape(full_from)[1] if jnp.ndim(full_from) == 2 else 1
    unassigned = (where.q_segment_ids > columns) | (where.q_segment_ids < 0)
    return jnp.where(unassigned[:, :, None, None], jnp.nan, out)
