"""Decoding on TPUs: a few queries a sequence over a cache, bound by reading the cache once.

A grid step reads one block of cache entries of one sequence for several KV heads. Which (sequence, block) pairs there
are comes as a list in scalar memory, made from each sequence's own positions, so that a sequence costs what *it* sees.
The kernel fetches the blocks itself, one step ahead, from wherever the heads lie (`slots`): the caches are neither
gathered nor transposed. The query heads of a KV head, times the tokens, are the rows of one small tile.

Cache arrays have their entries either along the sublanes, [.., entries, head_dim], or along the lanes,
[.., head_dim, entries]. XLA's own layout puts the axis last that leaves no lanes empty, so the second form is free
where head_dim is no multiple of 128, and the kernel follows.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.blocks import Tiles, device_kind, on_tpu
from pallas_kernels.nonfinite import finite, is_finite, sees_non_finite
from pallas_kernels.parts import vary_alike
from pallas_kernels.schedule import Visits
from pallas_kernels.spec import AttentionSpec, Coordinates, PerHead, dense_mask, visible
from pallas_kernels.tpu.tiles import (
    LANES,
    LOG2E,
    MASKED,
    NN,
    NT,
    VMEM_LIMIT_BYTES,
    Call,
    addend_at,
    dot,
    form_logits,
    shape_like,
    sigmoid_weights,
    with_scale,
)

_MAX_HEADS = 8  # KV heads of a grid step


def decode_attention(
    q: jax.Array,  # [B, T, H, D]
    k_cache: jax.Array,  # [B, S, K, D]
    v_cache: jax.Array,  # [B, S, K, D]
    spec: AttentionSpec,
    where: Coordinates,
    per_head: PerHead,
) -> jax.Array:
    """Attention of a few queries over caches, [B, T, H, D] in q's dtype; not differentiable."""
    by_lanes = q.shape[3] % LANES != 0
    axes = (0, 2, 3, 1) if by_lanes else (0, 2, 1, 3)
    slots = jnp.arange(k_cache.shape[2], dtype=jnp.int32)
    form = _Form(by_lanes=by_lanes, batch_first=True)
    caches = k_cache.transpose(axes), v_cache.transpose(axes)
    return _decode(form, q, *caches, slots, spec, where, per_head)


def decode_pool(
    q: jax.Array,  # [B, T, H, D]
    k_pool: jax.Array,  # [rows, B, S, D]
    v_pool: jax.Array,  # [rows, B, S, D]
    slots: jax.Array,  # [K]
    spec: AttentionSpec,
    where: Coordinates,
    per_head: PerHead,
    *,
    scattered: bool = False,
) -> jax.Array:
    """`decode_attention` over pools of caches, KV head h being row `slots[h]` of them. They are read in place.

    Args:
      scattered: slots may come in any order, and heads whose slot is out of range are not in these pools (their output
        is zero). Otherwise they are consecutive rows, which are fetched together.
    """
    by_lanes = q.shape[3] % LANES != 0
    if by_lanes:
        k_pool, v_pool = k_pool.swapaxes(2, 3), v_pool.swapaxes(2, 3)
    form = _Form(by_lanes=by_lanes, scattered=scattered)
    return _decode(form, q, k_pool, v_pool, slots, spec, where, per_head)


@dataclasses.dataclass(frozen=True)
class _Form:
    """How the caches lie."""

    by_lanes: bool  # entries along the lanes
    batch_first: bool = False  # axes 0 and 1 are batch and head, not head and batch
    scattered: bool = False


@dataclasses.dataclass(frozen=True)
class _Static:
    call: Call
    form: _Form
    has_sinks: bool
    has_full_heads: bool
    kv_heads: int
    heads: int  # KV heads of a step
    rows: int  # of a KV head's tile: tokens times query heads, padded to whole registers
    entries: int
    block: int
    num_blocks: int

    @property
    def heads_differ(self) -> bool:
        """Whether a block may be read for some heads of a step only."""
        return self.form.scattered or self.has_full_heads

    @property
    def last_block(self) -> int:
        """Entries in the last block."""
        return self.entries - (self.num_blocks - 1) * self.block


class CacheVisit(NamedTuple):
    """An entry of the list of visits: a sequence, and a block of its cache."""

    sequence: jax.Array
    block: jax.Array
    first: jax.Array  # of its sequence
    last: jax.Array
    wanted: jax.Array  # False in the entry of a sequence that sees nothing
    windowed: jax.Array  # whether heads that are not full see something of it, too


def list_visits(
    spec: AttentionSpec, where: Coordinates, block: int, *, some_full_heads: bool = False
) -> Visits:
    """Lists, sequence by sequence, the blocks in which some query sees some entry; `unpack` says what is in a pair.

    A sequence that sees nothing has one all the same, so that its (zero) result gets written.

    Args:
      where: with `kv_pos` [B, whole blocks].
      some_full_heads: list what full heads see.
    """
    batch = where.q_pos.shape[0]

    def blocks(spec: AttentionSpec) -> jax.Array:
        seen = dense_mask(spec, where).any(axis=1)  # [B, S]
        return seen.reshape(batch, -1, block).any(axis=2)

    windowed = blocks(spec)  # [B, blocks]
    wanted = blocks(dataclasses.replace(spec, window=None)) if some_full_heads else windowed
    column = jnp.arange(wanted.shape[1], dtype=jnp.int32)
    listed = wanted | (~wanted.any(axis=1, keepdims=True) & (column == 0))
    first = column == jnp.where(listed, column, column.size).min(axis=1, keepdims=True)
    last = column == jnp.where(listed, column, -1).max(axis=1, keepdims=True)
    packed = jnp.arange(wanted.size, dtype=jnp.int32).reshape(wanted.shape) << 4
    for bit, flag in enumerate((first, last, wanted, windowed)):
        packed |= flag.astype(jnp.int32) << bit
    # The i-th listed entry, by comparing all with all: no sort, no scatter, and small beside what a visit costs.
    listed, packed = listed.reshape(-1), packed.reshape(-1)
    rank = jnp.where(listed, jnp.cumsum(listed, dtype=jnp.int32), 0)
    index = jnp.arange(1, rank.size + 1, dtype=jnp.int32)
    entries = jnp.where(index[:, None] == rank, packed, 0).sum(axis=1, dtype=jnp.int32)
    return Visits(entries, listed.sum(dtype=jnp.int32))


def unpack(entry: jax.Array, num_blocks: int) -> CacheVisit:
    flags = ((entry >> bit) & 1 == 1 for bit in range(4))
    return CacheVisit(lax.div(entry >> 4, num_blocks), lax.rem(entry >> 4, num_blocks), *flags)


def choose_steps(
    spec: AttentionSpec, entries: int, kv_heads: int, entry_bytes: int, kind: str, scattered: bool
) -> tuple[int, int]:
    """The KV heads and the cache entries of a grid step; the latter are a multiple of 128.

    Args:
      entry_bytes: of a key and a value of one head.
      kind: of device.
      scattered: as in `decode_pool`.
    """
    # The two cores of a v4 or v5p chip share the heads.
    cores = 2 if kind in ("TPU v4", "TPU v5", "TPU v5p") else 1
    most = min(_MAX_HEADS, max(1, kv_heads // cores))
    heads = max(n for n in range(1, most + 1) if kv_heads % n == 0)
    step_bytes = (4 if "7" in kind else 2) * 2**20  # long enough a read to hide everything else in a step
    if scattered or (spec.window is not None and entries < 2 * (spec.window + spec.num_sink_tokens)):
        # Some of the heads are elsewhere; or all of the cache will be seen, being hardly longer than the window.
        step_bytes = 8 * 2**20
    block = min(2048, max(256, step_bytes // (heads * entry_bytes)))
    return heads, _round_up(pl.cdiv(entries, pl.cdiv(entries, block)), LANES)


def _round_up(n: int, unit: int) -> int:
    return -(-n // unit) * unit


def _decode(
    form: _Form, q, k, v, slots, spec: AttentionSpec, where: Coordinates, per_head: PerHead
) -> jax.Array:
    alibi_slopes, sigmoid_bias = per_head.alibi_slopes, per_head.sigmoid_bias
    sink_logits, full_heads = per_head.sink_logits, per_head.full_heads
    batch, length, num_heads, head_dim = q.shape
    kv_heads, group = slots.shape[0], num_heads // slots.shape[0]
    kind = device_kind()
    call = Call(
        with_scale(spec, head_dim),
        Tiles(),
        has_slopes=alibi_slopes is not None,
        has_bias=sigmoid_bias is not None,
        interpret=not on_tpu(),
    )
    entries = k.shape[3 if form.by_lanes else 2]
    entry_bytes = 2 * head_dim * k.dtype.itemsize
    heads, block = choose_steps(spec, entries, kv_heads, entry_bytes, kind, form.scattered)
    static = _Static(
        call,
        form,
        sink_logits is not None,
        full_heads is not None,
        kv_heads,
        heads,
        _round_up(length * group, 8),
        entries,
        block,
        pl.cdiv(entries, block),
    )

    def by_batch(x, fill=0, width=None):  # [1 or B, n] -> [B, width]
        x = jnp.broadcast_to(x, (batch, x.shape[1]))
        return x if width is None else jnp.pad(x, ((0, 0), (0, width - x.shape[1])), constant_values=fill)

    def fold(
        x,
    ):  # [.., T, H, ..] with axes 1 and 2 -> [B, K * rows, ..], a row being (token, head of the group)
        x = x.reshape(x.shape[0], length, kv_heads, group, *x.shape[3:]).swapaxes(1, 2)
        x = x.reshape(x.shape[0], kv_heads, length * group, *x.shape[4:])
        x = jnp.pad(x, [(0, static.rows - length * group if axis == 2 else 0) for axis in range(x.ndim)])
        return x.reshape(x.shape[0], kv_heads * static.rows, *x.shape[3:])

    width = static.num_blocks * block
    kv_pos = by_batch(where.kv_pos, -1, width)
    full_rows = None if where.full_rows is None else by_batch(where.full_rows)
    visits = list_visits(
        spec,
        Coordinates(by_batch(where.q_pos), kv_pos, by_batch(where.q_pos), kv_pos, full_rows=full_rows),
        block,
        some_full_heads=full_heads is not None,
    )
    # Queries are consecutive, and the full ones the last of them.
    first_full = jnp.full(batch, length) if full_rows is None else length - full_rows.sum(axis=1)
    scalars = [visits.pairs, slots, by_batch(where.q_pos)[:, 0], first_full]
    if full_heads is not None:
        scalars.append(full_heads)
    info = [jnp.broadcast_to(jnp.arange(length)[:, None], (length, num_heads))]
    info += [jnp.zeros(num_heads) if x is None else x for x in (alibi_slopes, sigmoid_bias, sink_logits)]
    info = [jnp.broadcast_to(x.astype(jnp.float32), (length, num_heads)) for x in info]
    row_info = fold(jnp.stack(info, axis=-1)[None])[0]  # [K * rows, 4]: token, slope, bias, sink logit
    row_info = jnp.pad(row_info, ((0, 0), (0, LANES - 4)))
    # In float32 a tile may have 8 rows; bfloat16 would fill twice as many with padding.
    rows = fold(q * jnp.asarray(call.query_factor, q.dtype)).astype(jnp.float32)
    arguments = vary_alike(
        ([x.astype(jnp.int32) for x in scalars], visits.used, rows, row_info, kv_pos[:, None], k, v)
    )
    out = _launch(static, *arguments)  # [B, K * rows, D]
    out = out.reshape(batch, kv_heads, static.rows, head_dim)[:, :, : length * group]
    out = out.reshape(batch, kv_heads, length, group, head_dim).swapaxes(1, 2)
    return out.reshape(batch, length, num_heads, head_dim)


def _launch(static: _Static, scalars, used, q, row_info, kv_pos, k, v) -> jax.Array:
    heads, rows, block = static.heads, static.rows, static.block
    head_dim = q.shape[2]

    def at(index):
        def index_map(g, p, entries, *_):
            return index(g, unpack(entries[p], static.num_blocks))

        return index_map

    queries = pl.BlockSpec((None, heads * rows, head_dim), at(lambda g, visit: (visit.sequence, g, 0)))
    tile = (head_dim, block) if static.form.by_lanes else (block, head_dim)
    buffer = pltpu.VMEM((2, heads, *tile), k.dtype)
    state = pltpu.VMEM((heads * rows, LANES), jnp.float32)
    return pl.pallas_call(
        functools.partial(_kernel, static),
        out_shape=shape_like(q.shape, k.dtype, q),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(static.kv_heads // heads, used),
            in_specs=[
                queries,
                pl.BlockSpec((heads * rows, LANES), at(lambda g, visit: (g, 0))),
                pl.BlockSpec((None, 1, block), at(lambda g, visit: (visit.sequence, 0, visit.block))),
                pl.BlockSpec(memory_space=pl.ANY),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=queries,
            scratch_shapes=[
                buffer,
                buffer,
                *[pltpu.VMEM((heads * rows, head_dim), jnp.float32)] * 2,
                *[state] * (2 if static.call.softmax else 0),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT_BYTES
        ),
        interpret=static.call.interpret,
        name="decode",
    )(*scalars, q, row_info, kv_pos, k, v)


def _kernel(static: _Static, entries, slots, first_position, first_full, *rest) -> None:
    call, form, heads, rows, block = static.call, static.form, static.heads, static.rows, static.block
    full_heads, rest = (rest[0], rest[1:]) if static.has_full_heads else (None, rest)
    q_ref, info_ref, pos_ref, k_pool, v_pool, out_ref, k_buffer, v_buffer, *scratch = rest
    acc_ref, decayed_ref, *state, arrived = scratch
    group_of_heads, step = pl.program_id(0), pl.program_id(1)
    shape = (rows, block)

    def head(h):
        return group_of_heads * heads + h

    def reads(visit: CacheVisit, h) -> jax.Array:
        """Whether a head of the step reads the block."""
        wanted = visit.wanted
        if full_heads is not None:
            wanted &= visit.windowed | (full_heads[head(h)] != 0)
        if form.scattered:
            wanted &= slots[head(h)] < k_pool.shape[0]
        return wanted

    def copies(visit: CacheVisit, turn, act) -> None:
        """Starts or awaits what a visit reads."""

        def copy(size: int) -> None:
            span = pl.ds(pl.multiple_of(visit.block * block, block), size)
            tile = (slice(None), span) if form.by_lanes else (span, slice(None))
            inside = (slice(None), pl.ds(0, size)) if form.by_lanes else (pl.ds(0, size), slice(None))

            def from_pools(row, h) -> None:
                place = (visit.sequence, row) if form.batch_first else (row, visit.sequence)
                for pool, buffer in ((k_pool, k_buffer), (v_pool, v_buffer)):
                    source, target = pool.at[*place, *tile], buffer.at[turn, h, *inside]
                    act(pltpu.make_async_copy(source, target, arrived.at[turn]))

            if static.heads_differ:
                for h in range(heads):
                    pl.when(reads(visit, h))(functools.partial(from_pools, slots[head(h)], h))
            else:
                pl.when(visit.wanted)(lambda: from_pools(pl.ds(slots[head(0)], heads), slice(None)))

        if static.last_block == block:
            copy(block)
            return
        is_last = visit.block == static.num_blocks - 1
        # Whole tiles on a chip: it pads arrays to them. An interpreter does not.
        unit = 1 if call.interpret else LANES if form.by_lanes else 8
        pl.when(is_last)(lambda: copy(_round_up(static.last_block, unit)))
        if static.num_blocks > 1:
            pl.when(~is_last)(lambda: copy(block))

    turn = lax.rem(step, 2)
    visit = unpack(entries[step], static.num_blocks)
    pl.when(step == 0)(lambda: copies(visit, turn, lambda copy: copy.start()))

    @pl.when(step + 1 < pl.num_programs(1))
    def _():
        copies(unpack(entries[step + 1], static.num_blocks), 1 - turn, lambda copy: copy.start())

    def info(h, column):
        return info_ref[h * rows : (h + 1) * rows, column : column + 1]  # [rows, 1] f32

    @pl.when(visit.first)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)
        if call.softmax:
            top_ref, total_ref = state
            # A sink logit is a key that adds nothing but its weight.
            sinks = info_ref[:, 3:4] * LOG2E if static.has_sinks else jnp.full((heads * rows, 1), MASKED)
            top_ref[...] = jnp.broadcast_to(sinks, top_ref.shape)
            total_ref[...] = jnp.full_like(total_ref, 1.0 if static.has_sinks else 0.0)

    def logits(h, q_pos, kv_pos, seen) -> jax.Array:
        query = q_ref[h * rows : (h + 1) * rows, :].astype(k_buffer.dtype)
        s = dot(query, k_buffer[turn, h], NN if form.by_lanes else NT)  # [rows, block]
        s, _ = form_logits(call, s, lambda: addend_at(call, [q_pos], [kv_pos], (info(h, 1), info(h, 2))))
        return jnp.where(seen, s, MASKED)

    def weights_of(h, s) -> jax.Array:
        return jnp.exp2(s - state[0][pl.ds(h * rows, rows), :1]) if call.softmax else sigmoid_weights(s)

    def advance(h, s) -> jax.Array:
        """Moves a head's running maximum and sum on, and what it has accumulated with them; the weights of `s`."""
        at = pl.ds(h * rows, rows)
        if not call.softmax:
            decayed_ref[at, :] = acc_ref[at, :]
            return weights_of(h, s)
        top_ref, total_ref = state
        old = top_ref[at, :]
        new = jnp.maximum(old, s.max(axis=1, keepdims=True))  # [rows, LANES], all lanes alike
        decay = jnp.exp2(old - new)
        weights = jnp.exp2(s - new[:, :1])
        total_ref[at, :] = total_ref[at, :] * decay + weights.sum(axis=1, keepdims=True)
        decayed_ref[at, :] = acc_ref[at, :] * decay[:, :1]
        top_ref[at, :] = new
        return weights

    def accumulate(h, weights, seen=None) -> jax.Array:
        """Adds a head's new values, and returns what it adds.

        Args:
          seen: the mask, for values that are not finite to reach the rows that see them, and no others.
        """
        at = pl.ds(h * rows, rows)
        value = v_buffer[turn, h]
        more = _weigh(form, weights, value if seen is None else finite(value), exactly=not call.softmax)
        if seen is not None:
            more = jnp.where(sees_non_finite(seen, value, NT if form.by_lanes else NN), jnp.nan, more)
        acc_ref[at, :] = decayed_ref[at, :] + more
        return more

    def attend(members) -> None:
        def score() -> list[tuple[jax.Array, jax.Array]]:
            """Logits and masks."""
            token = jnp.broadcast_to(info(0, 0), shape).astype(jnp.int32)
            q_pos = first_position[visit.sequence] + token
            kv_pos = jnp.broadcast_to(pos_ref[...], shape)
            full = (token >= first_full[visit.sequence]).astype(jnp.int32)

            def mask(head_is_full=0):
                return visible(call.spec, q_pos, kv_pos, full_rows=full + head_is_full > 0)

            seen = [mask()] * heads
            if full_heads is not None:
                seen = [mask(full_heads[head(h)]) for h in range(heads)]
            # All products first: heads do not depend on each other, and hide each other's latencies.
            return [(logits(h, q_pos, kv_pos, seen[h]), seen[h]) for h in members]

        added = jnp.zeros((rows, acc_ref.shape[1]), jnp.float32)
        for h, (s, _seen) in zip(members, score(), strict=True):
            added += jnp.abs(accumulate(h, advance(h, s)))

        # Any row will do: a value that is not finite spoils even those that give it no weight.
        @pl.when(~jnp.all(is_finite(added)))
        def _():
            for h, (s, seen) in zip(members, score(), strict=True):
                accumulate(h, weights_of(h, s), seen)

    copies(visit, turn, lambda copy: copy.wait())
    if static.last_block != block:
        # Whatever lies behind the last entry has weight zero, but zero times NaN is NaN.
        @pl.when(visit.block == static.num_blocks - 1)
        def _():
            behind = pl.ds(static.last_block, block - static.last_block)
            place = (turn, slice(None), *((slice(None), behind) if form.by_lanes else (behind,)))
            v_buffer[place] = jnp.zeros_like(v_buffer[place])

    everyone = functools.reduce(jnp.logical_and, [reads(visit, h) for h in range(heads)])
    pl.when(everyone)(lambda: attend(range(heads)))
    if static.heads_differ:
        for h in range(heads):
            pl.when(reads(visit, h) & ~everyone)(functools.partial(attend, [h]))

    @pl.when(visit.last)
    def _():
        out = acc_ref[...]
        if call.softmax:
            top_ref, total_ref = state
            # False for NaN, which is not to be hidden.
            sees_none = jnp.broadcast_to(top_ref[:, :1] <= 0.5 * MASKED, out.shape)
            out = jnp.where(sees_none, 0, out * (1 / total_ref[:, :1]))
        out_ref[...] = out.astype(out_ref.dtype)


def _weigh(form: _Form, weights: jax.Array, value: jax.Array, exactly: bool = False) -> jax.Array:
    """weights [rows, block] times values."""
    contract = NT if form.by_lanes else NN
    high = weights.astype(value.dtype)
    acc = dot(high, value, contract)
    if not exactly or value.dtype == jnp.float32:
        return acc
    # Without a normaliser the rounding of many weights near 1 adds up: what it cut off is added.
    return acc + dot((weights - high.astype(jnp.float32)).astype(value.dtype), value, contract)
