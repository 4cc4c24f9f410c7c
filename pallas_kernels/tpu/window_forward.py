"""Window attention forward on TPUs: the whole window of a block of queries in one grid step.

Its strips of query rows each see every key they need at once: the exact maximum comes first, then one exp2 and one
matmul with V; nothing is rescaled and nothing carried from step to step. The order of the program is the software
pipeline: the products q.k of strip t + 1 stand before the exponentials of strip t, so that the matrix unit works while
the vector unit does.

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

from pallas_kernels.nonfinite import finite, sees_non_finite
from pallas_kernels.schedule import Kind
from pallas_kernels.spec import Coordinates
from pallas_kernels.tpu.tiles import (
    LANES,
    MASKED,
    NN,
    NT,
    Call,
    Heads,
    by_head,
    dot,
    form_logits,
    head_at,
    launch,
    over_lanes,
    shape_like,
    write_softmax,
)
from pallas_kernels.tpu.window import (
    Ref,
    blocks_back,
    is_crossed,
    packed_segments,
    sink_rows,
    window_of,
    window_steps,
    window_tiles,
)


class _Scores(NamedTuple):
    logits: jax.Array  # [strip, keys]
    # [keys, D]; for the exact body finite where there is a mask. Read late, or it would be spilled.
    value: Callable[[], jax.Array]
    total: Callable[[], jax.Array]  # of the values, [1, D]
    seen: jax.Array | None  # None where every key is visible
    mean: jax.Array | None  # [1, 1], the tanh about which a sigmoid's is rounded


def window_forward(
    call: Call,
    q: jax.Array,  # [B, H, T, D], times call.query_factor
    k: jax.Array,  # [B, K, T, D]
    v: jax.Array,  # [B, K, T, D]
    head_bias: jax.Array,  # [2, H] f32: ALiBi slope and bias
    where: Coordinates,
    heads: Heads,
    previous: tuple[jax.Array, ...] = (),
) -> tuple[jax.Array, ...]:
    """As `scheduled_forward`, for the calls of `Call.window_kernel`."""
    if not call.softmax:  # No statistics of a row are shared by its strip, and less is spilled.
        tiles = dataclasses.replace(call.tiles, strip=min(call.tiles.strip, LANES))
        call = dataclasses.replace(call, tiles=tiles)
    batch, num_heads, length, head_dim = q.shape
    group = num_heads // k.shape[1]
    block = call.tiles.q_block
    back = blocks_back(call)
    heads = heads.queries(group)
    segments = None if where.q_seg is None else packed_segments(call, where)
    scalars = () if segments is None else (segments.crossed,)

    def spec(block_shape, index):
        """A block located by batch, query head and step."""
        return pl.BlockSpec(
            block_shape, lambda b, h, i, *scalar: index(b, head_at(h, scalar[len(scalars) :]), i)
        )

    def keys(before):
        return spec(
            (None, None, block, head_dim), lambda b, h, i: (b, h // group, jnp.maximum(i - before, 0), 0)
        )

    queries = spec((None, None, block, head_dim), lambda b, h, i: (b, h, i, 0))
    window = [keys(before) for before in range(back, -1, -1)]
    inputs = [q, by_head(head_bias), *[k] * (back + 1), *[v] * (back + 1)]
    in_specs = [queries, spec((None, 8, LANES), lambda b, h, i: (h, 0, 0)), *window, *window]
    if call.spec.num_sink_tokens:
        sinks = spec((None, None, sink_rows(call), head_dim), lambda b, h, i: (b, h // group, 0, 0))
        inputs += [k, v]
        in_specs += [sinks, sinks]
    if segments is not None:
        inputs.append(segments.first_keys)
        in_specs.append(spec((None, 8, block), lambda b, h, i: (b, 0, i)))
    outputs, out_specs = [shape_like(q.shape, call.result_dtype(q), q)], [queries]
    if call.softmax:
        outputs.append(shape_like((batch, num_heads, 1, length), jnp.float32, q))
        out_specs.append(spec((None, None, 1, block), lambda b, h, i: (b, h, 0, i)))
    return launch(
        call,
        functools.partial(_window_kernel, call, segments is not None, length // block),
        "window_forward",
        grid=(batch, heads.count, length // block),
        scalars=scalars,
        heads=heads,
        inputs=inputs,
        in_specs=in_specs,
        outputs=outputs,
        out_specs=out_specs,
        scratch=[pltpu.SMEM((1,), jnp.int32)],
        previous=previous,
    )


def _window_kernel(
    call: Call, has_segments: bool, num_steps: int, order: tuple[Ref, ...], *refs: Ref
) -> None:
    rest = list(refs)
    back = blocks_back(call)
    crossed, rest = (rest[0], rest[1:]) if has_segments else (None, rest)
    q_ref, bias_ref, *rest = rest
    k_refs, v_refs, rest = rest[: back + 1], rest[back + 1 : 2 * back + 2], rest[2 * back + 2 :]
    num_sinks = call.spec.num_sink_tokens
    if num_sinks:
        sink_k_ref, sink_v_ref, *rest = rest
    if has_segments:
        first_key_ref, *rest = rest
    out_ref, lse_ref, spoilt_ref = rest if call.softmax else (rest[0], None, rest[1])

    step = pl.program_id(2)
    slope, bias = bias_ref[0:1, 0:1] * call.unit, bias_ref[1:2, 0:1] * call.unit
    block, window = call.tiles.q_block, window_of(call)
    strip = math.gcd(call.tiles.strip, block)

    def attend(present: int, sinks: str | None, packed: bool = False, exact: bool = False):
        """All strips of the step, whose window's last `present` blocks exist.

        Args:
          packed: mask every tile by each query's first key.
          exact: leave values that are not finite out of tiles with a mask.
        """
        if packed and has_segments:  # [block, 1], counted from the step's first query
            first_key = first_key_ref[...].T[:, :1] - step * block
        elif packed:
            first_key = lax.broadcasted_iota(jnp.int32, (block, 1), 0) - (window - 1)
            first_key = jnp.maximum(first_key, -step * block)

        def relative(size):
            """Row minus column, of a strip's tile."""
            return lax.broadcasted_iota(jnp.int32, (strip, size), 0) - lax.broadcasted_iota(
                jnp.int32, (strip, size), 1
            )

        def addend(size, distance):
            if not call.has_slopes:
                return bias
            return slope * relative(size).astype(jnp.float32) + (slope * distance.astype(jnp.float32) + bias)

        @functools.cache  # strips share tiles
        def total(block, keys):
            return v_refs[block][keys, :].astype(jnp.float32).sum(axis=0, keepdims=True)

        sizes = []  # of what the first rows add up to: a value that is not finite spoils every row of its strip

        def scores(s, value_ref, total, masks, middle):
            """`middle` is the distance in the middle of a tile whose weights are rounded about their mean."""
            seen = functools.reduce(jnp.logical_and, masks) if masks else None

            def value():
                return finite(value_ref[...]) if masks and exact else value_ref[...]

            if call.softmax:
                return _Scores(s if seen is None else jnp.where(seen, s, MASKED), value, total, None, None)
            mean = None
            if middle is not None and q_ref.dtype != jnp.float32:
                mean = jnp.tanh(slope * middle + bias if call.has_slopes else bias)
            return _Scores(s, value, total, seen, mean)

        def logits(start):
            rows = pl.ds(start, strip)
            query = q_ref[rows, :]
            tiles = []
            for tile in window_tiles(call, start, present):
                keys = slice(tile.offset, tile.offset + tile.size)
                distance = start - tile.key  # of the first row to the first column
                s = dot(query, k_refs[tile.block][keys, :], NT)
                s, _ = form_logits(call, s, functools.partial(addend, tile.size, jnp.int32(distance)))
                seen = []
                far = not packed and tile.kind in (Kind.EDGE, Kind.BOTH)
                if tile.kind in (Kind.DIAGONAL, Kind.BOTH):
                    seen.append(relative(tile.size) >= -distance)
                if packed:
                    key = lax.broadcasted_iota(jnp.int32, s.shape, 1) + tile.key
                    seen.append(key >= first_key[start : start + strip])
                if far:
                    seen.append(relative(tile.size) < window - distance)
                middle = float(distance + (strip - tile.size) // 2)
                of_tile = functools.partial(total, tile.block, keys)
                value = v_refs[tile.block].at[keys, :]
                tiles.append(scores(s, value, of_tile, seen, None if far else middle))
            if sinks is not None:
                size = sink_k_ref.shape[0]
                s = dot(query, sink_k_ref[...], NT)
                distance = step * block + start
                s, _ = form_logits(call, s, functools.partial(addend, size, distance))
                column = lax.broadcasted_iota(jnp.int32, s.shape, 1)
                seen = [column < num_sinks] if num_sinks < size else []
                if sinks == "some":  # the others lie inside the window
                    seen.append(relative(size) >= window - distance)
                tiles.append(scores(s, sink_v_ref, None, seen, None))
            top = (
                over_lanes(jnp.maximum, [tile.logits for tile in tiles]).max(axis=1, keepdims=True)
                if call.softmax
                else None
            )
            return rows, tiles, top

        def finish(rows, tiles, top):
            if not call.softmax:
                doubled = functools.reduce(jnp.add, map(_sigmoid_values, tiles))
                sizes.append(jnp.abs(doubled[:8]))
                out_ref[rows, :] = (0.5 * doubled).astype(out_ref.dtype)
                return
            acc: Any = 0.0  # Grown product by product: so the compiler adds in the matrix unit.
            partial_sums = []
            for tile in tiles:
                value = tile.value()
                weights = jnp.exp2(tile.logits - top)
                if call.tiles.sum_on_mxu:
                    value = jnp.concatenate([value, jnp.ones_like(value)], axis=1)
                else:
                    partial_sums.append(weights)
                acc += dot(weights.astype(value.dtype), value, NN)
            sizes.append(jnp.abs(acc[:8, : q_ref.shape[1]]))
            if call.tiles.sum_on_mxu:
                head_dim = acc.shape[1] // 2
                write_softmax(out_ref, lse_ref, rows, acc[:, :head_dim], top, acc[:, head_dim:], packed)
            else:
                total = over_lanes(jnp.add, partial_sums).sum(axis=1, keepdims=True)
                write_softmax(out_ref, lse_ref, rows, acc, top, total, packed)

        ahead = logits(0)
        for start in range(0, block, strip):
            current = ahead
            if start + strip < block:
                ahead = logits(start + strip)
            finish(*current)
        if len(sizes) > 1:  # the last strip alone sees these; its result would be waited for
            newest = v_refs[-1][block - strip :, :]
            sizes[-1] = jnp.abs(dot(jnp.ones((8, strip), newest.dtype), newest, NN))
        spoilt_ref[0] = jnp.any(~(functools.reduce(jnp.add, sizes) < jnp.inf)).astype(jnp.int32)

    # The first steps lack blocks before the sequence, and their window may cover some of the sink tokens.
    steps = window_steps(call, num_steps)
    for i, (present, sinks) in enumerate(steps):
        here = step == i if i + 1 < len(steps) else step >= i
        whole = True if crossed is None else ~is_crossed(crossed, pl.program_id(0), step, num_steps)
        pl.when(here & whole)(functools.partial(attend, present, sinks))
    if crossed is not None:  # Keys before the sequence come before any query's first key.
        here = is_crossed(crossed, pl.program_id(0), step, num_steps)
        pl.when(here)(functools.partial(attend, steps[-1][0], None, packed=True))

    # A value that is not finite has spoilt queries that do not see it: all of the step once more, in one slow body.
    @pl.when(spoilt_ref[0] != 0)
    def _():
        attend(steps[-1][0], "some" if num_sinks else None, packed=True, exact=True)
        sink_ref = sink_v_ref if num_sinks else None
        first_key = first_key_ref if has_segments else None
        _spoil_rows(call, step, out_ref, v_refs, sink_ref, first_key)


def _spoil_rows(call: Call, step, out_ref: Ref, v_refs: list[Ref], sink_v_ref, first_key_ref) -> None:
    """Writes NaN where a query of the step sees a value that is not finite. Hardly ever run, so short and slow."""
    block, window, num_sinks = call.tiles.q_block, window_of(call), call.spec.num_sink_tokens
    strip = math.gcd(call.tiles.strip, block)

    @pl.loop(0, block // strip)
    def _(i):
        rows = pl.ds(pl.multiple_of(i * strip, strip), strip)
        query = step * block + i * strip + lax.broadcasted_iota(jnp.int32, (strip, 1), 0)
        oldest = jnp.maximum(query - window + 1, 0)
        if first_key_ref is not None:
            oldest = first_key_ref[:, rows].T[:, :1]
        hit = jnp.zeros((strip, out_ref.shape[1]), bool)
        for back, v_ref in enumerate(reversed(v_refs)):
            key = (step - back) * block + lax.broadcasted_iota(jnp.int32, (strip, block), 1)
            hit |= sees_non_finite((key <= query) & (key >= oldest), v_ref[...])
        if sink_v_ref is not None:
            key = lax.broadcasted_iota(jnp.int32, (strip, sink_v_ref.shape[0]), 1)
            hit |= sees_non_finite((key <= query) & (key < num_sinks), sink_v_ref[...])
        out_ref[rows, :] = jnp.where(hit, jnp.nan, out_ref[rows, :])


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
        total = tile.total()
    else:
        weights = jnp.where(tile.seen, weights, 0)
        total = dot(jnp.where(tile.seen, 1.0, 0.0).astype(value.dtype), value, NN)
    return dot(weights.astype(value.dtype), value, NN) + (1 + tile.mean) * total
