"""The attention of one layer over the two cache pools: one new token a sequence, or a piece of one prompt."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from pallas_kernels import attention, routed_attention
from pallas_kernels.math.spec import NEVER, Packing, PerHead, Pools
from pallas_kernels.pools import attend_over_pools, heads_in_one_launch, pools_visited, write_token
from swa_jax.model.attention import AttentionContext, KeysValues, choose, own_or
from swa_jax.model.cache import POOL, CacheLayout, CachePools, ring_positions, write_chunk, write_prompt
from swa_jax.model.layer_types import FULL, HYBRID, SWITCH
from swa_jax.model.mesh_attention import dimension_specs
from swa_jax.model.sharding import Partition


class LayerPlace(NamedTuple):
    """Where each layer's keys lie, as data scanned with the layers."""

    mode: jax.Array  # [L]
    whole_slots: jax.Array  # [L, K]
    ring_slots: jax.Array  # [L, K]
    # [L, K]: as `ring_slots`, but nowhere for a layer whose keys others read: a chunk's go into its ring when all have
    # read what was there before.
    ring_writes: jax.Array


def layer_places(layout: CacheLayout) -> LayerPlace:
    writes = layout.ring_slots.copy()
    if layout.source is not None:
        writes[layout.source] = layout.ring_rows
    arrays = layout.mode, layout.whole_slots, layout.ring_slots, writes
    return LayerPlace(*map(jnp.asarray, arrays))


class DecodeStep(NamedTuple):
    """Where the new token of each sequence stands; an entry that is out of range is not written."""

    lengths: jax.Array  # [B] the tokens of each sequence, with the new one
    whole_entries: jax.Array  # [B] where it goes in a whole cache
    ring_entries: jax.Array  # [B] and in a ring
    ring_positions: jax.Array  # [B, entries] the positions that a ring then holds
    # What the kernels of a TPU visit in layers of each of the layout's modes; None has each layer find it.
    visited: tuple[Any, ...] | None = None


class LayerCall(NamedTuple):
    """What the attention of one layer over its caches is given.

    Attributes:
      heads: what its heads add to their logits.
      q: [B, T, H, D]: one token a sequence, or [1, C, H, D]: a chunk of one sequence.
      k, v: [B, T, K, D]; None in a layer that has none of its own, and reads those of another.
      others: the new keys and values of that other layer, None where each has its own.
      gate: [B, T], 1 where a routed layer sees everything.
      place: this layer's row.
      full_heads: [K] bool, the KV heads of a hybrid layer that see everything.
      full_from: [B] or None, as in `pallas_kernels.attention`.
      at: where the new tokens stand.
    """

    heads: PerHead
    q: jax.Array
    k: jax.Array | None
    v: jax.Array | None
    others: KeysValues | None
    gate: jax.Array
    cache: CachePools
    place: LayerPlace
    full_heads: jax.Array
    full_from: jax.Array | None
    at: Any  # `DecodeStep` or `Chunk`


def decode_layer(call: LayerCall, layout: CacheLayout, context: AttentionContext) -> tuple[jax.Array, CachePools]:
    """The attention of one new token a sequence [B, 1, H, D], and the cache with its keys and values in.

    Only one branch runs. On a mesh each device has some sequences and some KV heads.
    """

    def here(call: LayerCall) -> tuple[jax.Array, CachePools]:
        cache, place, step = call.cache, call.place, call.at
        if call.k is not None and call.v is not None:
            cache = CachePools(
                k_whole=write_token(cache.k_whole, place.whole_slots, call.k, step.whole_entries),
                v_whole=write_token(cache.v_whole, place.whole_slots, call.v, step.whole_entries),
                k_ring=write_token(cache.k_ring, place.ring_slots, call.k, step.ring_entries),
                v_ring=write_token(cache.v_ring, place.ring_slots, call.v, step.ring_entries),
            )
        return _attend_to_cache(call._replace(cache=cache), layout, context), cache

    if (partition := context.partition) is None:
        return here(call)
    specs = _call_specs(partition, "batch")
    return _on_each_device(here, partition, (specs,), (specs.q, specs.cache))(call)


def _attend_to_cache(call: LayerCall, layout: CacheLayout, context: AttentionContext) -> jax.Array:
    """The new tokens' queries over caches that hold their keys already."""
    step, place, heads, gate = call.at, call.place, call.heads, call.gate[:, 0]
    context = dataclasses.replace(context, full_from=call.full_from)
    attend = functools.partial(attend_over_pools, call.q, lengths=step.lengths, implementation=context.implementation)
    kinds = [kind for _, kind in layout.modes]
    whole, rings = _pools(call.cache, place, step)

    def by_data() -> jax.Array:
        """Whatever the layer is: its heads say where their keys are, and `full_from` what they see of them."""
        full_from = context.full_from
        if FULL in kinds or SWITCH in kinds:
            sees_all = jnp.asarray([kind == FULL for kind in kinds])[place.mode]
            if SWITCH in kinds:
                sees_all |= jnp.asarray([kind == SWITCH for kind in kinds])[place.mode] & (gate > 0.5)
            full_from = jnp.where(sees_all, 0, jnp.full_like(step.lengths, NEVER) if full_from is None else full_from)
        wide = heads._replace(full_heads=call.full_heads) if HYBRID in kinds else heads
        others = (rings, context.spec) if layout.ring_rows else None
        return attend(whole, context.spec, wide, others=others, full_from=full_from)

    def by_mode(number: int) -> jax.Array:
        mode = layout.modes[number]
        reads = _reads(mode, call.cache, place, context, step)
        if mode[1] == SWITCH:
            never = NEVER if context.full_from is None else context.full_from
            return attend(**reads | {"full_from": jnp.where(gate > 0.5, 0, never)}, per_head=heads)
        wide = heads._replace(full_heads=call.full_heads) if mode == ("whole", HYBRID) else heads
        return attend(**reads, per_head=wide, visited=step.visited and step.visited[number])

    if len(layout.modes) > 1 and heads_in_one_launch(call.q, whole, context.spec, context.implementation):
        return by_data()
    return choose(place.mode, [functools.partial(by_mode, number) for number in range(len(layout.modes))])


def _pools(cache: CachePools, place: LayerPlace, step: DecodeStep) -> tuple[Pools, Pools]:
    return (
        Pools(cache.k_whole, cache.v_whole, place.whole_slots),
        Pools(cache.k_ring, cache.v_ring, place.ring_slots, step.ring_positions),
    )


def _reads(
    mode: tuple[str, str], cache: CachePools, place: LayerPlace, context: AttentionContext, step: DecodeStep
) -> dict[str, Any]:
    """What a layer of this mode reads, as arguments of `attend_over_pools`; a routed layer's gate comes on top."""
    whole, rings = _pools(cache, place, step)
    where, kind = mode
    if where == "ring":
        return {"pools": rings, "spec": context.spec}
    if where == "mixed":  # full heads read the whole pool, windowed heads the rings
        return {"pools": whole, "spec": context.spec.full, "others": (rings, context.spec)}
    if kind == FULL:
        return {"pools": whole, "spec": context.spec.full}
    return {"pools": whole, "spec": context.spec, "full_from": context.full_from}


def with_visits(
    step: DecodeStep, q: jax.ShapeDtypeStruct, cache: CachePools, layout: CacheLayout, context: AttentionContext
) -> DecodeStep:
    """The step with what the kernels of a TPU visit, once for all layers; `q` is the shape of a layer's queries.

    On a mesh each device lists what its own sequences see.
    """

    def visited(cache, place, full_from, step):
        inside = dataclasses.replace(context, full_from=full_from)
        found = tuple(
            None
            if mode[1] == SWITCH
            else pools_visited(
                q,
                **_reads(mode, cache, place, inside, step),
                lengths=step.lengths,
                some_full_heads=mode == ("whole", HYBRID),
                implementation=context.implementation,
            )
            for mode in layout.modes
        )
        return jax.tree.map(jnp.atleast_1d, found)  # what is one number has a place for each device

    place = LayerPlace(*(x[0] for x in layer_places(layout)))
    if (partition := context.partition) is not None:
        rows = partition.spec("batch")
        specs = (_cache_specs(partition), _place_specs(partition), rows, rows)
        visited = _on_each_device(visited, partition, specs, rows)
    return step._replace(visited=visited(cache, place, context.full_from, step))


class Chunk(NamedTuple):
    """A piece of one prompt: which sequence of the batch it belongs to, and where it stands there."""

    row: jax.Array  # int32
    start: jax.Array  # int32: the tokens of the sequence that stand before it
    size: jax.Array  # int32: its own tokens; what follows them is padding


def put_prompts(
    k: jax.Array, v: jax.Array, cache: CachePools, place: LayerPlace, ring: jax.Array, partition: Partition | None
) -> CachePools:
    """The keys and values [B, T, K, D] of whole prompts into the caches; `ring` [B, entries] are the positions that a
    ring then holds."""

    def here(k, v, cache, place, ring):
        return dataclasses.replace(
            cache,
            k_whole=write_prompt(cache.k_whole, place.whole_slots, k, None),
            v_whole=write_prompt(cache.v_whole, place.whole_slots, v, None),
            k_ring=write_prompt(cache.k_ring, place.ring_slots, k, ring),
            v_ring=write_prompt(cache.v_ring, place.ring_slots, v, ring),
        )

    if partition is None:
        return here(k, v, cache, place, ring)
    tokens, caches = partition.spec("batch", None, "kv_heads", None), _cache_specs(partition)
    specs = (tokens, tokens, caches, _place_specs(partition), partition.spec("batch", None))
    return _on_each_device(here, partition, specs, caches)(k, v, cache, place, ring)


def extend_layer(call: LayerCall, layout: CacheLayout, context: AttentionContext) -> tuple[jax.Array, CachePools]:
    """The attention of a chunk [1, C, H, D], and the cache with its keys and values in.

    A layer without keys and values of its own reads those of the chunk in `others`, and what stands before it in the
    cache.
    """
    if (partition := context.partition) is None:
        return _extend_here(call, layout, context)

    def here(call: LayerCall) -> tuple[jax.Array, CachePools]:
        chunk, mine = _on_this_device(call.at, call.cache, partition)
        out, cache = _extend_here(call._replace(at=chunk), layout, context)
        return jax.lax.psum(jnp.where(mine, out, 0), partition.rules.batch), cache

    specs = _call_specs(partition)
    return _on_each_device(here, partition, (specs,), (specs.q, specs.cache))(call)


def put_rings(
    k: jax.Array, v: jax.Array, cache: CachePools, layout: CacheLayout, chunk: Chunk, partition: Partition | None
) -> CachePools:
    """A chunk's k and v [1, C, K, D] into the rings of the layer that others read, when all of them have."""

    def here(k, v, cache, place, chunk):
        if partition is not None:
            chunk, _ = _on_this_device(chunk, cache, partition)
        return _put_ring(k[0], v[0], cache, place.ring_slots, chunk, layout)

    place = LayerPlace(*(x[layout.source] for x in layer_places(layout)))
    if partition is None:
        return here(k, v, cache, place, chunk)
    tokens, caches = partition.spec(None, None, "kv_heads", None), _cache_specs(partition)
    specs = (tokens, tokens, caches, _place_specs(partition), PartitionSpec())
    return _on_each_device(here, partition, specs, caches)(k, v, cache, place, chunk)


def _on_this_device(chunk: Chunk, cache: CachePools, partition: Partition) -> tuple[Chunk, jax.Array]:
    """The chunk as this device counts its sequences, and whether it has that sequence; else the chunk is empty."""
    rows = cache.k_whole.shape[1]
    row = chunk.row - jax.lax.axis_index(partition.rules.batch) * rows
    mine = (row >= 0) & (row < rows)
    return Chunk(jnp.clip(row, 0, rows - 1), chunk.start, jnp.where(mine, chunk.size, 0)), mine


def _on_each_device(function: Any, partition: Partition, in_specs: Any, out_specs: Any) -> Any:
    return jax.shard_map(
        function,
        mesh=partition.mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=False,  # the kernels do not say over which axes their outputs vary
    )


def _cache_specs(partition: Partition) -> CachePools:
    pool = partition.spec(*POOL)
    return CachePools(pool, pool, pool, pool)  # type: ignore[arg-type]


def _place_specs(partition: Partition) -> LayerPlace:
    """How one layer's row of `LayerPlace` lies."""
    heads = partition.spec("kv_heads")
    return LayerPlace(PartitionSpec(), heads, heads, heads)  # type: ignore[arg-type]


def _call_specs(partition: Partition, *batch: str) -> LayerCall:
    """How a layer's call lies on the mesh: each device has some of the rows of the batch, or all of its own call's."""
    rows, tokens = partition.spec(*batch), partition.spec(*(batch or (None,)), None, "heads", None)
    heads, caches, place = dimension_specs(PerHead, partition), _cache_specs(partition), _place_specs(partition)
    lie: list[Any] = [heads, *[tokens] * 4, rows, caches, place, partition.spec("kv_heads"), rows, rows]
    return LayerCall(*lie)


def _extend_here(call: LayerCall, layout: CacheLayout, context: AttentionContext) -> tuple[jax.Array, CachePools]:
    cache, place, chunk = call.cache, call.place, call.at
    k, v = own_or(call.others, call.k, call.v)
    if call.k is not None:
        cache = _put_whole(k[0], v[0], cache, place, chunk)
    out = _chunk_over_pools(call._replace(k=k, v=v, cache=cache), layout, context)
    if call.k is not None:
        cache = _put_ring(k[0], v[0], cache, place.ring_writes, chunk, layout)
    return out, cache


def _chunk_over_pools(call: LayerCall, layout: CacheLayout, context: AttentionContext) -> jax.Array:
    """A chunk's queries over whole caches that hold its keys already, and rings that do not.

    Each KV head reads its row of a pool: one after another, for all rows side by side would be a copy of the cache.
    On a GPU all heads are in one launch, and the copy of one sequence costs less than a launch for each head.
    """
    q, k, v, place = call.q, call.k, call.v, call.place
    assert k is not None
    assert v is not None
    length, kv_heads, size = k.shape[1:]
    group = q.shape[2] // kv_heads
    whole = Pools(call.cache.k_whole, call.cache.v_whole, place.whole_slots)
    together = heads_in_one_launch(q, whole, context.spec, context.implementation)
    by_head = (
        (place.whole_slots, place.ring_slots),
        q.reshape(1, length, kv_heads, group, size).transpose(2, 0, 1, 3, 4),  # [K, 1, C, G, D]
        *(x.transpose(2, 0, 1, 3)[:, :, :, None] for x in (k, v)),  # [K, 1, C, 1, D]
        jax.tree.map(lambda x: x.reshape(kv_heads, group), call.heads),
        call.full_heads,
    )
    head = _chunk_of_a_head(call, layout, context, together)

    def of_all(mode: tuple[str, str]) -> jax.Array:
        one = functools.partial(head, *mode)
        return jax.vmap(one)(by_head) if together else jax.lax.map(one, by_head)

    out = choose(place.mode, [functools.partial(of_all, mode) for mode in layout.modes])  # [K, 1, C, G, D]
    return out.transpose(1, 2, 0, 3, 4).reshape(q.shape)


def _chunk_of_a_head(
    call: LayerCall, layout: CacheLayout, context: AttentionContext, together: bool
) -> Callable[[str, str, tuple], jax.Array]:
    """`head(place, layer type, the head's row of `by_head`)`: a chunk's queries over what one KV head has."""
    cache, chunk, spec = call.cache, call.at, context.spec
    # What fills a chunk up comes after all that it holds, so that none of that sees it.
    new = chunk.start + jnp.arange(call.q.shape[1])  # [C]: positions
    entries = jnp.arange(layout.max_length)
    whole_positions = jnp.where(entries < chunk.start + chunk.size, entries, -1)
    before = ring_positions(layout, chunk.start[None])[0]
    row_of = functools.partial(_row_of, row=chunk.row)
    attend = functools.partial(attention, implementation=context.implementation)
    routed = functools.partial(routed_attention, implementation=context.implementation, inference=True)

    def head(where: str, kind: str, one: tuple) -> jax.Array:
        (whole_slot, ring_slot), q, k, v, options, full = one
        packing = Packing(q_positions=new[None], full_from=call.full_from)

        def over_whole(kind: str, here: jax.Array | bool = True) -> jax.Array:
            keys, values = row_of(cache.k_whole, whole_slot), row_of(cache.v_whole, whole_slot)
            seen = packing._replace(kv_positions=jnp.where(here, whole_positions, -1)[None])
            if kind == SWITCH:
                return routed(q, keys, values, call.gate, spec, per_head=options, packing=seen)[0]
            wide = options._replace(full_heads=full[None]) if kind == HYBRID else options
            if kind == FULL:
                return attend(q, keys, values, spec.full, per_head=wide, packing=seen._replace(full_from=None))
            return attend(q, keys, values, spec, per_head=wide, packing=seen)

        def over_ring(here: jax.Array | bool = True) -> jax.Array:
            keys, values = (
                jnp.concatenate([row_of(pool, ring_slot), own.astype(pool.dtype)], axis=1)
                for pool, own in ((cache.k_ring, k), (cache.v_ring, v))
            )
            seen = packing._replace(kv_positions=jnp.where(here, jnp.concatenate([before, new]), -1)[None])
            return attend(q, keys, values, spec, per_head=options, packing=seen)

        if where == "mixed":
            in_whole = whole_slot < cache.k_whole.shape[0]
            if together:  # what sees no key is zero and costs no visit
                return over_whole(FULL, in_whole) + over_ring(~in_whole)
            return jax.lax.cond(in_whole, functools.partial(over_whole, FULL), over_ring)
        return over_ring() if where == "ring" else over_whole(kind)

    return head


def _row_of(pool: jax.Array, slot: jax.Array, row: jax.Array) -> jax.Array:
    """What one KV head has of one sequence: [1, entries, 1, D]."""
    taken = jax.lax.dynamic_slice(pool, (slot, row, 0, 0), (1, 1, *pool.shape[2:]))
    return taken.reshape(1, -1, 1, pool.shape[3])


def _put_whole(k: jax.Array, v: jax.Array, cache: CachePools, place: LayerPlace, chunk: Chunk) -> CachePools:
    """A chunk's keys and values [C, K, D] into the whole caches."""
    entries = cache.k_whole.shape[2]
    taken = min(k.shape[0], entries)
    # A chunk may reach over the end of the pool, though its tokens do not: then it is put in from further left.
    first = jnp.minimum(chunk.start, entries - taken)
    source = first + jnp.arange(taken) - chunk.start
    put = functools.partial(
        write_chunk,
        slots=place.whole_slots,
        row=chunk.row,
        first=first,
        source=jnp.where(source < chunk.size, source, -1),
    )
    k_whole, v_whole = put(cache.k_whole, values=k), put(cache.v_whole, values=v)
    return dataclasses.replace(cache, k_whole=k_whole, v_whole=v_whole)


def _put_ring(
    k: jax.Array, v: jax.Array, cache: CachePools, slots: jax.Array, chunk: Chunk, layout: CacheLayout
) -> CachePools:
    """A chunk's keys and values [C, K, D] into the rings in these rows."""
    positions = ring_positions(layout, (chunk.start + chunk.size)[None])[0]  # what a ring then holds
    put = functools.partial(
        write_chunk,
        slots=slots,
        row=chunk.row,
        first=jnp.int32(0),
        source=jnp.where(positions >= chunk.start, positions - chunk.start, -1),
    )
    return dataclasses.replace(cache, k_ring=put(cache.k_ring, values=k), v_ring=put(cache.v_ring, values=v))
