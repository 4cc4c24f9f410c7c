"""Attention on a mesh: batch and heads split for free, the sequence by context parallelism.

A device holds T / n consecutive tokens of each row, or in zig-zag order two chunks of T / 2n: `sequence_order.py`. A
windowed layer fetches the keys that its window reaches back to from its neighbours (`ppermute`) and, for sink tokens,
the first keys of the one document that runs into a chunk from the left, so that what it sends does not grow with T.
In full, routed and per-head hybrid layers, and under full-attention decode, the keys and values of the row are gathered
or go round from device to device (`pallas_kernels.math.ring`). All are exact: the queries, keys and masks are those of
one device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import AttentionSpec, attention, routed_attention
from pallas_kernels.dispatch import Implementation
from pallas_kernels.math.ring import Ring
from pallas_kernels.math.rotary import Rotation
from pallas_kernels.math.spec import Packing, PerHead, segment_positions
from swa_jax.model.sequence_order import RowShare, from_left
from swa_jax.model.sharding import Partition

HALO_MULTIPLE = 128  # tokens: a window's reach is rounded up to whole tiles where a device holds that many

# The dimensions of what attention takes beside q, k and v.
_TOKENS = ("batch", "sequence")
_DIMENSIONS: dict[str, tuple[str, ...]] = {
    "alibi_slopes": ("heads",),
    "sigmoid_bias": ("heads",),
    "sink_logits": ("heads",),
    "full_heads": ("kv_heads",),
    "q_segment_ids": _TOKENS,
    "q_positions": _TOKENS,
    "full_from": ("batch",),
}


type Queries = tuple[jax.Array, Rotation | None]  # [B, T, H, D], and by what they are still to be rotated


class StaticOptions(NamedTuple):
    """What of a call is not an array; see `pallas_kernels.attention` and `routed_attention`."""

    spec: AttentionSpec
    inference: bool = False
    implementation: Implementation | None = None


def attention_on_mesh(
    queries: Queries,
    k: jax.Array,
    v: jax.Array,
    per_head: PerHead,
    packing: Packing,
    options: StaticOptions,
    gate: jax.Array | None = None,
    *,
    partition: Partition | None,
) -> tuple[jax.Array, jax.Array]:
    """Self-attention, or with `gate` [B, T] SwiAttn's routed attention, wherever the arrays lie.

    Args:
      queries: q [B, T, H, D], and the rotation that is still to be applied to it, if any.
      k, v: [B, T, K, D].
      per_head: arrays, the sigmoid bias [H] too.
      packing: of the queries; the keys are the same tokens. A segment must be one run of its id.
      partition: the mesh that the arrays lie on; None: the plain call.

    Returns:
      out [B, T, H, D], and the disagreement of the branches [B, T] f32 (zeros without a gate).
    """
    if partition is None:
        return _attend(queries, k, v, per_head, _of_both(packing), gate, options)

    def local(queries, k, v, per_head, packing, gate):
        out, disagreement = _on_one_device(queries, k, v, per_head, packing, gate, options, partition)
        if gate is not None and partition.size("heads") > 1:
            disagreement = lax.pmean(disagreement, partition.rules.heads)
        return out, disagreement

    heads, rows = partition.spec("batch", "sequence", "heads", None), partition.spec(*_TOKENS)
    tables = partition.spec("batch", "sequence", None)
    q, rotation = queries
    if rotation is not None and rotation.cos.shape[0] != q.shape[0]:
        rotation = jax.tree.map(lambda x: jnp.broadcast_to(x, (q.shape[0], *x.shape[1:])), rotation)
    sharded = jax.shard_map(
        local,
        mesh=partition.mesh,
        in_specs=(
            (heads, jax.tree.map(lambda _: tables, rotation)),
            heads,
            heads,
            dimension_specs(PerHead, partition),
            dimension_specs(Packing, partition),
            rows,
        ),
        out_specs=(heads, rows),
        check_vma=False,  # the kernels do not say over which axes their outputs vary
    )
    return sharded((q, rotation), k, v, per_head, packing, gate)


def dimension_specs(options: Any, partition: Partition) -> Any:
    """How the fields of `PerHead` or `Packing` lie on the mesh."""
    return options(**{x: partition.spec(*_DIMENSIONS[x]) for x in _DIMENSIONS if x in options._fields})


def _of_both(packing: Packing) -> Packing:
    """The same tokens on both sides."""
    return packing._replace(kv_segment_ids=packing.q_segment_ids, kv_positions=packing.q_positions)


def _attend(
    queries: Queries, k, v, per_head: PerHead, packing: Packing, gate, options: StaticOptions, ring: Ring | None = None
) -> tuple[jax.Array, jax.Array]:
    """The call on arrays that are at hand, or on keys that go round."""
    (q, rotation), (spec, inference, implementation) = queries, options
    given: dict[str, Any] = {
        "per_head": per_head,
        "packing": packing,
        "rotation": rotation,
        "implementation": implementation,
    }
    if gate is not None:
        return routed_attention(q, k, v, gate, spec, inference=inference, ring=ring, **given)
    return attention(q, k, v, spec, ring=ring, **given), jnp.zeros(q.shape[:2], jnp.float32)


def _on_one_device(
    queries: Queries, k, v, per_head: PerHead, packing: Packing, gate, options: StaticOptions, partition: Partition
):
    """Inside shard_map: one device's queries [B, T/n, H, D] against the keys they see."""
    spec, pieces, q = options.spec, partition.size("sequence"), queries[0]
    if pieces == 1:
        return _attend(queries, k, v, per_head, _of_both(packing), gate, options)
    place = RowShare(partition.rules.sequence[0], pieces, partition.zigzag)
    length = q.shape[1] // place.chunks  # of a chunk
    reach = _reach(spec, length)
    widened = any(x is not None for x in (gate, packing.full_from, per_head.full_heads))
    others_positions = packing.q_positions is not None and not partition.zigzag
    if reach is None or widened or others_positions or reach > place.farthest(length):
        everywhere = _packing_of_the_row(packing, k.shape, place)
        ring = Ring(place.axis, place.order, by_index=not others_positions)
        return _attend(queries, k, v, per_head, everywhere, gate, options, ring)
    segment_ids = packing.q_segment_ids
    if segment_ids is None:
        segment_ids = jnp.ones(q.shape[:2], jnp.int32)
    positions = packing.q_positions
    if positions is None and spec.num_sink_tokens:
        positions = _positions_on_mesh(segment_ids, place.axis, pieces)
    halo_k, halo_v, halo_ids = (from_left(x, reach, place) for x in (k, v, segment_ids))
    k, v, segment_ids = (place.by_chunk(x) for x in (k, v, segment_ids))  # [B * chunks, length, ...]
    shape, queries = q.shape, jax.tree.map(place.by_chunk, queries)
    if not spec.num_sink_tokens:
        out, silent = _attend_behind((halo_k, halo_v, halo_ids), queries, k, v, segment_ids, per_head, options)
        return out.reshape(shape), silent.reshape(shape[:2])
    assert positions is not None
    halo_positions, positions = from_left(positions, reach, place), place.by_chunk(positions)
    first = _first_tokens((k, v), segment_ids, positions, spec.num_sink_tokens, reach, place)
    (first_k, first_v), first_ids, first_positions = first
    packing = Packing(
        q_segment_ids=segment_ids,
        kv_segment_ids=jnp.concatenate([first_ids, halo_ids, segment_ids], axis=1),
        q_positions=positions,
        kv_positions=jnp.concatenate([first_positions, halo_positions, positions], axis=1),
    )
    k, v = jnp.concatenate([first_k, halo_k, k], axis=1), jnp.concatenate([first_v, halo_v, v], axis=1)
    out, silent = _attend(queries, k, v, per_head, packing, None, options)
    return out.reshape(shape), silent.reshape(shape[:2])


def _attend_behind(
    halo, queries: Queries, k, v, segment_ids, per_head: PerHead, options: StaticOptions
) -> tuple[jax.Array, jax.Array]:
    """Windowed attention of a chunk's queries to its own keys and to those of the halo in front of them.

    Args:
      halo: the keys and values [rows, reach, K, D] right before the chunk's, and their segment ids.
      segment_ids: the segment ids of the chunk [rows, length].

    Only the first `reach` queries see the halo. Where the chunk is long enough they are computed apart, and all others
    as if there were no halo: long arrays are then neither put together nor cut, which took more passes over them than
    attention itself.
    """
    halo_k, halo_v, halo_ids = halo
    reach, length = halo_k.shape[1], k.shape[1]
    own = _of_both(Packing(segment_ids))
    if reach == 0:
        return _attend(queries, k, v, per_head, own, None, options)
    apart = 2 * reach <= length
    first = slice(0, reach if apart else length)
    # Idle queries in front make this one sequence with itself, which the window kernels take; they cost less than
    # explicit positions would.
    both = _of_both(Packing(jnp.concatenate([halo_ids, segment_ids[:, first]], axis=1)))
    idle = jax.tree.map(lambda x: jnp.pad(x[:, first], ((0, 0), (reach, 0), *[(0, 0)] * (x.ndim - 2))), queries)
    all_k, all_v = (jnp.concatenate([x, y[:, first]], axis=1) for x, y in ((halo_k, k), (halo_v, v)))
    out, silent = (x[:, reach:] for x in _attend(idle, all_k, all_v, per_head, both, None, options))
    if not apart:
        return out, silent
    rest, silent = _attend(queries, k, v, per_head, own, None, options)
    return lax.dynamic_update_slice(rest, out, (0, 0, 0, 0)), silent


def _reach(spec: AttentionSpec, length: int) -> int | None:
    """Tokens to the left of a device's own that its queries may see; None: all of them."""
    if spec.window is None or not spec.causal or not spec.banded:
        return None
    reach = spec.window - 1
    rounded = -(-reach // HALO_MULTIPLE) * HALO_MULTIPLE
    return rounded if rounded <= length else reach


def _packing_of_the_row(packing: Packing, kv_shape: tuple[int, ...], place: RowShare) -> Packing:
    """Every key of the row, the queries at their place in it."""

    def gather(x):
        return None if x is None else lax.all_gather(x, place.axis, axis=1, tiled=True)

    segment_ids, positions = gather(packing.q_segment_ids), gather(packing.q_positions)
    if positions is None:
        batch, length = kv_shape[:2]
        index = jnp.arange(length * place.pieces, dtype=jnp.int32)[None]
        positions = (
            jnp.broadcast_to(index, (batch, index.shape[1])) if segment_ids is None else segment_positions(segment_ids)
        )
        here = lax.dynamic_slice_in_dim(positions, place.rank * length, length, axis=1)
        packing = packing._replace(q_positions=here)
    return packing._replace(kv_segment_ids=segment_ids, kv_positions=positions)


def _positions_on_mesh(segment_ids: jax.Array, axis: str, pieces: int) -> jax.Array:
    """`segment_positions` of rows that are split along `axis`: [B, T/n] -> [B, T/n]. Sends a few numbers."""
    length = segment_ids.shape[1]
    local = segment_positions(segment_ids)
    runs_through = local[:, -1] == length - 1  # the device's tokens are one document
    ends = lax.all_gather(
        jnp.stack([segment_ids[:, 0], segment_ids[:, -1], local[:, -1], runs_through], axis=1), axis
    )  # [n, B, 4]
    # Position of the last token of each device, left to right: a document that fills a device adds to its neighbour's.
    last = [ends[0, :, 2]]
    for piece in range(1, pieces):
        goes_on = (ends[piece, :, 0] == ends[piece - 1, :, 1]) & (ends[piece, :, 3] == 1)
        last.append(ends[piece, :, 2] + jnp.where(goes_on, last[-1] + 1, 0))
    rank = lax.axis_index(axis)
    before = jnp.maximum(rank - 1, 0)
    continues = (rank > 0) & (ends[before, :, 1] == segment_ids[:, 0])
    offset = jnp.where(continues, jnp.stack(last)[before] + 1, 0)[:, None]  # [B, 1]
    first_run = jnp.cumsum(jnp.diff(segment_ids, axis=1, prepend=segment_ids[:, :1]) != 0, axis=1) == 0
    return local + jnp.where(first_run, offset, 0)


def _first_tokens(kv, segment_ids, positions, count: int, reach: int, place: RowShare):
    """Keys and values of the first `count` tokens of the document that runs into a chunk from the left, where they are
    neither in the chunk nor in its halo; slots without one have id 0.

    All arrays are by chunk, [B * chunks, length, ...].

    Returns ((k, v) [B * chunks, count, K, D], segment_ids [B * chunks, count], positions [B * chunks, count]).
    """
    rows, length = segment_ids.shape
    slot = jnp.arange(count, dtype=jnp.int32)[None]  # [1, count]
    # Each chunk offers what it holds of the start of its last document, the only one that can run on to the right.
    index = length - 1 - (positions[:, -1:] - slot)  # [rows, count]
    inside = jnp.clip(index, 0, length - 1)[..., None, None]
    # [n, rows, count, K, D]
    offers = [lax.all_gather(jnp.take_along_axis(x, inside, axis=1), place.axis) for x in kv]
    start = jnp.tile(place.chunk_numbers * length, rows // place.chunks)[:, None]  # of the chunk, in the row of tokens
    token = start - positions[:, :1] + slot
    taken = (token >= 0) & (token < start - reach) & (segment_ids[:, :1] != 0)
    device, chunk = place.order.holder(jnp.clip(token // length, 0, place.pieces * place.chunks - 1))
    row = jnp.arange(rows)[:, None] // place.chunks * place.chunks + chunk
    chosen = [offer[device, row, slot] for offer in offers]
    # A document that starts in this chunk has all of its first tokens here: `token` is then not left of the halo.
    return chosen, jnp.where(taken, segment_ids[:, :1], 0), jnp.broadcast_to(slot, (rows, count))
