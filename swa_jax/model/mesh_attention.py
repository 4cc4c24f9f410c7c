"""Attention on a mesh: batch and heads split for free, the sequence by context parallelism.

A device holds T / n consecutive tokens of each row. A windowed layer fetches the keys that its window reaches back to
from its left neighbours (`ppermute`) and, for sink tokens, the first keys of the one document that runs in from the
left, so that what it sends does not grow with T. Full, routed and per-head hybrid layers, and full-attention decode,
gather the keys and values of the row. Both are exact: the queries, keys and masks are those of one device.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import AttentionSpec, attention, routed_attention
from pallas_kernels.api import Implementation
from pallas_kernels.spec import segment_positions
from swa_jax.model.sharding import Partition

HALO_MULTIPLE = 128  # tokens: a window's reach is rounded up to whole tiles where a device holds that many

# The dimensions of what attention takes beside q, k and v.
_DIMENSIONS: dict[str, tuple[str | None, ...]] = {
    "alibi_slopes": ("heads",),
    "full_heads": ("kv_heads",),
    "full_from": ("batch",),
    "gate": ("batch", "sequence"),
    "segment_ids": ("batch", "sequence"),
    "positions": ("batch", "sequence"),
}


def attention_on_mesh(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    spec: AttentionSpec,
    partition: Partition | None,
    *,
    gate: jax.Array | None = None,
    inference: bool = False,
    segment_ids: jax.Array | None = None,
    positions: jax.Array | None = None,
    full_from: jax.Array | None = None,
    full_heads: jax.Array | None = None,
    alibi_slopes: jax.Array | None = None,
    sigmoid_bias: float | None = None,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Self-attention, or with `gate` [B, T] SwiAttn's routed attention, wherever the arrays lie.

    Args:
      q: [B, T, H, D]; k, v: [B, T, K, D]. Without a partition: the plain call.
      segment_ids, positions: [B, T], of queries and keys alike. A segment must be one run of its id.
      The rest as in `pallas_kernels.attention` and `routed_attention`.

    Returns:
      out [B, T, H, D], and the disagreement of the branches [B, T] f32 (zeros without a gate).
    """
    given = {
        "gate": gate,
        "segment_ids": segment_ids,
        "positions": positions,
        "full_from": full_from,
        "full_heads": full_heads,
        "alibi_slopes": alibi_slopes,
    }
    arrays = {name: x for name, x in given.items() if x is not None}
    static = {"sigmoid_bias": sigmoid_bias, "implementation": implementation, "inference": inference}
    if partition is None:
        return _attend(q, k, v, spec, arrays, arrays, static)

    def local(q, k, v, arrays):
        out, disagreement = _on_one_device(q, k, v, spec, arrays, static, partition)
        if gate is not None and partition.size("heads") > 1:
            disagreement = lax.pmean(disagreement, partition.rules.heads)
        return out, disagreement

    heads = partition.spec("batch", "sequence", "heads", None)
    rows = partition.spec("batch", "sequence")
    sharded = jax.shard_map(
        local,
        mesh=partition.mesh,
        in_specs=(heads, heads, heads, {name: partition.spec(*_DIMENSIONS[name]) for name in arrays}),
        out_specs=(heads, rows),
        check_vma=False,  # the kernels do not say over which axes their outputs vary
    )
    return sharded(q, k, v, arrays)


def _attend(q, k, v, spec, of_queries: dict, of_keys: dict, static: dict) -> tuple[jax.Array, jax.Array]:
    """The call on arrays that are at hand; `of_queries` and `of_keys` hold ids and positions of either side."""
    options: dict[str, Any] = {
        name: of_queries.get(name) for name in ("full_from", "full_heads", "alibi_slopes")
    }
    options |= {f"q_{name}": of_queries.get(name) for name in ("segment_ids", "positions")}
    options |= {f"kv_{name}": of_keys.get(name) for name in ("segment_ids", "positions")}
    options |= {name: static[name] for name in ("sigmoid_bias", "implementation")}
    if "gate" in of_queries:
        return routed_attention(q, k, v, of_queries["gate"], spec, inference=static["inference"], **options)
    out = attention(q, k, v, spec, **options)
    assert isinstance(out, jax.Array)  # no lse was asked for
    return out, jnp.zeros(q.shape[:2], jnp.float32)


def _on_one_device(q, k, v, spec, arrays: dict, static: dict, partition: Partition):
    """Inside shard_map: one device's queries [B, T/n, H, D] against the keys they see."""
    pieces = partition.size("sequence")
    if pieces == 1:
        return _attend(q, k, v, spec, arrays, arrays, static)
    axis = partition.rules.sequence[0]
    length = q.shape[1]  # of this device
    rank = lax.axis_index(axis)
    reach = _reach(spec, length)
    widened = any(name in arrays for name in ("gate", "full_from", "full_heads"))
    if reach is None or widened or "positions" in arrays or reach >= length * (pieces - 1):
        return _gathered(q, k, v, spec, arrays, static, axis, rank)
    ids = arrays.get("segment_ids")
    if ids is None:
        ids = jnp.ones(q.shape[:2], jnp.int32)
    halo_k, halo_v, halo_ids = (_from_left(x, reach, axis, pieces) for x in (k, v, ids))
    if not spec.num_sink_tokens:
        # Idle queries in front make this one sequence with itself, which the window kernels take; they cost less
        # than explicit positions would.
        ids = jnp.concatenate([halo_ids, ids], axis=1)
        both = arrays | {"segment_ids": ids}
        q = jnp.pad(q, ((0, 0), (reach, 0), (0, 0), (0, 0)))
        k, v = jnp.concatenate([halo_k, k], axis=1), jnp.concatenate([halo_v, v], axis=1)
        out, silent = _attend(q, k, v, spec, both, both, static)
        return out[:, reach:], silent[:, reach:]
    positions = _positions_on_mesh(ids, axis, pieces)
    halo_positions = _from_left(positions, reach, axis, pieces)
    first = _first_tokens((k, v), ids, positions, spec.num_sink_tokens, reach, axis, rank)
    (first_k, first_v), first_ids, first_positions = first
    of_queries = arrays | {"segment_ids": ids, "positions": positions}
    of_keys = {
        "segment_ids": jnp.concatenate([first_ids, halo_ids, ids], axis=1),
        "positions": jnp.concatenate([first_positions, halo_positions, positions], axis=1),
    }
    k, v = jnp.concatenate([first_k, halo_k, k], axis=1), jnp.concatenate([first_v, halo_v, v], axis=1)
    return _attend(q, k, v, spec, of_queries, of_keys, static)


def _reach(spec: AttentionSpec, length: int) -> int | None:
    """Tokens to the left of a device's own that its queries may see; None: all of them."""
    if spec.window is None or not spec.causal:
        return None
    reach = spec.window - 1
    rounded = -(-reach // HALO_MULTIPLE) * HALO_MULTIPLE
    return rounded if rounded <= length else reach


def _gathered(q, k, v, spec, arrays, static, axis, rank):
    """Every key of the row, the queries at their place in it."""

    def gather(x):
        return lax.all_gather(x, axis, axis=1, tiled=True)

    of_queries, of_keys = dict(arrays), {}
    if "segment_ids" in arrays:
        of_keys["segment_ids"] = gather(arrays["segment_ids"])
    if "positions" in arrays:
        of_keys["positions"] = gather(arrays["positions"])
    else:
        index = jnp.arange(k.shape[1] * lax.axis_size(axis), dtype=jnp.int32)[None]
        everywhere = jnp.broadcast_to(index, (q.shape[0], index.shape[1]))
        if "segment_ids" in of_keys:
            everywhere = segment_positions(of_keys["segment_ids"])
        of_keys["positions"] = everywhere
        of_queries["positions"] = lax.dynamic_slice_in_dim(everywhere, rank * q.shape[1], q.shape[1], axis=1)
    return _attend(q, gather(k), gather(v), spec, of_queries, of_keys, static)


def _from_left(x: jax.Array, reach: int, axis: str, pieces: int) -> jax.Array:
    """The `reach` tokens left of a device's own x [B, T/n, ...]; zeros (segment id 0) left of the row's start."""
    length = x.shape[1]
    hops = -(-reach // length)
    fetched = []
    for hop in range(hops, 0, -1):
        wanted = reach - (hops - 1) * length if hop == hops else length
        steps = [(source, source + hop) for source in range(pieces - hop)]
        fetched.append(lax.ppermute(x[:, length - wanted :], axis, steps))
    return jnp.concatenate(fetched, axis=1) if fetched else x[:, :0]


def _positions_on_mesh(ids: jax.Array, axis: str, pieces: int) -> jax.Array:
    """`segment_positions` of rows that are split along `axis`: ids [B, T/n] -> [B, T/n]. Sends a few numbers."""
    length = ids.shape[1]
    local = segment_positions(ids)
    runs_through = local[:, -1] == length - 1  # the device's tokens are one document
    ends = lax.all_gather(
        jnp.stack([ids[:, 0], ids[:, -1], local[:, -1], runs_through], axis=1), axis
    )  # [n, B, 4]
    # Position of the last token of each device, left to right: a document that fills a device adds to its neighbour's.
    last = [ends[0, :, 2]]
    for piece in range(1, pieces):
        goes_on = (ends[piece, :, 0] == ends[piece - 1, :, 1]) & (ends[piece, :, 3] == 1)
        last.append(ends[piece, :, 2] + jnp.where(goes_on, last[-1] + 1, 0))
    rank = lax.axis_index(axis)
    before = jnp.maximum(rank - 1, 0)
    continues = (rank > 0) & (ends[before, :, 1] == ids[:, 0])
    offset = jnp.where(continues, jnp.stack(last)[before] + 1, 0)[:, None]  # [B, 1]
    first_run = jnp.cumsum(jnp.diff(ids, axis=1, prepend=ids[:, :1]) != 0, axis=1) == 0
    return local + jnp.where(first_run, offset, 0)


def _first_tokens(kv, ids, positions, count: int, reach: int, axis: str, rank):
    """Keys and values of the first `count` tokens of the document that runs in from the left, where they are neither
    on this device nor in its halo; slots without one have id 0.

    Returns ((k, v) [B, count, K, D], ids [B, count], positions [B, count]).
    """
    batch, length = ids.shape
    slot = jnp.arange(count, dtype=jnp.int32)[None]  # [1, count]
    # Each device offers what it holds of the start of its last document, the only one that can run on to the right.
    index = length - 1 - (positions[:, -1:] - slot)  # [B, count]
    inside = jnp.clip(index, 0, length - 1)[..., None, None]
    offers = [lax.all_gather(jnp.take_along_axis(x, inside, axis=1), axis) for x in kv]  # [n, B, count, K, D]
    place = rank * length - positions[:, :1] + slot  # in the row
    taken = (place >= 0) & (place < rank * length - reach) & (ids[:, :1] != 0)
    source = jnp.clip(place // length, 0, lax.axis_size(axis) - 1)
    chosen = [offer[source, jnp.arange(batch)[:, None], slot] for offer in offers]
    # A document that starts on this device has all of its first tokens here: `place` is then not left of the halo.
    return chosen, jnp.where(taken, ids[:, :1], 0), jnp.broadcast_to(slot, (batch, count))
