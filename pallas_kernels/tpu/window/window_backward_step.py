"""One step of the window backward kernel: the gradients of a block of queries and of the keys in their window.

Logits are transposed, [keys, queries]: what belongs to a query (lse, delta, its first key) is a row, and the weights
are the stationary side of every product, so that 128 rows of q, dout or k stream past a matrix unit that they fill.
The gradients are transposed too, once a step. Of the scores' units, the products run two ahead of the rest.
"""

import dataclasses
import functools
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.math.nonfinite import finite
from pallas_kernels.math.schedule import Kind, bounds_of, kind_at
from pallas_kernels.tpu.tile.gradients import pipelined, weights_and_slopes
from pallas_kernels.tpu.tile.pairs import own_lanes
from pallas_kernels.tpu.tile.rotation import rotate_tile, rotate_tile_back
from pallas_kernels.tpu.tile.tiles import NN, NT, Call, Ref, dot, form_logits, largest_divisor, window_of
from pallas_kernels.tpu.window.geometry import blocks_back, sink_rows

_UNIT = 256  # queries of a unit of work, as wide as the widest matrix unit
_MOST_UNITS = 80  # of a step's usual code: some 20,000 instruction words on a v6e
_SINKS = -1


class _WindowUnit(NamedTuple):
    head: int  # of those side by side
    block: int  # of keys, the oldest first; or _SINKS
    keys: slice  # in the block
    queries: slice
    distance: int  # of the first query to the first key; of sink tokens, in the first step


class WindowBackwardRefs(NamedTuple):
    """What a step reads and writes; None where the call has no such thing."""

    cuts: Ref  # `Segments.cuts`
    first_sinks: Ref  # of each step's documents, from `Segments.sinks`
    q: Ref  # [members, block, D]; within `WindowBackwardRefs.of` a member, without that axis
    dout: Ref
    head_bias: Ref  # [members * heads abreast, 8, LANES]
    keys: list[Ref]  # the blocks of the window, the oldest first, each [block, D]
    values: list[Ref]
    statistics: Ref  # [members * heads abreast, 8, block]
    segments: Ref  # [8, block], `Segments.queries`
    sink_keys: Ref  # [sink_rows, D]
    sink_values: Ref
    cos: Ref  # [block, D], of queries that are to be rotated
    sin: Ref
    dq: Ref  # [members, block, D]
    dk: Ref  # [block, D]
    dv: Ref
    dbias: Ref  # [members * heads abreast, 1, block]
    dk_sinks: Ref
    dv_sinks: Ref
    dk_ring: Ref  # [blocks, D, block] f32
    dv_ring: Ref
    dq_acc: Ref  # [D, block] f32
    q_t: Ref  # [D, block]
    dout_t: Ref
    k_t: Ref  # [blocks, D, block]
    rotated_q: Ref  # [block, D]
    own_q: Ref  # [heads abreast, block, D], each with zeros in the others' lanes
    own_dout: Ref
    dk_sinks_acc: Ref  # [D, sink_rows] f32
    dv_sinks_acc: Ref

    def of(self, member, abreast: int) -> "WindowBackwardRefs":
        """The references of one of the query heads that a step serves, or of those side by side."""
        heads = pl.ds(member * abreast, abreast)
        places = dict.fromkeys(("q", "dout", "dq"), member) | dict.fromkeys(("head_bias", "statistics", "dbias"), heads)
        here = {name: getattr(self, name) for name in places}
        return self._replace(**{name: ref.at[places[name]] for name, ref in here.items() if ref is not None})


@dataclasses.dataclass(frozen=True, eq=False)
class WindowBackwardStep:
    """A step of the grid: a block of queries of `members` of the `group` query heads that share a KV head; heads side
    by side count as one.

    Attributes:
      part: which of the group's parts, of `members` heads each.
      first_sink: the index of the first sink token.
    """

    call: Call
    refs: WindowBackwardRefs
    members: int
    group: int
    index: jax.Array
    part: jax.Array
    first_sink: jax.Array | int
    packed: bool

    @property
    def writes_sinks(self) -> bool:
        """Whether the gradients of sink tokens that this step gives are complete with its one head's."""
        return self.packed and self.group == 1 and self.refs.dk_sinks is not None

    def slot(self, block: int) -> jax.Array:
        """Where in the ring a block of the window is, the oldest being 0."""
        return lax.rem(self.index + 1 + block, blocks_back(self.call) + 1)

    def write_keys(self, keys: slice) -> None:
        """Writes what has been added up for some keys of the block that leaves the ring."""
        refs, slot = self.refs, self.slot
        write(refs.dk, keys, refs.dk_ring[slot(0), :, keys], self.call.product_factor)
        write(refs.dv, keys, refs.dv_ring[slot(0), :, keys])

    def write_sinks(self) -> None:
        refs = self.refs
        write(refs.dk_sinks, slice(None), refs.dk_sinks_acc[...], self.call.product_factor)
        write(refs.dv_sinks, slice(None), refs.dv_sinks_acc[...])


def write(out_ref: Ref, rows: slice, transposed: jax.Array, factor: float = 1.0) -> None:
    out_ref[rows, :] = (transposed * factor).T.astype(out_ref.dtype)


class WindowBackwardBody:
    """The code of a step whose window's last `present` blocks exist; `sinks` is as `window_steps` gives it, or
    "by token". With `by_token`, `Segments.queries` mask every unit, otherwise the window alone does. The
    `usual` code of a step has several heads one behind another.

    The first write of a step need not add to what is there, and the last one of a block that leaves the ring goes to
    the result: so it notes, while it is traced, what it has written.
    """

    def __init__(
        self, step: WindowBackwardStep, present: int, sinks: str | None, *, by_token: bool = False, usual: bool = False
    ) -> None:
        self.step, self.call, self.refs = step, step.call, step.refs
        self.present, self.sinks, self.by_token = present, sinks, by_token
        self.sink_rows = slice(0, sink_rows(step.call, sinks == "by token"))
        self.started_keys: set[tuple[int, int]] = set()  # of each head and the newest block
        self.started_queries: set[tuple[int, int]] = set()
        self.window_units = _units(self.call, present)
        self.last_units: dict[int, _WindowUnit] = {}  # of the block that leaves the ring, by first key
        if present > blocks_back(self.call):
            self.last_units = {unit.keys.start: unit for unit in self.window_units if unit.block == 0}
        self.unroll = heads_in_one_piece(step.call, step.members) if usual else 1

    def attend(self) -> None:
        step, refs, back = self.step, self.refs, blocks_back(self.call)
        if step.group > 1:
            for ring in (refs.dk_ring, refs.dv_ring):
                pl.when(step.part == 0)(functools.partial(clear, ring, step.slot(back)))
        refs.k_t[step.slot(back)] = refs.keys[back][...].T  # earlier steps have left the others
        if self.by_token:
            self.first_key = refs.segments[0:1, :] - step.index * self.call.tiles.q_block  # [1, block]
        if self.sinks is not None:
            self.sink_k_t = refs.sink_keys[self.sink_rows, :].T
        if step.members == 1:
            self.attend_member(0)
        else:
            pl.loop(0, step.members, unroll=self.unroll)(self.attend_member)

    def attend_member(self, member: jax.Array | int) -> None:
        self.refs = self.step.refs.of(member, self.call.abreast)
        call, step, block = self.call, self.step, self.call.tiles.q_block
        self.begin()
        units = self.window_units
        if self.sinks is not None:
            width = math.gcd(_UNIT, block)
            starts = range(0, block, width)
            places = itertools.product(starts, range(call.abreast))
            sinks = [_WindowUnit(i, _SINKS, self.sink_rows, slice(at, at + width), at) for at, i in places]
            units = sinks + units
        elif step.writes_sinks:
            for ref in (self.refs.dk_sinks, self.refs.dv_sinks):
                ref[...] = jnp.zeros_like(ref)
        pipelined(units, self.products, self.finish)
        self.write_queries()
        if step.group == 1 and self.present > blocks_back(call):  # tiles that the window had passed already
            tile = math.gcd(call.tiles.tile, block)
            for start in range(0, block, tile):
                if start not in self.last_units:
                    step.write_keys(slice(start, start + tile))

    def begin(self) -> None:
        """Reads, clears and transposes what belongs to a query head, or to those side by side."""
        call, refs = self.call, self.refs
        if call.rotated_by:
            refs.rotated_q[...] = rotate_tile(call, refs.q[...], refs.cos[...], refs.sin[...])
            self.refs = refs = refs._replace(q=refs.rotated_q)
        self.started_queries.clear()
        if call.has_head_bias:  # read here, not in each unit: up to 8 % of ALiBi's pass
            heads = range(call.abreast)
            self.head_bias = [[refs.head_bias[h, i : i + 1, 0:1] * call.unit for i in range(2)] for h in heads]
        if call.has_bias:
            refs.dbias[...] = jnp.zeros_like(refs.dbias)
        refs.q_t[...], refs.dout_t[...] = refs.q[...].T, refs.dout[...].T
        for own, source in ((refs.own_q, refs.q), (refs.own_dout, refs.dout)) if call.abreast > 1 else ():
            for head in range(call.abreast):
                own[head] = own_lanes(call, source[...], head)

    def write_queries(self) -> None:
        call, refs = self.call, self.refs
        if call.rotated_by:
            refs.dq[...] = rotate_tile_back(call, refs.dq_acc[...], refs.cos[...], refs.sin[...]).astype(refs.dq.dtype)
        else:
            write(refs.dq, slice(None), refs.dq_acc[...], call.product_factor)

    def products(self, unit: _WindowUnit) -> tuple[jax.Array, jax.Array]:
        refs = self.refs
        k_ref, v_ref = refs.sink_keys, refs.sink_values
        if unit.block != _SINKS:
            k_ref, v_ref = refs.keys[unit.block], refs.values[unit.block]
        q_ref, dout_ref = refs.q, refs.dout
        if self.call.abreast > 1:
            q_ref, dout_ref = refs.own_q.at[unit.head], refs.own_dout.at[unit.head]
        return (
            dot(k_ref[unit.keys, :], q_ref[unit.queries, :], NT),  # [keys, queries]
            dot(v_ref[unit.keys, :], dout_ref[unit.queries, :], NT),
        )

    def finish(self, unit: _WindowUnit, s: jax.Array, dw: jax.Array) -> None:
        """Adds a unit's share to the gradients, given its products."""
        call, refs, queries, head, own = self.call, self.refs, unit.queries, unit.head, self.own(unit)
        distance: Any = unit.distance
        if unit.block == _SINKS:
            distance = self.sink_distance(unit)
        relative = lax.broadcasted_iota(jnp.int32, s.shape, 1) - lax.broadcasted_iota(jnp.int32, s.shape, 0)
        s, derivative = form_logits(call, s, functools.partial(self.addend, head, s.shape, distance))
        mask = self.mask(unit, relative, distance)
        clean = (lambda x: x) if mask is None else finite
        lse, delta = (refs.statistics[head, i : i + 1, queries] if call.softmax else None for i in range(2))
        w, dlogits, ds = weights_and_slopes(call, s, derivative, dw, lse, delta, mask)
        if call.has_bias:
            refs.dbias[head, :, queries] += dlogits.sum(axis=0, keepdims=True)
        w, ds = w.astype(refs.q.dtype), ds.astype(refs.q.dtype)
        dv = dot(clean(refs.dout_t[own, queries]), w, NT)
        dk = dot(clean(refs.q_t[own, queries]), ds, NT)
        if unit.block == _SINKS:
            self.add_to_sinks(unit, dv, dk)
            self.add_to_queries(unit, dot(clean(self.sink_k_t[own]), ds, NN))
            return
        self.add_to_keys(unit, self.step.slot(unit.block), dv, dk)
        self.add_to_queries(unit, dot(clean(refs.k_t[self.step.slot(unit.block), own, unit.keys]), ds, NN))

    def own(self, unit: _WindowUnit) -> slice:
        """The channels of a unit's head, of those of all heads that lie side by side."""
        width = self.refs.dq_acc.shape[0] // self.call.abreast
        return slice(unit.head * width, (unit.head + 1) * width)

    def sink_distance(self, unit: _WindowUnit) -> jax.Array:
        """From the first query of a unit to the first sink token; or as if it were so, for each query, [1, queries]."""
        step = self.step
        if self.sinks == "by token":
            column = lax.broadcasted_iota(jnp.int32, (1, unit.queries.stop - unit.queries.start), 1)
            return self.refs.segments[3:4, unit.queries] - column
        return unit.distance + step.index * self.call.tiles.q_block - step.first_sink

    def addend(self, head: int, shape: tuple[int, ...], distance) -> jax.Array:
        """What ALiBi and the bias add to a unit's logits [keys, queries]."""
        slope, bias = self.head_bias[head]
        if not self.call.has_slopes:
            return bias
        num_keys, num_queries = shape
        # As a row less a column: a whole tile of it would be spilled.
        query = lax.broadcasted_iota(jnp.int32, (1, num_queries), 1) + distance
        key = lax.broadcasted_iota(jnp.int32, (num_keys, 1), 0)
        return (slope * query.astype(jnp.float32) + bias) - slope * key.astype(jnp.float32)

    def mask(self, unit: _WindowUnit, relative: jax.Array, distance) -> jax.Array | None:
        """None where every pair is visible.

        Args:
          relative: index of the query less that of the key, each counted from the unit's first.
          distance: of the unit's first query to its first key.
        """
        (num_keys, num_queries), spec = relative.shape, self.call.spec
        kind, masks = Kind.NONE, []
        if unit.block == _SINKS:
            if self.sinks == "by token":
                row = lax.broadcasted_iota(jnp.int32, relative.shape, 0)
                masks = [row >= self.refs.segments[1:2, unit.queries], row < self.refs.segments[2:3, unit.queries]]
            elif spec.num_sink_tokens < num_keys:
                masks.append(lax.broadcasted_iota(jnp.int32, relative.shape, 0) < spec.num_sink_tokens)
            if self.sinks == "some":  # the others lie inside the window
                masks.append(relative >= window_of(self.call) - distance)
        else:
            kind = kind_at(bounds_of(spec), distance - (num_keys - 1), distance + num_queries - 1)
        if kind in (Kind.DIAGONAL, Kind.BOTH):
            masks.append(relative >= -distance)
        if self.by_token and unit.block != _SINKS:
            row = lax.broadcasted_iota(jnp.int32, relative.shape, 0)
            masks.append(row >= self.first_key[:, unit.queries] - (unit.queries.start - distance))
        elif kind in (Kind.EDGE, Kind.BOTH):
            masks.append(relative < window_of(self.call) - distance)
        return functools.reduce(jnp.logical_and, masks) if masks else None

    def add_to_keys(self, unit: _WindowUnit, slot, dv: jax.Array, dk: jax.Array) -> None:
        """Adds a unit's share, [own channels, keys] each, to the ring; or writes it where nothing more will come."""
        refs, group, keys, own = self.refs, self.step.group, unit.keys, self.own(unit)
        newest = unit.block == blocks_back(self.call)
        entering = newest and group == 1 and (unit.head, keys.start) not in self.started_keys
        leaving = group == 1 and self.last_units.get(keys.start) == unit
        if newest:
            self.started_keys.add((unit.head, keys.start))
        for ring, out_ref, factor, gradient in (
            (refs.dv_ring, refs.dv, 1.0, dv),
            (refs.dk_ring, refs.dk, self.call.product_factor, dk),
        ):
            total = gradient if entering else ring[slot, own, keys] + gradient
            if leaving:
                others = [ring[slot, : own.start, keys]] if unit.head else []
                write(out_ref, keys, jnp.concatenate([*others, total]), factor)
            else:
                ring[slot, own, keys] = total

    def add_to_sinks(self, unit: _WindowUnit, dv: jax.Array, dk: jax.Array) -> None:
        refs, alone, own = self.refs, self.step.writes_sinks, self.own(unit)
        for acc, gradient in ((refs.dv_sinks_acc, dv), (refs.dk_sinks_acc, dk)):
            entering = alone and unit.queries.start == 0
            if entering and unit.keys.stop < acc.shape[1]:  # documents that no query of the step sees
                acc[own, :] = jnp.zeros_like(acc[own, :])
            acc[own, unit.keys] = gradient if entering else acc[own, unit.keys] + gradient
        if alone and unit.queries.stop == self.call.tiles.q_block and unit.head + 1 == self.call.abreast:
            self.step.write_sinks()

    def add_to_queries(self, unit: _WindowUnit, gradient: jax.Array) -> None:
        """Adds [own channels, queries] to dq, strip by strip."""
        dq_acc, queries, own = self.refs.dq_acc, unit.queries, self.own(unit)
        strip = math.gcd(self.call.tiles.strip, self.call.tiles.q_block)
        for start in range(queries.start, queries.stop, strip):
            here, more = slice(start, start + strip), gradient[:, start - queries.start :][:, :strip]
            dq_acc[own, here] = dq_acc[own, here] + more if (unit.head, start) in self.started_queries else more
            self.started_queries.add((unit.head, start))


def heads_in_one_piece(call: Call, members: int) -> int:
    """Of the heads of a step, how many its usual code has one behind another: the next begins where one ends."""
    return largest_divisor(members, _MOST_UNITS // len(_units(call, blocks_back(call) + 1)))


def clear(ref: Ref, index) -> None:
    ref[index] = jnp.zeros_like(ref[index])


def _units(call: Call, present: int) -> list[_WindowUnit]:
    """The pairs of key and query tiles of a step whose last `present` blocks of keys exist, keys outermost."""
    block, window, back = call.tiles.q_block, window_of(call), blocks_back(call)
    strip, tile, width = (math.gcd(size, block) for size in (call.tiles.strip, call.tiles.tile, _UNIT))
    units = []
    for b in range(back + 1 - present, back + 1):
        for offset in range(0, block, tile):
            key = offset - (back - b) * block  # counted from the step's first query
            first = max(0, key // strip * strip)
            end = min(block, -(-(key + tile - 1 + window) // strip) * strip)
            for start in range(first, end, width):
                queries = slice(start, min(end, start + width))
                keys = slice(offset, offset + tile)
                units += [_WindowUnit(i, b, keys, queries, start - key) for i in range(call.abreast)]
    return units
