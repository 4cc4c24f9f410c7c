"""The arguments of an attention call: a sentence for each that is wrong, which names it and says what is right."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.math.spec import AttentionSpec, Packing, PerHead


def check_qkv(q, k, v, names: tuple[str, str, str]) -> None:
    for name, array, axes in zip(names, (q, k, v), ("B, T, H, D", "B, S, K, D", "B, S, K, D"), strict=True):
        if not hasattr(array, "ndim"):
            raise ValueError(f"{name} is a {type(array).__name__}; it must be an array [{axes}].")
        if array.ndim != 4:
            raise ValueError(f"{name} has shape {array.shape}; it must have four axes [{axes}].")
        if not jnp.issubdtype(array.dtype, jnp.floating) or array.dtype.itemsize < 2:
            raise ValueError(f"{name} is {array.dtype}; it must be floating-point, of 16 bits or more.")
        if array.dtype != q.dtype:
            raise ValueError(f"{name} is {array.dtype} but {names[0]} is {q.dtype}; q, k and v must share one dtype.")
        if 0 in array.shape:
            raise ValueError(f"{name} has shape {array.shape}; every axis must be at least 1 long.")
    if k.shape != v.shape:
        raise ValueError(f"{names[2]} has shape {v.shape} but {names[1]} has {k.shape}; they must be equal.")
    for axis, meaning in ((0, "batch"), (3, "head_dim")):
        if q.shape[axis] != k.shape[axis]:
            raise ValueError(
                f"{names[1]} has {k.shape[axis]} on axis {axis} ({meaning}) but {names[0]} has {q.shape[axis]}; "
                "they must be equal."
            )
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"{names[0]} has {q.shape[2]} heads and {names[1]} has {k.shape[2]} KV heads (axis 2); "
            "the number of heads must be a multiple of the number of KV heads."
        )


def checked_per_head(q, k, spec: AttentionSpec, per_head: PerHead) -> PerHead:
    """The options as arrays, the bias spread over the heads."""
    if not isinstance(spec, AttentionSpec):
        raise ValueError(f"spec is {spec!r:.40}; it must be an AttentionSpec, such as AttentionSpec(window=1024).")
    bias, sinks = per_head.sigmoid_bias, per_head.sink_logits
    heads, kv_heads = q.shape[2], k.shape[2]
    check_array("alibi_slopes", per_head.alibi_slopes, {"H": heads}, jnp.floating)
    check_array("logit_scales", per_head.logit_scales, {"H": heads}, jnp.floating)
    check_array("sink_logits", sinks, {"H": heads}, jnp.floating)
    check_array("full_heads", per_head.full_heads, {"K": kv_heads}, jnp.bool_)
    check_needs_window("full_heads", per_head.full_heads, spec)
    if bias is not None:
        if spec.activation != "sigmoid":
            raise ValueError("sigmoid_bias is given but activation is 'softmax', which it would not change; drop it.")
        bias = jnp.asarray(bias, jnp.promote_types(q.dtype, jnp.float32))
        if bias.shape not in ((), (heads,)):
            raise ValueError(f"sigmoid_bias has shape {bias.shape}; it must be a scalar or [H] = ({heads},).")
        bias = jnp.broadcast_to(bias, (heads,))
    if sinks is not None and spec.activation == "sigmoid":
        raise ValueError("sink_logits is given but activation is 'sigmoid', which has no denominator; drop it.")
    per_head = per_head._replace(sigmoid_bias=bias)
    return PerHead(*(None if x is None else jnp.asarray(x) for x in per_head))


def check_array(name: str, array, axes: dict[str, int], kind, *, required: bool = False) -> None:
    if array is None:
        if required:
            raise ValueError(f"{name} is None; it must be [{', '.join(axes)}] = {tuple(axes.values())}.")
        return
    shape, dtype = _as_array(array).shape, _as_array(array).dtype
    if shape != tuple(axes.values()):
        raise ValueError(f"{name} has shape {shape}; it must be [{', '.join(axes)}] = {tuple(axes.values())}.")
    if not jnp.issubdtype(dtype, kind):
        words = {jnp.floating: "floating-point", jnp.integer: "integers", jnp.bool_: "bool"}
        raise ValueError(f"{name} is {dtype}; it must be {words[kind]}.")


def _as_array(array):
    """Lists as NumPy arrays; arrays as they are."""
    return array if hasattr(array, "dtype") else np.asarray(array)


def check_needs_window(name: str, array, spec: AttentionSpec) -> None:
    if array is not None and spec.window is None:
        raise ValueError(f"{name} is given but spec.window is None, so every row is full already; drop it.")


def checked_packing(q, kv_length: int, spec: AttentionSpec, packing: Packing) -> Packing:
    """The options as they are, but for `full_from`, which may be a list."""
    batch, q_length = q.shape[:2]
    for name, array in packing._asdict().items():
        if name != "full_from":
            length = {"T": q_length} if name.startswith("q_") else {"S": kv_length}
            check_array(name, array, {"B": batch} | length, jnp.integer)
    if packing.q_segment_ids is None and packing.kv_segment_ids is not None:
        raise ValueError("kv_segment_ids is given without q_segment_ids; give both.")
    if packing.q_segment_ids is not None and packing.kv_segment_ids is None and q_length != kv_length:
        raise ValueError(
            f"q_segment_ids is given without kv_segment_ids, but there are {q_length} queries and {kv_length} keys; "
            "give both."
        )
    if packing.full_from is None:
        return packing
    full_from = _as_array(packing.full_from)
    _check_full_from(full_from, batch, spec, packing.q_segment_ids)
    return packing._replace(full_from=full_from)


def _check_full_from(full_from, batch: int, spec: AttentionSpec, q_segment_ids) -> None:
    shape = full_from.shape
    columns = shape[1] if len(shape) == 2 else 1
    if len(shape) not in (1, 2) or shape[0] != batch or columns == 0:
        raise ValueError(f"full_from has shape {shape}; it must be [B] or [B, segments] with B = {batch}.")
    if not jnp.issubdtype(full_from.dtype, jnp.integer):
        raise ValueError(f"full_from is {full_from.dtype}; it must be integers.")
    check_needs_window("full_from", full_from, spec)
    if q_segment_ids is None:
        if columns > 1:
            raise ValueError(f"full_from has {columns} columns but no q_segment_ids say which rows they are for.")
    elif not isinstance(q_segment_ids, jax.core.Tracer):
        ids = np.asarray(q_segment_ids)
        largest, smallest = ids.max(), ids.min()
        if largest > columns or smallest < 0:
            raise ValueError(
                f"q_segment_ids run from {smallest} to {largest} but full_from has {columns} column(s), for ids 1 to "
                f"{columns}; packed rows need full_from [B, segments]."
            )
