"""Window attention backward on TPUs: dq, dk and dv from one sweep over the queries.

A step has a block of queries and the blocks of keys in its window. dk and dv of those live in a ring of accumulators
in VMEM, block j in slot j % blocks; a block leaves it, and is written, once the window has passed. `blocks_back` more
steps at the end empty the ring. So every array is read and written once, and each pair of tiles takes five matmuls.

Logits are transposed, [keys, queries]: what belongs to a query (lse, delta, its first key) is a row, and the weights
are the stationary side of every product, so that 128 rows of q, dout or k stream past a matrix unit that they fill.
The gradients are transposed too, once a step. Of the scores' units, the products run two ahead of the rest.

Sink tokens outside the window are one more tile of keys. Their gradients grow in VMEM over all steps of a head and are
added to those of the first block afterwards; in packed rows each step has its own documents' sink tokens, and XLA adds
their gradients up.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.nonfinite import finite
from pallas_kernels.schedule import Kind, bounds_of, kind_at
from pallas_kernels.spec import Coordinates
from pallas_kernels.tpu.scheduled_backward import pipelined, weights_and_slopes
from pallas_kernels.tpu.tiles import (
    LANES,
    NN,
    NT,
    Call,
    Heads,
    by_head,
    dot,
    form_logits,
    head_at,
    launch,
    shape_like,
    split,
    take,
)
from pallas_kernels.tpu.window import (
    Cut,
    Ref,
    Segments,
    blocks_back,
    gather_sinks,
    packed_segments,
    scalars_of,
    sink_rows,
    window_of,
    window_steps,
)

_UNIT = 256  # queries of a unit of work, as wide as the widest matrix unit
_AHEAD = 2
_SINKS = -1


class _Unit(NamedTuple):
    block: int  # of keys, the oldest first; or _SINKS
    keys: slice  # in the block
    queries: slice
    distance: int  # of the first query to the first key; of sink tokens, in the first step


def window_backward(
    call: Call,
    q: jax.Array,  # [B, H, T, D], times call.query_factor
    k: jax.Array,  # [B, K, T, D]
    v: jax.Array,  # [B, K, T, D]
    head_bias: jax.Array,  # [2, H] f32: ALiBi slope and bias
    where: Coordinates,
    heads: Heads,
    dout: jax.Array,  # [B, H, T, D]
    statistics: jax.Array | None,  # [B, H, 8, T] f32: lse in base 2 and delta (softmax)
    previous: tuple[jax.Array, ...] = (),
) -> tuple[jax.Array, ...]:
    """As `scheduled_backward`, for the calls of `Call.window_kernel`."""
    (batch, num_heads, length, head_dim), back = q.shape, blocks_back(call)
    segments = None if where.q_seg is None else packed_segments(call, where)
    scalars = scalars_of(call, segments)
    num_blocks, group = length // call.tiles.q_block, num_heads // k.shape[1]
    grid = _Grid(call.tiles.q_block, num_blocks, group, len(scalars))
    queries = grid.of_queries(grid.block, head_dim)
    window = [grid.of_keys(before, head_dim) for before in range(back, -1, -1)]
    of_sinks = grid.of_sinks(sink_rows(call, segments is not None), head_dim, by_step=segments is not None)
    inputs = [q, dout, by_head(head_bias), *[k] * (back + 1), *[v] * (back + 1)]
    of_head = grid.spec((None, 8, LANES), lambda b, h, kv, i: (h, 0, 0))
    in_specs = [queries, queries, of_head, *window, *window]
    if statistics is not None:
        inputs.append(statistics)
        in_specs.append(grid.along_lanes(8))
    if segments is not None:
        inputs.append(segments.queries)
        last = grid.num_blocks - 1
        in_specs.append(grid.spec((None, 8, grid.block), lambda b, h, kv, i: (b, 0, jnp.minimum(i, last))))
    if call.spec.num_sink_tokens:
        inputs += [k, v] if segments is None else [gather_sinks(call, x, segments) for x in (k, v)]
        in_specs += [of_sinks, of_sinks]
    outputs = [shape_like(x.shape, x.dtype, q) for x in (q, k, v)]
    out_specs = [queries, window[0], window[0]]
    if call.has_bias:
        outputs.append(shape_like((batch, num_heads, 1, length), jnp.float32, q))
        out_specs.append(grid.along_lanes(1))
    if call.spec.num_sink_tokens:
        rows = sink_rows(call) if segments is None else num_blocks * sink_rows(call, True)
        outputs += [shape_like((*k.shape[:2], rows, head_dim), jnp.float32, q)] * 2
        out_specs += [of_sinks, of_sinks]
    results = launch(
        call,
        functools.partial(_kernel, call, segments is not None, num_blocks, group),
        "window_backward",
        grid=(batch, heads.count, num_blocks + back, group),
        scalars=scalars,
        heads=heads,
        inputs=inputs,
        in_specs=in_specs,
        outputs=outputs,
        out_specs=out_specs,
        scratch=_scratch(call, segments is not None, head_dim, q.dtype, k.dtype),
        previous=previous,
    )
    if not call.spec.num_sink_tokens:
        return results
    dq, dk, dv, *dbias, dk_sinks, dv_sinks = results
    add = _add_to_first_keys if segments is None else functools.partial(_add_to_sinks, call, segments)
    return dq, add(dk, dk_sinks), add(dv, dv_sinks), *dbias


@dataclasses.dataclass(frozen=True)
class _Grid:
    """Which block of an array is at hand where in the grid."""

    block: int
    num_blocks: int  # of queries
    group: int
    num_scalars: int

    def spec(self, block_shape, index) -> pl.BlockSpec:
        """A block located by batch, query head, KV head, and step."""

        def index_map(b, h, i, g, *scalars):
            kv = head_at(h, scalars[self.num_scalars :])
            # The last steps leave the queries' results alone.
            g = jnp.where(i < self.num_blocks, g, self.group - 1)
            return index(b, kv * self.group + g, kv, i)

        return pl.BlockSpec(block_shape, index_map)

    def of_queries(self, rows: int, columns: int) -> pl.BlockSpec:
        def index(b, h, kv, i):
            return b, h, jnp.minimum(i, self.num_blocks - 1), 0

        return self.spec((None, None, rows, columns), index)

    def along_lanes(self, rows: int) -> pl.BlockSpec:
        """Rows of numbers, one number a query."""

        def index(b, h, kv, i):
            return b, h, 0, jnp.minimum(i, self.num_blocks - 1)

        return self.spec((None, None, rows, self.block), index)

    def of_keys(self, before: int, head_dim: int) -> pl.BlockSpec:
        """The block of keys so many before that of the queries."""

        def index(b, h, kv, i):
            return b, kv, jnp.clip(i - before, 0, self.num_blocks - 1), 0

        return self.spec((None, None, self.block, head_dim), index)

    def of_sinks(self, rows: int, head_dim: int, by_step: bool) -> pl.BlockSpec:
        def index(b, h, kv, i):
            return b, kv, jnp.minimum(i, self.num_blocks - 1) if by_step else 0, 0

        return self.spec((None, None, rows, head_dim), index)


def _scratch(call: Call, packed: bool, head_dim: int, q_dtype, k_dtype) -> list:
    """In the order of `_Refs`."""
    block, blocks = call.tiles.q_block, blocks_back(call) + 1
    ring = pltpu.VMEM((blocks, head_dim, block), jnp.float32)
    scratch = [
        ring,
        ring,
        pltpu.VMEM((head_dim, block), jnp.float32),
        pltpu.VMEM((head_dim, block), q_dtype),
        pltpu.VMEM((head_dim, block), q_dtype),
        pltpu.VMEM((blocks, head_dim, block), k_dtype),
    ]
    if call.spec.num_sink_tokens:
        scratch += [pltpu.VMEM((head_dim, sink_rows(call, packed)), jnp.float32)] * 2
    return scratch


def _add_to_first_keys(gradient: jax.Array, rows: jax.Array) -> jax.Array:
    first = gradient[:, :, : rows.shape[2]] + rows
    return lax.dynamic_update_slice(gradient, first.astype(gradient.dtype), (0, 0, 0, 0))


def _add_to_sinks(call: Call, segments: Segments, gradient: jax.Array, rows: jax.Array) -> jax.Array:
    """Adds the gradients of each step's sink tokens, [B, K, steps * sink_rows, D], to those of the keys.

    A document's come from several steps. They are added up before any is rounded.
    """
    assert segments.sinks is not None
    (batch, kv_heads, _, head_dim), num_sinks = rows.shape, call.spec.num_sink_tokens
    slots, starts = segments.sinks.shape[2], segments.sinks.reshape(batch, -1)
    rows = rows.reshape(batch, kv_heads, -1, sink_rows(call, True), head_dim)[:, :, :, : slots * num_sinks]
    rows = rows.reshape(batch, kv_heads, -1, num_sinks, head_dim).swapaxes(1, 2)
    place = jnp.argmax(starts[:, :, None] == starts[:, None], axis=2)  # the first of the same document
    totals = jax.vmap(lambda at, x: jnp.zeros_like(x).at[at].add(x))(place, rows)
    is_first = place == jnp.arange(place.shape[1])
    starts = jnp.where(is_first, starts, gradient.shape[2])  # the others lie behind the array
    index = (starts[:, :, None] + jnp.arange(num_sinks)).reshape(batch, -1)
    totals = totals.swapaxes(1, 2).reshape(batch, kv_heads, -1, head_dim).astype(gradient.dtype)
    return jax.vmap(lambda x, at, more: x.at[:, at].add(more, mode="drop"))(gradient, index, totals)


class _Refs(NamedTuple):
    """What a step reads and writes; None where the call has no such thing."""

    cuts: Ref  # `Segments.cuts`
    first_sinks: Ref  # `Segments.first_sinks`
    q: Ref  # [block, D]
    dout: Ref
    head_bias: Ref  # [8, LANES]
    keys: list[Ref]  # the blocks of the window, the oldest first, each [block, D]
    values: list[Ref]
    statistics: Ref  # [8, block]
    segments: Ref  # [8, block], `Segments.queries`
    sink_keys: Ref  # [sink_rows, D]
    sink_values: Ref
    dq: Ref
    dk: Ref
    dv: Ref
    dbias: Ref
    dk_sinks: Ref
    dv_sinks: Ref
    dk_ring: Ref  # [blocks, D, block] f32
    dv_ring: Ref
    dq_acc: Ref  # [D, block] f32
    q_t: Ref  # [D, block]
    dout_t: Ref
    k_t: Ref  # [blocks, D, block]
    dk_sinks_acc: Ref  # [D, sink_rows] f32
    dv_sinks_acc: Ref


def _name_refs(call: Call, has_segments: bool, refs: tuple[Ref, ...]) -> _Refs:
    has_sinks = call.spec.num_sink_tokens > 0
    *scalars, rest = take(refs, has_segments, has_segments and has_sinks)
    of_queries, keys, values, rest = split(rest, 3, blocks_back(call) + 1, blocks_back(call) + 1)
    *optional, rest = take(rest, call.softmax, has_segments, has_sinks, has_sinks)
    gradients, rest = split(rest, 3)
    *more_gradients, rest = take(rest, call.has_bias, has_sinks, has_sinks)
    scratch, rest = split(rest, 6)
    *of_sinks, _ = take(rest, has_sinks, has_sinks)
    named: list[Any] = [
        *scalars,
        *of_queries,
        keys,
        values,
        *optional,
        *gradients,
        *more_gradients,
        *scratch,
        *of_sinks,
    ]
    return _Refs(*named)


def _kernel(
    call: Call, has_segments: bool, num_blocks: int, group: int, order: tuple[Ref, ...], *unnamed: Ref
) -> None:
    refs = _name_refs(call, has_segments, unnamed)
    index, member, back = pl.program_id(2), pl.program_id(3), blocks_back(call)
    head_bias = refs.head_bias[0:1, 0:1] * call.unit, refs.head_bias[1:2, 0:1] * call.unit
    cut, first_sink = (
        0 if scalars is None else scalars[pl.program_id(0) * num_blocks + jnp.minimum(index, num_blocks - 1)]
        for scalars in (refs.cuts, refs.first_sinks)
    )
    cut += call.zero_cut
    step = _Step(call, refs, group, index, member, head_bias, first_sink)
    if call.spec.num_sink_tokens:
        for acc in (refs.dk_sinks_acc, refs.dv_sinks_acc):
            new = member == 0 if has_segments else (index == 0) & (member == 0)
            pl.when(new)(functools.partial(_clear, acc, ...))

    # The first steps lack blocks before the sequence, and their window may cover some of the sink tokens.
    steps = window_steps(call, num_blocks)
    for i, (present, sinks) in enumerate(steps):
        here = index == i if i + 1 < len(steps) else (index >= i) & (index < num_blocks)
        if has_segments:
            _attend_packed(step, cut, here, present, sinks, is_last=i + 1 == len(steps))
        else:
            pl.when(here)(_Body(step, present, sinks).attend)

    if call.spec.num_sink_tokens:
        last = index < num_blocks if has_segments else index == num_blocks - 1
        pl.when(last & (member == group - 1))(step.write_sinks)

    # A single query head has written what leaves the ring with its last addition, except after the last queries.
    all_left = index >= (max(back, num_blocks) if group == 1 else back)
    pl.when(all_left & (member == group - 1))(lambda: step.write_keys(slice(0, call.tiles.q_block)))


def _attend_packed(step: "_Step", cut, here, present: int, sinks: str | None, is_last: bool) -> None:
    """A step of packed rows; the first ones, of which there are few, go by token whatever their documents."""
    by_token = "by token" if sinks is not None else None
    if not is_last:
        pl.when(here)(_Body(step, present, by_token, by_token=True).attend)
        return
    pl.when(here & (cut == Cut.NO))(_Body(step, present, sinks).attend)
    pl.when(here & (cut == Cut.WITHOUT_SINKS))(_Body(step, present, None, by_token=True).attend)
    if step.call.spec.num_sink_tokens:
        pl.when(here & (cut == Cut.WITH_SINKS))(_Body(step, present, "by token", by_token=True).attend)


@dataclasses.dataclass(frozen=True, eq=False)
class _Step:
    """A step of the grid: a block of queries of one of the `group` query heads that share a KV head.

    Attributes:
      head_bias: slope and bias, [1, 1] each, in the kernel's unit.
      first_sink: the index of the first sink token.
    """

    call: Call
    refs: _Refs
    group: int
    index: jax.Array
    member: jax.Array
    head_bias: tuple[jax.Array, jax.Array]
    first_sink: jax.Array | int

    def slot(self, block: int) -> jax.Array:
        """Where in the ring a block of the window is, the oldest being 0."""
        return lax.rem(self.index + 1 + block, blocks_back(self.call) + 1)

    def write_keys(self, keys: slice) -> None:
        """Writes what has been added up for some keys of the block that leaves the ring."""
        refs, slot = self.refs, self.slot
        _write(refs.dk, keys, refs.dk_ring[slot(0), :, keys], self.call.product_factor)
        _write(refs.dv, keys, refs.dv_ring[slot(0), :, keys])

    def write_sinks(self) -> None:
        refs = self.refs
        _write(refs.dk_sinks, slice(None), refs.dk_sinks_acc[...], self.call.product_factor)
        _write(refs.dv_sinks, slice(None), refs.dv_sinks_acc[...])


def _write(out_ref: Ref, rows: slice, transposed: jax.Array, factor: float = 1.0) -> None:
    out_ref[rows, :] = (transposed * factor).T.astype(out_ref.dtype)


class _Body:
    """The code of a step whose window's last `present` blocks exist; `sinks` is as `window_steps` gives it, or
    "by token". With `by_token`, `Segments.queries` mask every unit, otherwise the window alone does.

    The first write of a step need not add to what is there, and the last one of a block that leaves the ring goes to
    the result: so it notes, while it is traced, what it has written.
    """

    def __init__(self, step: _Step, present: int, sinks: str | None, *, by_token: bool = False) -> None:
        self.step, self.call, self.refs = step, step.call, step.refs
        self.present, self.sinks, self.by_token = present, sinks, by_token
        self.sink_rows = slice(0, sink_rows(step.call, sinks == "by token"))
        self.started_keys: set[int] = set()  # of the newest block
        self.started_queries: set[int] = set()
        self.window_units = _units(self.call, present)
        self.last_units: dict[int, _Unit] = {}  # of the block that leaves the ring, by first key
        if present > blocks_back(self.call):
            self.last_units = {unit.keys.start: unit for unit in self.window_units if unit.block == 0}

    def attend(self) -> None:
        call, step, refs, block = self.call, self.step, self.refs, self.call.tiles.q_block
        self.begin()
        units = self.window_units
        if self.sinks is not None:
            width = math.gcd(_UNIT, block)
            starts = range(0, block, width)
            units = [_Unit(_SINKS, self.sink_rows, slice(at, at + width), at) for at in starts] + units
        pipelined(units, self.products, self.finish, ahead=_AHEAD)
        _write(refs.dq, slice(None), refs.dq_acc[...], call.product_factor)
        if step.group == 1 and self.present > blocks_back(call):  # tiles that the window had passed already
            tile = math.gcd(call.tiles.tile, block)
            for start in range(0, block, tile):
                if start not in self.last_units:
                    step.write_keys(slice(start, start + tile))

    def begin(self) -> None:
        """Clears what is added to, and transposes what is read."""
        step, refs, back = self.step, self.refs, blocks_back(self.call)
        if step.group > 1:
            for ring in (refs.dk_ring, refs.dv_ring):
                pl.when(step.member == 0)(functools.partial(_clear, ring, step.slot(back)))
        if self.call.has_bias:
            refs.dbias[...] = jnp.zeros_like(refs.dbias)
        refs.q_t[...], refs.dout_t[...] = refs.q[...].T, refs.dout[...].T
        for b in range(back + 1 - self.present, back + 1):
            refs.k_t[b] = refs.keys[b][...].T
        if self.by_token:
            self.first_key = refs.segments[0:1, :] - step.index * self.call.tiles.q_block  # [1, block]
        if self.sinks is not None:
            self.sink_k_t = refs.sink_keys[self.sink_rows, :].T

    def products(self, unit: _Unit) -> tuple[jax.Array, jax.Array]:
        refs = self.refs
        k_ref, v_ref = refs.sink_keys, refs.sink_values
        if unit.block != _SINKS:
            k_ref, v_ref = refs.keys[unit.block], refs.values[unit.block]
        return (
            dot(k_ref[unit.keys, :], refs.q[unit.queries, :], NT),  # [keys, queries]
            dot(v_ref[unit.keys, :], refs.dout[unit.queries, :], NT),
        )

    def finish(self, unit: _Unit, s: jax.Array, dw: jax.Array) -> None:
        """Adds a unit's share to the gradients, given its products."""
        call, refs, queries = self.call, self.refs, unit.queries
        distance: Any = unit.distance
        if unit.block == _SINKS:
            distance = self.sink_distance(unit)
        relative = lax.broadcasted_iota(jnp.int32, s.shape, 1) - lax.broadcasted_iota(jnp.int32, s.shape, 0)
        s, derivative = form_logits(call, s, functools.partial(self.addend, s.shape, distance))
        mask = self.mask(unit, relative, distance)
        clean = (lambda x: x) if mask is None else finite
        lse, delta = (refs.statistics[i : i + 1, queries] if call.softmax else None for i in range(2))
        w, dlogits, ds = weights_and_slopes(call, s, derivative, dw, lse, delta, mask)
        if call.has_bias:
            refs.dbias[:, queries] += dlogits.sum(axis=0, keepdims=True)
        w, ds = w.astype(refs.q.dtype), ds.astype(refs.q.dtype)
        if unit.block == _SINKS:
            refs.dv_sinks_acc[:, unit.keys] += dot(clean(refs.dout_t[:, queries]), w, NT)
            refs.dk_sinks_acc[:, unit.keys] += dot(clean(refs.q_t[:, queries]), ds, NT)
            self.add_to_queries(queries, dot(clean(self.sink_k_t), ds, NN))
            return
        slot = self.step.slot(unit.block)
        dv = dot(clean(refs.dout_t[:, queries]), w, NT)
        dk = dot(clean(refs.q_t[:, queries]), ds, NT)
        self.add_to_keys(unit, slot, dv, dk)
        self.add_to_queries(queries, dot(clean(refs.k_t[unit.block, :, unit.keys]), ds, NN))

    def sink_distance(self, unit: _Unit) -> jax.Array:
        """From the first query of a unit to the first sink token; or as if it were so, for each query, [1, queries]."""
        step = self.step
        if self.sinks == "by token":
            column = lax.broadcasted_iota(jnp.int32, (1, unit.queries.stop - unit.queries.start), 1)
            return self.refs.segments[3:4, unit.queries] - column
        return unit.distance + step.index * self.call.tiles.q_block - step.first_sink

    def addend(self, shape: tuple[int, ...], distance) -> jax.Array:
        """What ALiBi and the bias add to a unit's logits [keys, queries]."""
        slope, bias = self.step.head_bias
        if not self.call.has_slopes:
            return bias
        num_keys, num_queries = shape
        # As a row less a column: a whole tile of it would be spilled.
        query = lax.broadcasted_iota(jnp.int32, (1, num_queries), 1) + distance
        key = lax.broadcasted_iota(jnp.int32, (num_keys, 1), 0)
        return (slope * query.astype(jnp.float32) + bias) - slope * key.astype(jnp.float32)

    def mask(self, unit: _Unit, relative: jax.Array, distance) -> jax.Array | None:
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
                masks = [
                    row >= self.refs.segments[1:2, unit.queries],
                    row < self.refs.segments[2:3, unit.queries],
                ]
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

    def add_to_keys(self, unit: _Unit, slot, dv: jax.Array, dk: jax.Array) -> None:
        """Adds a unit's share, [D, keys] each, to the ring; or writes it where nothing more will come."""
        refs, group, keys = self.refs, self.step.group, unit.keys
        newest = unit.block == blocks_back(self.call)
        entering = newest and group == 1 and keys.start not in self.started_keys
        leaving = group == 1 and self.last_units.get(keys.start) == unit
        if newest:
            self.started_keys.add(keys.start)
        for ring, out_ref, factor, gradient in (
            (refs.dv_ring, refs.dv, 1.0, dv),
            (refs.dk_ring, refs.dk, self.call.product_factor, dk),
        ):
            total = gradient if entering else ring[slot, :, keys] + gradient
            if leaving:
                _write(out_ref, keys, total, factor)
            else:
                ring[slot, :, keys] = total

    def add_to_queries(self, queries: slice, gradient: jax.Array) -> None:
        """Adds [D, queries] to dq, strip by strip."""
        dq_acc, strip = self.refs.dq_acc, math.gcd(self.call.tiles.strip, self.call.tiles.q_block)
        for start in range(queries.start, queries.stop, strip):
            here, more = slice(start, start + strip), gradient[:, start - queries.start :][:, :strip]
            dq_acc[:, here] = dq_acc[:, here] + more if start in self.started_queries else more
            self.started_queries.add(start)


def _clear(ref: Ref, index) -> None:
    ref[index] = jnp.zeros_like(ref[index])


def _units(call: Call, present: int) -> list[_Unit]:
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
                units.append(_Unit(b, slice(offset, offset + tile), queries, start - key))
    return units
