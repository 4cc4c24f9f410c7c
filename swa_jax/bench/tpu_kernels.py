"""What the static measurement of the TPU kernels runs: functions that return `(fn, args)`, to be compiled for a chip.

They run the very `pallas_call`s that `attention(..., implementation="tpu")` dispatches to, with its choice of tiles, on
head-major arrays, so that a figure is a kernel's and not that of the transposes around it. `routed_backward` and
`decode` include what XLA does around the kernels (sorting, gathering), as that is part of their price. Keyword
arguments: H query heads, K KV heads, T tokens, D head_dim, window, num_sink_tokens, dtype, and fields of `Tiles` to try
others.

A kernel that reads nothing from scalar memory is simulated whole, and so is one whose scalar memory holds zeros
(`scalars_are_zero`). A simulator that knows no contents of scalar memory cannot time the others: flags read as zero,
and bounds of the grid are unknown. `swa-jax bench cycles` finds out which ones those are. For them it takes the bundles
(instruction words, one a cycle) of the compiled blocks of code, times how often each runs, which `executions` counts;
so it does where the simulator aborts. That leaves out hazards and waits for memory: about 3 to 9 % of the window
kernels.
"""

import dataclasses
import inspect
import itertools
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import api
from pallas_kernels.blocks import Tiles, device_kind, preferring
from pallas_kernels.math.ring import RowOrder
from pallas_kernels.math.rotary import Rotation
from pallas_kernels.math.schedule import bounds_of
from pallas_kernels.math.spec import ArgumentError, AttentionSpec, Coordinates, coordinates
from pallas_kernels.tpu.calls import passes
from pallas_kernels.tpu.calls.launches import GATHERED_BLOCK as ROWS_TILE
from pallas_kernels.tpu.calls.launches import (
    Given,
    Launch,
    Launches,
    attention_call,
    attention_launches,
    make_call,
    routed_call,
    routed_launches,
)
from pallas_kernels.tpu.calls.routed import both_branches
from pallas_kernels.tpu.calls.rows import add_rows, choose, gather_rows, heads_unrolled
from pallas_kernels.tpu.decode.decode import choose_steps
from pallas_kernels.tpu.schedule.documents import documents_of, read_bounds
from pallas_kernels.tpu.schedule.pair_schedule import has_default_positions
from pallas_kernels.tpu.schedule.row_list import list_rows
from pallas_kernels.tpu.schedule.side_by_side import heads_side_by_side
from pallas_kernels.tpu.tile.pairs import pairs_pay
from pallas_kernels.tpu.tile.rotation import left_to_kernels
from pallas_kernels.tpu.tile.tiles import Call, OutGradients, TpuOperands
from pallas_kernels.tpu.window.geometry import blocks_back, heads_a_step, window_steps
from pallas_kernels.tpu.window.window_backward_step import heads_in_one_piece
from swa_jax.bench.bench_rows import of_first_device, routed_rows, segment_ids


def window_forward(packed=False, documents=None, cut=0, full_from=None, rotated=False, **shape):
    """Window attention with lse; `packed` adds segment ids, and `full_from` rows that see past the window: of one
    document, or of each of `documents` of so many tokens, those from that position on.

    The simulator reads zeros for the edges of documents: one document a row. With `cut` 1 they stand for edges in every
    step behind the first ones, of documents no longer than a window, and with 2 of longer ones, whose sink tokens lie
    outside the window. An average over documents is one of the three figures. With `rotated`, the kernel rotates the
    queries (RoPE).
    """
    options = {"packed": packed, "documents": documents, "cut": cut, "full_from": full_from, "rotated": rotated}
    return _bench({"window": 1024} | shape, **options)


def window_backward(packed=False, documents=None, cut=0, full_from=None, rotated=False, **shape):
    """dq, dk and dv of window attention; the options are those of `window_forward`."""
    options = {"packed": packed, "documents": documents, "cut": cut, "full_from": full_from, "rotated": rotated}
    return _bench({"window": 1024} | shape, **options, backward=True)


def full_forward(packed=False, documents=None, context=None, rotated=False, **shape):
    """Full causal attention with lse; a window is left unread, so that every function takes the same arguments.

    `packed` adds segment ids, of one document a row, and `documents` those of documents of so many tokens. With
    `context`, the queries are those of the first of so many devices that share a row in zig-zag order. `rotated` as in
    `window_forward`.
    """
    options = {"packed": packed, "documents": documents, "context": context, "rotated": rotated}
    return _bench(shape | {"window": None}, **options)


def full_backward(packed=False, documents=None, context=None, rotated=False, **shape):
    """dq, dk and dv of full causal attention; a window is left unread. The options are those of `full_forward`."""
    options = {"packed": packed, "documents": documents, "context": context, "rotated": rotated}
    return _bench(shape | {"window": None}, **options, backward=True)


def sigmoid_forward(packed=False, rotated=False, **shape):
    """Window attention with sigmoid and ALiBi; the options are those of `window_forward`."""
    return _bench({"window": 1024} | shape, activation="sigmoid", packed=packed, rotated=rotated)


def sigmoid_backward(packed=False, rotated=False, **shape):
    """dq, dk and dv of window attention with sigmoid and ALiBi; the options are those of `window_forward`."""
    return _bench({"window": 1024} | shape, activation="sigmoid", packed=packed, rotated=rotated, backward=True)


def head_hybrid_forward(rho=0.75, **shape):
    """Window attention in the share `rho` of the KV heads, full attention in the others: two launches."""
    return _bench({"window": 1024, "H": 8, "K": 8} | shape, rho=rho)


def routed_forward(packed=False, documents=None, context=None, rotated=False, **shape):
    """SwiAttn's two branches with their lse; the gate chooses between them afterwards, so its ratio does not matter.

    `context` and `rotated` as in `full_forward`.
    """
    options = {"packed": packed, "documents": documents, "context": context, "rotated": rotated}
    return _bench({"window": 1024, "T": 8192} | shape, **options, branches=True)


def routed_backward(ratio=0.13, **shape):
    """Forward and backward of SwiAttn's attention, the given share of the tokens being routed to full attention."""
    return _routed(ratio, {"window": 1024, "T": 8192} | shape)


def rows_together(ratio=0.13, rotated=False, **shape):
    """Gathers queries and cotangents of the routed share of the rows, for the pass over the keys outside the window.

    Keys and a window are left unread. `rotated` as in `window_forward`.
    """

    def kernel(call, rows, q, dout, where):
        return gather_rows(call, rows, q, (dout,), ROWS_TILE, where)

    return _rows(ratio, rotated, shape, kernel)


def rows_added(ratio=0.13, rotated=False, **shape):
    """Adds the gradients of the routed rows to those of all rows; the options are those of `rows_together`."""

    def kernel(call, rows, dq, more, where):
        return add_rows(call, rows, dq, more, ROWS_TILE, where)

    return _rows(ratio, rotated, shape, kernel)


def _rows(ratio, rotated, shape, kernel):
    H, _, T, D, dtype, spec, tiles = _read(ROWS | shape)
    array = jax.ShapeDtypeStruct((1, H, T, D), dtype)

    def function(x, y, *tables):
        where = coordinates(T, T)
        call = _call(spec, where, Given(D, dtype, device_kind()), tiles, branches=True)
        rows = choose(jnp.asarray(routed_rows(T, ratio)[None]), ROWS_TILE)
        call, where = _rotating(call, where, tables)
        return kernel(call, rows, x, y, where)

    return function, (array, array, *_tables(rotated, T, D))


def decode(H=8, K=8, T=8192, D=128, window=1024, num_sink_tokens=0, dtype="bfloat16", B=1):
    """One token a sequence over caches of T entries, all of them filled: that is what `executions` counts.

    Compute and grid steps; the time that reading the caches takes is not in it, and is mostly the longer one.
    """
    spec = AttentionSpec(window, num_sink_tokens)
    q = jax.ShapeDtypeStruct((B, 1, H, D), jnp.dtype(dtype))
    cache = jax.ShapeDtypeStruct((B, T, K, D), jnp.dtype(dtype))

    def function(q, k, v, lengths):
        return api.decode_attention(q, k, v, spec, lengths=lengths, implementation="tpu")

    return function, (q, cache, cache, jax.ShapeDtypeStruct((B,), jnp.int32))


FUNCTIONS: dict[str, Callable] = {
    function.__name__: function
    for function in (
        window_forward,
        window_backward,
        full_forward,
        full_backward,
        sigmoid_forward,
        sigmoid_backward,
        routed_forward,
        routed_backward,
        head_hybrid_forward,
        rows_together,
        rows_added,
        decode,
    )
}
ROWS = {"H": 16, "T": 8192, "window": 1024}
_SHAPE = ("H", "K", "T", "D", "window", "num_sink_tokens", "dtype")


def settings(name: str) -> tuple[str, ...]:
    """The keyword arguments that a function of FUNCTIONS takes."""
    own = inspect.signature(FUNCTIONS[name]).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in own.values()):
        return tuple(own)
    tiles = () if name == "routed_backward" else tuple(field.name for field in dataclasses.fields(Tiles))
    return (*_SHAPE, *(n for n, p in own.items() if p.kind is not p.VAR_KEYWORD), *tiles)


class Executions(NamedTuple):
    """How often the blocks of code of one kernel run."""

    bodies: tuple[int, ...]  # those with matmuls, the longest first
    rows: int  # other vector code, at the first and the last visit of a row of blocks
    heads: int  # or what else is the size of the grid's dimension that is data; other code runs once a step
    replays: bool = False  # every second body does again what the one before it did, which happens in no usual run


def scalars_are_zero(name: str, packed=False, documents=None, context=None, **shape) -> bool:
    """Whether scalar memory holds zeros only, as simulators read it: that is how a row of one document is told."""
    one_document = bool(packed) and documents is None and context is None
    return one_document and name.startswith(("full", "routed_forward"))


def executions(
    name: str, kind: str, packed=False, documents=None, full_from=None, context=None, **shape
) -> dict[str, Executions]:
    """Counts for those kernels of `FUNCTIONS[name](**shape)` whose schedule the shape decides, by the kernel's name.

    Args:
      kind: the kind of device, whose tiles they have.
    """
    backward, hybrid = name.endswith("_backward"), name == "head_hybrid_forward"
    shape = {option: value for option, value in shape.items() if option not in ("cut", "rotated")}  # no other schedule
    if name.startswith("routed"):
        return {}  # the gates decide
    if name == "decode":
        return _decoding(kind, **shape)
    if name.startswith("rows"):
        return {name: _of_rows(arrays=2 if name == "rows_together" else 1, **shape)}
    defaults, rho = {"H": 8, "K": 8} if hybrid else {}, shape.pop("rho", 0.75)
    window = {"window": None} if name.startswith("full") else {}
    H, K, T, D, dtype, spec, tiles = _read({"window": 1024} | defaults | shape | window)
    abreast = _abreast(H, K, D, spec, full_from is None and not hybrid and context is None)
    H, K, D = H // abreast, K // abreast if H == K else K, D * abreast
    ids = jnp.asarray(segment_ids(T, documents)) if packed or documents is not None else None
    if ids is not None and context is not None:
        return {}  # the bodies for the edges of documents cannot be told from the others by their length
    positions = None if full_from is None else jnp.full((1, 1 if ids is None else int(ids.max())), full_from)
    where = coordinates(T, T, q_segment_ids=ids, full_from=positions)
    if context is not None:
        where = of_first_device(where, context)
    given = Given(D, dtype, kind, hybrid)
    call = _call(spec, where, given, tiles, context=context, abreast=abreast)
    launches = _launches(call, where, given, tiles)
    windowed = round(rho * K) * H // K if hybrid else H
    served = {"all": H, "windowed": windowed, "full": H - windowed}
    counts = dict[str, Executions]()
    for launch in launches.backward if backward else launches.forward:
        heads = served[launch.heads]
        if launch.listed:
            counts |= _of_full_rows(launch, where, heads, K, backward)
        elif launch.kernel.startswith("window") and not (backward and spec.num_sink_tokens):
            counts |= _of_window(launch, heads, H // K, T, D, dtype)
        elif launch.kernel.startswith("scheduled") and not launch.full_rows:
            counts |= _scheduled(launch.call, where, heads, backward)
    return counts


def _of_window(launch: Launch, heads: int, group: int, T: int, D: int, dtype) -> dict[str, Executions]:
    call, backward = launch.call, launch.kernel == "window_backward"
    num_steps, back = -(-T // call.tiles.q_block), blocks_back(call)
    edges = min(back, num_steps - 1) if backward else len(window_steps(call, num_steps)) - 1
    bodies = (heads * (num_steps - edges), *[heads] * edges)
    if not backward:
        return {launch.kernel: Executions(bodies, 0, heads)}
    # More steps at the end write what the ring still holds.
    bodies = (bodies[0] // heads_in_one_piece(call, heads_a_step(call, group, D, dtype)), *bodies[1:])
    kv_heads = heads // group
    rows = kv_heads * (back if group == 1 else num_steps)  # of a group, every step writes keys
    return {launch.kernel: Executions(bodies, rows, kv_heads)}


def _of_full_rows(
    launch: Launch, where: Coordinates, heads: int, kv_heads: int, backward: bool
) -> dict[str, Executions]:
    rows = list_rows(launch.call, passes.of_full_rows(where))
    first, stop, whole, whole_stop = np.asarray(rows.bounds).reshape(-1, 4).sum(axis=0).tolist()
    plain = whole_stop - whole
    heads //= 1 if backward else heads_side_by_side(launch.call, heads // kv_heads)
    bodies = heads * (stop - first - plain), heads * plain
    steps = int(rows.most[0])
    written = where.kv_order.shape[1] // launch.call.tiles.kv_block if backward else 0  # blocks of keys
    # One figure for the code of rows and that which writes keys' gradients, which is most of it: rather too much.
    return {launch.kernel: Executions(bodies, max(heads * steps, kv_heads * written), steps + written)}


def _of_rows(arrays: int, ratio=0.13, **shape) -> Executions:
    H, _, T, D, *_ = _read(ROWS | shape)
    visits = int(choose(jnp.asarray(routed_rows(T, ratio)[None]), ROWS_TILE).totals[0])
    # The bodies for numbers that are not finite do not run.
    bodies = (visits * (H // heads_unrolled(H, D)),) * arrays
    return Executions(bodies, visits, visits)


def _decoding(
    kind: str, H=8, K=8, T=8192, D=128, window=1024, num_sink_tokens=0, dtype="bfloat16", B=1
) -> dict[str, Executions]:
    spec = AttentionSpec(window, num_sink_tokens)
    entry_bytes = 2 * D * jnp.dtype(dtype).itemsize
    heads, block = choose_steps(spec, T, K, entry_bytes, kind, scattered=False)
    oldest = 0 if window is None else max(T - window, 0)
    seen = {*range(-(-num_sink_tokens // block)), *range(oldest // block, -(-T // block))}
    groups, visits = K // heads, B * len(seen)
    return {"decode": Executions(bodies=(groups * visits,), rows=groups * B, heads=visits)}


def _scheduled(call: Call, where: Coordinates, heads: int, backward: bool) -> dict[str, Executions]:
    if not has_default_positions(call, where):
        return {}  # a list made at run time decides
    block, num_blocks = call.tiles.q_block, where.kv_order.shape[1] // call.tiles.q_block
    rows = (np.asarray(where.q_order)[0, ::block] // block).tolist()  # which blocks of the row they are
    runs: Counter[int] = Counter()  # of the bodies, by the pairs of tokens that they compute, mask included
    packed = None if where.q_segment_ids is None else documents_of(where, block)

    def bounds(row: int, small: int | None = None) -> tuple[int, int]:
        if packed is None:
            return 0, 0
        first, clean = read_bounds(np.asarray(packed.table), 0, row, num_blocks, packed.per_row, small)
        return int(first), int(clean)

    def run(size: int, distance: int, crossed: bool = False, count: int = 1) -> None:
        if pairs := _pairs(call, size, distance):
            runs[int(pairs * (1.3 if crossed else 1))] += count * heads  # a guess, which tells bodies apart

    for distance in range(num_blocks):  # a body that never runs is there all the same
        run(block, distance, count=0)
    if packed is not None:
        for distance in range(num_blocks * packed.per_row):
            size = block // packed.per_row
            whole = _pairs(call, size, distance) == size**2
            for crossed in (False, True) if whole else (True,):
                run(size, distance, crossed, count=0)
    for row, column in itertools.product(rows, range(num_blocks)):
        first, clean = bounds(row)
        if column >= clean:
            run(block, row - column)
        elif packed is not None and first <= column <= row:
            size, count = block // packed.per_row, packed.per_row
            for i, key in itertools.product(range(count), range(column * count, (column + 1) * count)):
                first, clean = bounds(row, i)
                distance = row * count + i - key
                if key >= first:
                    run(size, distance, crossed=key < clean or _pairs(call, size, distance) < size**2)
    bodies = tuple(runs[pairs] for pairs in sorted(runs, reverse=True))
    kernel = "scheduled_backward" if backward else "scheduled_forward"
    return {kernel: Executions(bodies, heads * len(rows), heads)}


def _pairs(call: Call, size: int, distance: int) -> int:
    """The pairs of tokens that are seen of two blocks so many blocks apart, documents aside."""
    least, greatest, _ = bounds_of(call.spec)
    diagonals = np.arange(1 - size, size)
    back = distance * size + diagonals  # from query to key, for each diagonal of the pair
    return int((((back >= least) & (back <= greatest)) * (size - abs(diagonals))).sum())


def _abreast(H: int, K: int, D: int, spec: AttentionSpec, alone: bool) -> int:
    """The heads side by side in the arrays of a call, which window kernels serve `alone` or not."""
    return 2 if alone and pairs_pay(H, K, D, spec.window) else 1


def _call(
    spec: AttentionSpec,
    where,
    given: Given,
    tiles: dict,
    branches=False,
    has_slopes=False,
    context: int | None = None,
    abreast: int = 1,
) -> Call:
    """The call as `tpu` makes it; `given` has the width of all heads side by side."""
    T, order = where.kv_pos.shape[1], None if context is None else RowOrder(context, True)
    options = {"has_slopes": has_slopes, "has_bias": False, "kind": given.kind, "order": order}
    call = make_call(spec, where, given.head_dim // abreast, given.dtype, **options)
    call = dataclasses.replace(call, abreast=abreast)
    call = routed_call(call, where, given) if branches else attention_call(call, where, given)
    call = dataclasses.replace(call, tiles=dataclasses.replace(call.tiles, **tiles))
    if T % call.tiles.q_block:
        raise ArgumentError(
            f"T is {T}; what is measured are whole blocks, so T must be a multiple of {call.tiles.q_block}."
        )
    return call


def _launches(call: Call, where, given: Given, tiles: dict) -> Launches:
    """The launches of the call; tiles that were asked for are those of the backward pass too."""
    with preferring("tpu", _own_row(call, given.head_dim) if tiles else []):
        return attention_launches(call, where, given)


def _bench(
    shape,
    *,
    packed=False,
    documents=None,
    cut=0,
    full_from=None,
    context=None,
    backward=False,
    activation="softmax",
    rho=None,
    branches=False,
    rotated=False,
):
    H, K, T, D, dtype, spec, tiles = _read(shape, activation)
    abreast = _abreast(H, K, D, spec, full_from is None and rho is None and context is None and not branches)
    q_length, width = T // (context or 1), D * abreast
    q = jax.ShapeDtypeStruct((1, H // abreast, q_length, width), dtype)
    kv = jax.ShapeDtypeStruct((1, K // abreast if H == K else K, T, width), dtype)
    head_bias = jax.ShapeDtypeStruct((2, H), jnp.float32)
    row = jax.ShapeDtypeStruct((1, H, 8 if backward else 1, q_length), jnp.float32)
    ids = jax.ShapeDtypeStruct((1, T), jnp.int32)
    by_token = _tables(rotated, q_length, D)
    packed = packed or documents is not None

    def function(q, k, v, head_bias, ids, *others):
        tables, cotangents = others[: len(by_token)], others[len(by_token) :]
        columns = 1 if documents is None else int(segment_ids(T, documents).max())
        full = None if full_from is None else jnp.full((1, columns), full_from) + ids[:, :1]
        where = coordinates(T, T, q_segment_ids=ids if packed else None, full_from=full)
        if context is not None:
            where = of_first_device(where, context)
        given = Given(width, dtype, device_kind(), rho is not None)
        call = _call(spec, where, given, tiles, branches, activation == "sigmoid", context, abreast)
        call, where = _rotating(dataclasses.replace(call, zero_cut=cut), where, tables)
        full_heads = None if rho is None else jnp.arange(K) >= round(rho * K)
        x = TpuOperands(q, k, v, head_bias, where, full_heads)
        if branches:
            return both_branches(routed_launches(call, where, given), x)
        launches = _launches(call, where, given, tiles)
        if not backward:
            return passes.forward(launches.forward, x)
        dout, statistics = cotangents if activation == "softmax" else (*cotangents, None)
        return passes.backward(launches.backward, x, OutGradients(dout, statistics))

    cotangents = ((q, row) if activation == "softmax" else (q,)) if backward else ()
    return function, (q, kv, kv, head_bias, ids, *by_token, *cotangents)


def _tables(rotated: bool, length: int, D: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    return (jax.ShapeDtypeStruct((1, length, D), jnp.float32),) * 2 if rotated else ()


def _rotating(call: Call, where: Coordinates, tables) -> tuple[Call, Coordinates]:
    """A call that rotates its queries by these tables, if there are any."""
    if not tables:
        return call, where
    cos, sin = tables
    return left_to_kernels(call, where, Rotation(cos, sin, distance=cos.shape[2] // 2))


def _own_row(call: Call, D: int) -> list[dict]:
    """Tiles that were asked for, in a form that wins over the table's row for the backward pass."""
    tiles = call.tiles
    sizes = {"block": tiles.q_block, "strip": tiles.strip, "tile": tiles.tile}
    return [{"chip": "", "pass": "backward", "head_dim": D, "window": call.spec.window or 0} | sizes]


def _routed(ratio, shape):
    H, K, T, D, dtype, spec, _ = _read(shape, "softmax")
    q = jax.ShapeDtypeStruct((1, T, H, D), dtype)
    kv = jax.ShapeDtypeStruct((1, T, K, D), dtype)

    def forward(q, k, v, gate):
        return api.routed_attention(q, k, v, gate, spec, implementation="tpu")[0]

    def both(q, k, v, gate):
        gate = jnp.where(routed_rows(T, ratio)[None], gate, 0)
        out, pullback = jax.vjp(forward, q, k, v, gate)
        return out, pullback(out)

    return both, (q, kv, kv, jax.ShapeDtypeStruct((1, T), jnp.float32))


def _read(shape, activation="softmax"):
    shape = {"H": 1, "K": 1, "T": 16384, "D": 128, "num_sink_tokens": 0, "dtype": "bfloat16"} | shape
    H, K, T, D = (shape.pop(name) for name in "HKTD")
    window = shape.pop("window")
    window = None if window is None else min(window, T)  # as `tpu.attention` does
    spec = AttentionSpec(window, shape.pop("num_sink_tokens"), activation)
    return H, K, T, D, jnp.dtype(shape.pop("dtype")), spec, shape
