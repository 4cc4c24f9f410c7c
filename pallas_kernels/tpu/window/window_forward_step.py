"""One step of the window forward kernel: a block of queries, strip by strip.

Sigmoid weights are not normalised, so what rounding them to bf16 cuts off adds up over the window. A tile's weights are
therefore rounded less their mean as the biases alone would have it, sigmoid(ALiBi + bias), and the mean's share, mean *
sum of the visible values, is added exactly. The far edge of the window, which weighs least, goes without.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.math.nonfinite import finite, sees_non_finite
from pallas_kernels.math.schedule import Kind
from pallas_kernels.tpu.tile.pairs import join_lanes, own_lanes
from pallas_kernels.tpu.tile.rotation import rotate_tile
from pallas_kernels.tpu.tile.tiles import (
    LANES,
    MASKED,
    NN,
    NT,
    Call,
    Ref,
    beside_ones,
    dot,
    form_logits,
    over_lanes,
    own_columns,
    read_width,
    sees_nothing,
    stored,
    whole_lanes,
    window_of,
)
from pallas_kernels.tpu.window.document_codes import with_query_code
from pallas_kernels.tpu.window.geometry import WindowTile, sink_rows, window_tiles
from pallas_kernels.tpu.window.shared_columns import (
    sees_far,
    share_columns,
    shared_products,
    shared_values,
    whole_window,
)

AHEAD = 2  # strips whose products are on their way before the weights of one are taken


class _Scores(NamedTuple):
    logits: Any  # [strip, keys]; a softmax's in VMEM
    # [keys, D]; for the exact body finite where there is a mask. Read late, or it would be spilled.
    value: Callable[[], jax.Array]
    far_value: Callable[[], jax.Array] | None = None  # of a tile that serves both edges of the window
    value_sum: Callable[[], jax.Array] | None = None  # [1, D]
    seen: jax.Array | None = None  # None where every key is visible
    mean: jax.Array | None = None  # [1, 1], the tanh about which a sigmoid's is rounded


class _Strip(NamedTuple):
    rows: Any  # of the block of queries
    tiles: list[_Scores]
    top: Any  # [strip, 1], the greatest logit of each row (softmax)


class WindowForwardRefs(NamedTuple):
    """What a step reads and writes; None where the call has no such thing."""

    cuts: Ref  # `Segments.cuts`
    first_sinks: Ref  # of each step's documents, from `Segments.sinks`
    queries: Ref  # [block, D]
    head_bias: Ref  # [heads abreast, 8, LANES]
    keys: list[Ref]  # the blocks of the window, the oldest first, each [block, D]
    values: list[Ref]
    sink_keys: Ref  # [sink_rows, D]
    sink_values: Ref
    segments: Ref  # [8, block], `Segments.queries`
    # `document_codes` of the same keys, each [block, LANES], the last ones the queries', too; none where unused.
    codes: list[Ref]
    cos: Ref  # [block, D], of queries that are to be rotated
    sin: Ref
    out: Ref  # [block, D]
    lse: Ref  # [heads abreast, 1, block]
    nonfinite: Ref  # [1] int32: whether a value that is not finite has been met
    logits: Ref  # [AHEAD + 2, strip, keys] f32 (softmax)


@dataclasses.dataclass(frozen=True, eq=False)
class WindowForwardBody:
    """The code of a step for what is known of it when tracing.

    Attributes:
      present: so many of the window's blocks exist, the last ones.
      first_sink: the index of the first sink token.
      sinks: as `window_steps` gives them, or "by token".
      by_token: what each query sees (`Segments.queries`) decides; otherwise the window alone does.
      exact: leave values that are not finite out of tiles with a mask.
      head: which of the heads side by side; they share `queries`, `value_sums` and `results`.
    """

    call: Call
    refs: WindowForwardRefs
    step: jax.Array
    first_sink: jax.Array
    present: int
    sinks: str | None
    by_token: bool = False
    exact: bool = False
    head: int = 0
    queries: dict[int, jax.Array] = dataclasses.field(default_factory=dict)  # rotated, by a strip's first row
    value_sums: dict[tuple[int, int], jax.Array] = dataclasses.field(default_factory=dict)
    results: list[jax.Array] = dataclasses.field(default_factory=list)  # of a strip, [strip, D] f32 a head
    # Maxima and sums, [strip, a lane a strip].
    statistics: list[jax.Array] = dataclasses.field(default_factory=list)

    @property
    def by_code(self) -> bool:
        """Whether the matrix unit tells documents apart. The window then decides as it does without them."""
        return self.by_token and not self.exact and bool(self.refs.codes)

    @property
    def by_first_key(self) -> bool:
        """Whether every tile of the window is masked by the first key that each query sees."""
        return self.by_token and not self.by_code

    @property
    def block(self) -> int:
        return self.call.tiles.q_block

    @property
    def strip(self) -> int:
        return math.gcd(self.call.tiles.strip, self.block)

    @property
    def head_dim(self) -> int:
        return self.refs.out.shape[1]

    def attend(self) -> None:
        """All strips of the step, each of all heads that lie side by side."""
        heads = [dataclasses.replace(self, head=i, statistics=[]) for i in range(self.call.abreast)]
        strips = [(head, start) for start in range(0, self.block, self.strip) for head in heads]
        num_ahead = AHEAD if self.call.softmax else 1
        ahead = [head.score(start, i) for i, (head, start) in enumerate(strips[:num_ahead])]
        # Of rows that together meet all values of their strip: one that is not finite spoils them.
        sizes: list[jax.Array] = []
        for i, (head, start) in enumerate(strips):
            if (later := i + num_ahead) < len(strips):
                ahead.append(strips[later][0].score(strips[later][1], later))
            if i + 1 == len(strips) and start > 0:
                # What the last strip alone sees, before it is finished: afterwards the answer would be waited for.
                newest = self.refs.values[-1][start:, :].astype(jnp.float32)
                sums = own_columns(newest.reshape(-1, 8, newest.shape[1]).sum(axis=0), self.head_dim)
                self.note_nonfinite([*sizes, jnp.abs(sums)])
            write = head.write_softmax if self.call.softmax else head.write_sigmoid
            sizes.append(write(ahead.pop(0)))
        if self.strip == self.block:
            self.note_nonfinite(sizes)
        if self.call.softmax:
            for head in heads:
                head.write_lse()

    def note_nonfinite(self, sizes: list[jax.Array]) -> None:
        nonfinite = jnp.any(~(functools.reduce(jnp.add, sizes) < jnp.inf))
        self.refs.nonfinite[0] = nonfinite.astype(jnp.int32)

    @functools.cached_property
    def head_bias(self) -> tuple[jax.Array, jax.Array]:
        """Slope and bias, [1, 1] each, in the kernel's unit."""
        if self.refs.head_bias is None:
            return (jnp.zeros((1, 1), jnp.float32),) * 2
        both = self.refs.head_bias.at[self.head]
        return both[0:1, 0:1] * self.call.unit, both[1:2, 0:1] * self.call.unit

    def read_queries(self, start: int) -> jax.Array:
        """The strip of queries from `start`, of all heads that lie side by side."""
        if start not in self.queries:
            rows, refs = pl.ds(start, self.strip), self.refs
            query = own_columns(refs.queries[rows, :], self.head_dim)
            if self.call.rotated_by:
                query = rotate_tile(self.call, query, refs.cos[rows, :], refs.sin[rows, :])
            self.queries[start] = query
        return self.queries[start]

    def score(self, start: int, number: int) -> _Strip:
        """The logits of the strip of queries from `start`, the step's so-and-so-manyth."""
        rows, refs = pl.ds(start, self.strip), self.refs
        query = own_lanes(self.call, self.read_queries(start), self.head)
        coded = with_query_code(query, refs.codes[-1][rows, :]) if self.by_code else query
        tiles_seen = window_tiles(self.call, start, self.present)
        tiles = []
        if self.call.softmax and share_columns(self.call, tiles_seen):
            far, *tiles_seen, near = tiles_seen
            tiles.append(self.score_edges(coded, start, far, near))
        tiles += [self.score_window(coded, start, tile) for tile in tiles_seen]
        if self.sinks is not None:
            tiles.append(self.score_sinks(query, start))
        if not self.call.softmax:
            return _Strip(rows, tiles, None)
        top = over_lanes(jnp.maximum, [tile.logits for tile in tiles]).max(axis=1, keepdims=True)
        return _Strip(rows, stored(self.refs.logits.at[number % (AHEAD + 2)], tiles), top)

    def score_edges(self, query: jax.Array, start: int, far: WindowTile, near: WindowTile) -> _Scores:
        """The logits of the two edges of the window as one tile."""
        distance = jnp.int32(start - near.key)
        far_keys, near_keys = self.read_keys(far), self.read_keys(near)
        far_values, near_values = (
            self.refs.values[tile.block].at[tile.offset : tile.offset + tile.size, :] for tile in (far, near)
        )
        is_far = sees_far(near.size)

        def addend():
            here = self.addend(near.size, distance)
            if not self.call.has_slopes:
                return here
            return jnp.where(is_far, self.addend(far.size, distance + whole_window(self.call)), here)

        s, _ = form_logits(self.call, shared_products(query, far_keys, near_keys), addend)
        if self.by_first_key:
            # Counted from the first near key: the same for every strip.
            key = lax.broadcasted_iota(jnp.int32, s.shape, 1) - jnp.where(is_far, whole_window(self.call), 0)
            s = jnp.where(key >= self.first_key(start, near), s, MASKED)
        elif (over := whole_window(self.call) - window_of(self.call)) > 0:
            relative = self.row_less_column(near.size)
            seen = (relative >= 0) | (relative < -over)
            if window_of(self.call) < near.size:
                seen &= relative < window_of(self.call)
            s = jnp.where(seen, s, MASKED)
        values, far_values = (functools.partial(self.read_values, ref, self.exact) for ref in (near_values, far_values))
        return _Scores(s, values, far_values)

    def read_values(self, ref: Ref, only_finite: bool) -> jax.Array:
        """The values of a tile, with `sums_on_mxu` those of `beside_ones`."""
        value = own_columns(finite(ref[...]) if only_finite else ref[...], self.head_dim)
        if (missing := read_width(self.call, self.head_dim) - value.shape[1]) > 0:  # sink tokens
            value = jnp.concatenate([value, jnp.zeros((len(value), missing), value.dtype)], axis=1)
        return beside_ones(value) if self.call.sums_on_mxu else value

    def read_keys(self, tile: WindowTile) -> jax.Array:
        """[size, D or whole lanes], with codes LANES more."""
        keys = slice(tile.offset, tile.offset + tile.size)
        read = own_columns(self.refs.keys[tile.block][keys, :], self.head_dim)
        if not self.by_code:
            return read
        return jnp.concatenate([read, self.refs.codes[tile.block][keys, :]], axis=1)

    def score_window(self, query: jax.Array, start: int, tile: WindowTile) -> _Scores:
        """The logits of a tile of the window."""
        keys = slice(tile.offset, tile.offset + tile.size)
        distance = start - tile.key  # of the first row to the first column
        s = dot(query, self.read_keys(tile), NT)
        s, _ = form_logits(self.call, s, functools.partial(self.addend, tile.size, jnp.int32(distance)))
        masks = []
        if tile.kind in (Kind.DIAGONAL, Kind.BOTH):
            masks.append(self.row_less_column(tile.size) >= -distance)
        if self.by_first_key:
            key = lax.broadcasted_iota(jnp.int32, s.shape, 1)
            masks.append(key >= self.first_key(start, tile))
        far = not self.by_first_key and tile.kind in (Kind.EDGE, Kind.BOTH)
        if far:
            masks.append(self.row_less_column(tile.size) < window_of(self.call) - distance)
        value_sum = functools.partial(self.value_sum, tile.block, keys)
        middle = None if far else float(distance + (self.strip - tile.size) // 2)
        return self.masked(s, self.refs.values[tile.block].at[keys, :], value_sum, masks, middle)

    def score_sinks(self, query: jax.Array, start: int) -> _Scores:
        """The logits of the sink tokens outside the window."""
        num_sinks = self.call.spec.num_sink_tokens
        by_token = self.sinks == "by token"
        size = sink_rows(self.call, by_token)
        s = dot(query[:, : self.head_dim], self.refs.sink_keys[:size, :], NT)
        distance: Any = self.step * self.block + start - self.first_sink
        column = lax.broadcasted_iota(jnp.int32, s.shape, 1)
        masks = []
        if by_token:
            seen_from, seen_to, distance = (self.along_lanes(row, start, size) for row in (1, 2, 3))
            masks = [column >= seen_from, column < seen_to]
            distance = distance - lax.broadcasted_iota(jnp.int32, s.shape, 0)
        elif num_sinks < size:
            masks = [column < num_sinks]
        if self.sinks == "some":  # the others lie inside the window
            masks.append(self.row_less_column(size) >= window_of(self.call) - distance)
        s, _ = form_logits(self.call, s, functools.partial(self.addend, size, distance))
        return self.masked(s, self.refs.sink_values.at[:size, :], None, masks, None)

    def first_key(self, start: int, tile: WindowTile) -> jax.Array:
        """Of the window of each query of a strip, [strip, size of the tile], counted from the tile's first key."""
        if self.refs.segments is not None:
            return self.along_lanes(0, start, tile.size) - (self.step * self.block + tile.key)
        oldest = lax.broadcasted_iota(jnp.int32, (self.strip, tile.size), 0) + (start - window_of(self.call) + 1)
        return jnp.maximum(oldest, -self.step * self.block) - tile.key

    def along_lanes(self, row: int, start: int, size: int) -> jax.Array:
        """A row of `Segments.queries` for a strip, [strip, size] with equal columns.

        Made anew for each strip: the columns of a whole step would be spilled.
        """
        numbers = self.refs.segments[row : row + 1, start : start + self.strip]
        columns = jnp.broadcast_to(numbers, (LANES, self.strip)).T
        return jnp.concatenate([columns] * (whole_lanes(size) // LANES), axis=1)[:, :size]

    def masked(self, s, value_ref, value_sum, masks: list[jax.Array], middle: float | None) -> _Scores:
        """`middle` is the distance in the middle of a tile whose weights are rounded about their mean."""
        seen = functools.reduce(jnp.logical_and, masks) if masks else None

        value = functools.partial(self.read_values, value_ref, bool(masks) and self.exact)
        if self.call.softmax:
            s = s if seen is None else jnp.where(seen, s, MASKED)
            return _Scores(s, value)
        mean = None
        if middle is not None and self.refs.queries.dtype != jnp.float32:
            slope, bias = self.head_bias
            mean = jnp.tanh(slope * middle + bias if self.call.has_slopes else bias)
        return _Scores(s, value, None, value_sum, seen, mean)

    def row_less_column(self, size: int) -> jax.Array:
        """Row less column of a strip's tile, [strip, size]."""
        shape = self.strip, size
        return lax.broadcasted_iota(jnp.int32, shape, 0) - lax.broadcasted_iota(jnp.int32, shape, 1)

    def addend(self, size: int, distance: jax.Array) -> jax.Array:
        """What ALiBi and the bias add to a tile's logits."""
        slope, bias = self.head_bias
        if not self.call.has_slopes:
            return bias
        ramp = slope * self.row_less_column(size).astype(jnp.float32)
        return ramp + (slope * distance.astype(jnp.float32) + bias)

    def value_sum(self, block: int, keys: slice) -> jax.Array:
        """The sum of some values of a block, [1, D]; strips share it."""
        place = block, keys.start
        if place not in self.value_sums:
            values = self.refs.values[block][keys, :].astype(jnp.float32)
            self.value_sums[place] = values.sum(axis=0, keepdims=True)
        return self.value_sums[place]

    def write_sigmoid(self, strip: _Strip) -> jax.Array:
        """Writes a strip's result, and returns the sizes of its first rows before they are rounded."""
        doubled = functools.reduce(jnp.add, map(_sigmoid_values, strip.tiles))
        sizes = jnp.abs(doubled[:8])
        self.write(strip, 0.5 * doubled)
        return sizes

    def write(self, strip: _Strip, out: jax.Array) -> None:
        """Writes a strip's result, with the last one's those of all heads that lie side by side."""
        self.results.append(out)
        if len(self.results) == self.call.abreast:
            out = join_lanes(self.results)[:, : self.head_dim]
            self.refs.out[strip.rows, :] = out.astype(self.refs.out.dtype)
            self.results.clear()

    def write_softmax(self, strip: _Strip) -> jax.Array:
        """As `write_sigmoid`; the sizes are those before the division by the row's sum."""
        sum_on_mxu = self.call.tiles.sum_on_mxu
        acc: Any = 0.0  # Grown product by product: so the compiler adds in the matrix unit.
        partial_sums = []
        # What serves two edges comes last, as not all of it is added there.
        for tile in reversed(strip.tiles):
            weights = jnp.exp2(tile.logits[...] - strip.top)
            if not sum_on_mxu:
                partial_sums.append(weights)
            value = tile.value()
            if tile.far_value is not None:
                acc = shared_values(weights, tile.far_value(), value, with_sums=sum_on_mxu, acc=acc)
                continue
            acc += dot(weights.astype(value.dtype), value, NN)
        if sum_on_mxu:
            acc, total = acc[:, :-LANES], acc[:, -LANES:]
        else:
            total = over_lanes(jnp.add, partial_sums).sum(axis=1, keepdims=True)
        sizes = jnp.abs(acc[:8]) + jnp.abs(acc[-8:])
        if self.by_code:  # a key that is not finite shows in the sums alone where two queries share a row
            sizes += jnp.abs(total[:8]) + jnp.abs(total[-8:])
        out = acc * pltpu.reciprocal(total, full_range=False)  # in [1, keys], or NaN
        if self.by_token:
            out = jnp.where(sees_nothing(strip.top), 0, out)
        self.write(strip, out)
        self.keep_statistics(strip, total)
        return sizes

    def keep_statistics(self, strip: _Strip, total: jax.Array) -> None:
        """Puts a strip's maxima and sums into the lane of its number."""
        shape = self.strip, whole_lanes(self.block // self.strip)
        here = lax.broadcasted_iota(jnp.int32, shape, 1) == strip.rows.start // self.strip
        columns = [jnp.broadcast_to(x if x.shape == shape else x[:, :1], shape) for x in (strip.top, total)]
        kept = self.statistics or columns
        self.statistics[:] = [jnp.where(here, x, before) for x, before in zip(columns, kept, strict=True)]

    def write_lse(self) -> None:
        """Writes the lse of all strips: one logarithm and one transpose for the step."""
        top, total = self.statistics
        lse = top + jnp.log2(total)
        if self.by_token:
            lse = jnp.where(sees_nothing(top), -jnp.inf, lse)
        lse = lse.T  # [strips, strip]
        for i in range(self.block // self.strip):
            self.refs.lse[self.head, :, i * self.strip : (i + 1) * self.strip] = lse[i : i + 1]


def mark_rows_nan(call: Call, refs: WindowForwardRefs, step: jax.Array) -> None:
    """Writes NaN where a query of the step sees a value that is not finite. Hardly ever run, so short and slow."""
    block, window, num_sinks = call.tiles.q_block, window_of(call), call.spec.num_sink_tokens
    strip = math.gcd(call.tiles.strip, block)

    @pl.loop(0, block // strip)
    def _(i):
        rows = pl.ds(pl.multiple_of(i * strip, strip), strip)
        query = step * block + i * strip + lax.broadcasted_iota(jnp.int32, (strip, 1), 0)
        oldest, sinks_from = jnp.maximum(query - window + 1, 0), 0
        sinks_to = jnp.minimum(query + 1, num_sinks)
        if refs.segments is not None:
            columns = refs.segments[:, rows].T
            oldest, sinks_from, sinks_to = (columns[:, i : i + 1] for i in range(3))
        hit = jnp.zeros((strip, refs.out.shape[1]), bool)
        end = (step + 1) * block
        for values in reversed(refs.values):
            length = values.shape[0]
            end -= length
            key = end + lax.broadcasted_iota(jnp.int32, (strip, length), 1)
            hit |= sees_non_finite((key <= query) & (key >= oldest), values[...])[:, : hit.shape[1]]
        if refs.sink_values is not None:
            row = lax.broadcasted_iota(jnp.int32, (strip, refs.sink_values.shape[0]), 1)
            hit |= sees_non_finite((row >= sinks_from) & (row < sinks_to), refs.sink_values[...])
        refs.out[rows, :] = jnp.where(hit, jnp.nan, refs.out[rows, :])


def _sigmoid_values(tile: _Scores) -> jax.Array:
    """2 * weights @ values of one tile: a sigmoid is half of 1 + tanh, and rows are fewer than weights."""
    value, tanh = tile.value(), jnp.tanh(tile.logits)
    if tile.mean is None:
        weights = tanh + 1
        if tile.seen is not None:
            weights = jnp.where(tile.seen, weights, 0)
        return dot(weights.astype(value.dtype), value, NN)
    weights = tanh - tile.mean
    if tile.seen is None:
        assert tile.value_sum is not None  # the window's tiles alone have a mean
        total = tile.value_sum()
    else:
        weights = jnp.where(tile.seen, weights, 0)
        total = dot(jnp.where(tile.seen, 1.0, 0.0).astype(value.dtype), value, NN)
    return dot(weights.astype(value.dtype), value, NN) + (1 + tile.mean) * total
