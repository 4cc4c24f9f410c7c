"""The body of the decoding kernel: one block of cache entries of one sequence, for several KV heads.

While a step computes, the copies of the next one's block are under way. What a step does, in this order: start those
copies; clear what is accumulated, at a sequence's first visit; await its own copies; attend; write, at the last visit.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.math.nonfinite import finite, is_finite, sees_non_finite
from pallas_kernels.math.spec import visible
from pallas_kernels.tpu.tile.tiles import (
    LANES,
    LOG2E,
    MASKED,
    NN,
    NT,
    Call,
    Ref,
    addend_at,
    dot,
    form_logits,
    sigmoid_values,
    sigmoid_weights,
    split,
    take,
)


@dataclasses.dataclass(frozen=True)
class Form:
    """How the caches lie."""

    by_lanes: bool  # entries along the lanes
    batch_first: bool = False  # axes 0 and 1 are batch and head, not head and batch
    scattered: bool = False


@dataclasses.dataclass(frozen=True)
class DecodeStatic:
    call: Call
    form: Form
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


def unpack(entry: jax.Array, num_blocks: int) -> CacheVisit:
    flags = ((entry >> bit) & 1 == 1 for bit in range(4))
    return CacheVisit(lax.div(entry >> 4, num_blocks), lax.rem(entry >> 4, num_blocks), *flags)


def round_up(n: int, unit: int) -> int:
    return -(-n // unit) * unit


class _DecodeRefs(NamedTuple):
    """What a step reads and writes; None or empty where the call has no such thing."""

    entries: Ref  # the list of visits
    slots: Ref  # [K] int32
    first_position: Ref  # [B] int32, of each sequence's queries
    first_full: Ref  # [B] int32, the first query that is a full row
    full_heads: Ref  # [K] int32
    q: Ref  # [heads * rows, D] f32
    info: Ref  # [heads * rows, LANES] f32: token, slope, bias, sink logit
    kv_pos: Ref  # [1, block] int32
    k_pool: Ref
    v_pool: Ref
    out: Ref  # [heads * rows, D]
    k_buffer: Ref  # [2, heads, block, D], or with the last two exchanged (`Form.by_lanes`)
    v_buffer: Ref
    acc: Ref  # [heads * rows, D] f32
    decayed: Ref  # [heads * rows, D] f32: `acc` as the step found it, times what its new maximum leaves of it
    statistics: list[Ref]  # the running maximum and sum, [heads * rows, LANES] f32, all lanes alike
    arrived: Ref  # semaphores


def _name_refs(static: DecodeStatic, refs: tuple[Ref, ...]) -> _DecodeRefs:
    scalars, rest = split(refs, 4)
    full_heads, rest = take(rest, static.has_full_heads)
    arrays, statistics, (arrived,) = split(rest, 10, 2 if static.call.softmax else 0)
    named: list[Any] = [*scalars, full_heads, *arrays, statistics, arrived]
    return _DecodeRefs(*named)


def decode_kernel(static: DecodeStatic, *unnamed: Ref) -> None:
    refs = _name_refs(static, unnamed)
    group_of_heads, index = pl.program_id(0), pl.program_id(1)
    parity = lax.rem(index, 2)
    visit = unpack(refs.entries[index], static.num_blocks)
    step = _DecodeBody(static, refs, group_of_heads, parity, visit)
    pl.when(index == 0)(lambda: step.copy_caches(lambda copy: copy.start()))

    @pl.when(index + 1 < pl.num_programs(1))
    def _():
        following = unpack(refs.entries[index + 1], static.num_blocks)
        dataclasses.replace(step, parity=1 - parity, visit=following).copy_caches(lambda copy: copy.start())

    pl.when(visit.first)(step.begin)
    step.copy_caches(lambda copy: copy.wait())
    step.clear_behind_the_last()
    everyone = functools.reduce(jnp.logical_and, [step.reads(h) for h in range(static.heads)])
    pl.when(everyone)(lambda: step.attend(range(static.heads)))
    if static.heads_differ:
        for h in range(static.heads):
            pl.when(step.reads(h) & ~everyone)(functools.partial(step.attend, [h]))
    pl.when(visit.last)(step.write)


@dataclasses.dataclass(frozen=True, eq=False)
class _DecodeBody:
    """A visit, by some of the KV heads. A head `h` is counted from the first of the step's.

    Attributes:
      parity: which of the two buffers has the step's keys and values.
    """

    static: DecodeStatic
    refs: _DecodeRefs
    group_of_heads: jax.Array
    parity: jax.Array
    visit: CacheVisit

    def head(self, h: int) -> jax.Array:
        return self.group_of_heads * self.static.heads + h

    def rows(self, h: int) -> Any:
        return pl.ds(h * self.static.rows, self.static.rows)

    def reads(self, h: int) -> jax.Array:
        """Whether a head of the step reads the block."""
        wanted = self.visit.wanted
        if self.refs.full_heads is not None:
            wanted &= self.visit.windowed | (self.refs.full_heads[self.head(h)] != 0)
        if self.static.form.scattered:
            wanted &= self.refs.slots[self.head(h)] < self.refs.k_pool.shape[0]
        return wanted

    def copy_caches(self, act: Callable) -> None:
        """Starts or awaits what the step reads."""
        static = self.static
        if static.last_block == static.block:
            self.copy_entries(act, static.block)
            return
        is_last = self.visit.block == static.num_blocks - 1
        # Whole tiles on a chip: it pads arrays to them. An interpreter does not.
        unit = 1 if static.call.interpret else LANES if static.form.by_lanes else 8
        pl.when(is_last)(lambda: self.copy_entries(act, round_up(static.last_block, unit)))
        if static.num_blocks > 1:
            pl.when(~is_last)(lambda: self.copy_entries(act, static.block))

    def copy_entries(self, act: Callable, size: int) -> None:
        """`copy_caches` for the first entries of the block."""
        static, refs, visit = self.static, self.refs, self.visit
        span = pl.ds(pl.multiple_of(visit.block * static.block, static.block), size)
        tile = (slice(None), span) if static.form.by_lanes else (span, slice(None))
        inside = (slice(None), pl.ds(0, size)) if static.form.by_lanes else (pl.ds(0, size), slice(None))

        def from_pools(row, h) -> None:
            place = (visit.sequence, row) if static.form.batch_first else (row, visit.sequence)
            for pool, buffer in ((refs.k_pool, refs.k_buffer), (refs.v_pool, refs.v_buffer)):
                source, target = pool.at[*place, *tile], buffer.at[self.parity, h, *inside]
                act(pltpu.make_async_copy(source, target, refs.arrived.at[self.parity]))

        if static.heads_differ:
            for h in range(static.heads):
                pl.when(self.reads(h))(functools.partial(from_pools, refs.slots[self.head(h)], h))
        else:
            pl.when(visit.wanted)(lambda: from_pools(pl.ds(refs.slots[self.head(0)], static.heads), slice(None)))

    def clear_behind_the_last(self) -> None:
        """Whatever lies behind the last entry has weight zero, but zero times NaN is NaN."""
        static, v_buffer = self.static, self.refs.v_buffer
        if static.last_block == static.block:
            return

        @pl.when(self.visit.block == static.num_blocks - 1)
        def _():
            behind = pl.ds(static.last_block, static.block - static.last_block)
            entries = (slice(None), behind) if static.form.by_lanes else (behind,)
            place = (self.parity, slice(None), *entries)
            v_buffer[place] = jnp.zeros_like(v_buffer[place])

    def begin(self) -> None:
        """Clears what is accumulated for a sequence."""
        refs, has_sinks = self.refs, self.static.has_sinks
        refs.acc[...] = jnp.zeros_like(refs.acc)
        if self.static.call.softmax:
            top_ref, total_ref = refs.statistics
            # A sink logit is a key that adds nothing but its weight.
            sinks = refs.info[:, 3:4] * LOG2E if has_sinks else jnp.full((top_ref.shape[0], 1), MASKED)
            top_ref[...] = jnp.broadcast_to(sinks, top_ref.shape)
            total_ref[...] = jnp.full_like(total_ref, 1.0 if has_sinks else 0.0)

    def attend(self, members: Sequence[int]) -> None:
        """Adds the block for some of the heads."""
        added = jnp.zeros((self.static.rows, self.refs.acc.shape[1]), jnp.float32)
        for h, (s, _seen) in zip(members, self.score(members), strict=True):
            added += jnp.abs(self.accumulate(h, self.advance(h, s)))

        # Any row will do: a value that is not finite spoils even those that give it no weight.
        @pl.when(~jnp.all(is_finite(added)))
        def _():
            for h, (s, seen) in zip(members, self.score(members), strict=True):
                self.accumulate(h, self.weights_of(h, s), seen)

    def score(self, members: Sequence[int]) -> list[tuple[jax.Array, jax.Array]]:
        """Logits and masks, [rows, block] each."""
        static, refs, sequence = self.static, self.refs, self.visit.sequence
        shape = static.rows, static.block
        token = jnp.broadcast_to(self.info(0, 0), shape).astype(jnp.int32)
        q_pos = refs.first_position[sequence] + token
        kv_pos = jnp.broadcast_to(refs.kv_pos[...], shape)
        full = (token >= refs.first_full[sequence]).astype(jnp.int32)

        def mask(head_is_full=0):
            return visible(static.call.spec, q_pos, kv_pos, full_rows=full + head_is_full > 0)

        seen = [mask()] * static.heads
        if refs.full_heads is not None:
            seen = [mask(refs.full_heads[self.head(h)]) for h in range(static.heads)]
        # All products first: heads do not depend on each other, and hide each other's latencies.
        return [(self.logits(h, q_pos, kv_pos, seen[h]), seen[h]) for h in members]

    def info(self, h: int, column: int) -> jax.Array:
        """[rows, 1] f32."""
        rows = self.static.rows
        return self.refs.info[h * rows : (h + 1) * rows, column : column + 1]

    def logits(self, h: int, q_pos: jax.Array, kv_pos: jax.Array, seen: jax.Array) -> jax.Array:
        call, rows, refs = self.static.call, self.static.rows, self.refs
        query = refs.q[h * rows : (h + 1) * rows, :].astype(refs.k_buffer.dtype)
        s = dot(query, refs.k_buffer[self.parity, h], NN if self.static.form.by_lanes else NT)

        def addend():
            return addend_at(call, [q_pos], [kv_pos], (self.info(h, 1), self.info(h, 2)))

        s, _ = form_logits(call, s, addend)
        return jnp.where(seen, s, MASKED)

    def weights_of(self, h: int, s: jax.Array) -> jax.Array:
        """The weights of logits, given the maximum so far."""
        if self.static.call.softmax:
            return jnp.exp2(s - self.refs.statistics[0][self.rows(h), :1])
        return sigmoid_weights(s)

    def advance(self, h: int, s: jax.Array) -> jax.Array:
        """Moves a head's running maximum and sum on, and what it has accumulated with them; the weights of `s`."""
        at, refs = self.rows(h), self.refs
        if not self.static.call.softmax:
            refs.decayed[at, :] = refs.acc[at, :]
            return self.weights_of(h, s)
        top_ref, total_ref = refs.statistics
        old = top_ref[at, :]
        new = jnp.maximum(old, s.max(axis=1, keepdims=True))  # [rows, LANES], all lanes alike
        decay = jnp.exp2(old - new)
        weights = jnp.exp2(s - new[:, :1])
        total_ref[at, :] = total_ref[at, :] * decay + weights.sum(axis=1, keepdims=True)
        refs.decayed[at, :] = refs.acc[at, :] * decay[:, :1]
        top_ref[at, :] = new
        return weights

    def accumulate(self, h: int, weights: jax.Array, seen: jax.Array | None = None) -> jax.Array:
        """Adds a head's new values, and returns what it adds.

        Args:
          seen: the mask, for values that are not finite to reach the rows that see them, and no others.
        """
        at, form = self.rows(h), self.static.form
        value = self.refs.v_buffer[self.parity, h]
        clean = value if seen is None else finite(value)
        contract = NT if form.by_lanes else NN
        if self.static.call.softmax:
            more = dot(weights.astype(value.dtype), clean, contract)
        else:
            more = sigmoid_values(weights, clean, contract)
        if seen is not None:
            more = jnp.where(sees_non_finite(seen, value, contract), jnp.nan, more)
        self.refs.acc[at, :] = self.refs.decayed[at, :] + more
        return more

    def write(self) -> None:
        refs = self.refs
        out = refs.acc[...]
        if self.static.call.softmax:
            top_ref, total_ref = refs.statistics
            # False for NaN, which is not to be hidden.
            sees_none = jnp.broadcast_to(top_ref[:, :1] <= 0.5 * MASKED, out.shape)
            out = jnp.where(sees_none, 0, out * (1 / total_ref[:, :1]))
        refs.out[...] = out.astype(refs.out.dtype)
