"""Blockwise attention in plain jax.numpy: time and memory O(T * window), on any device; the default on CPUs.

How it works. Queries and keys are cut into blocks. `lax.scan` visits the query blocks; inside, a `fori_loop` with
a run-time bound visits only the KV blocks that the schedule lists for this query block. Each visit computes one tile
of logits, asks `spec.visible` which of them count, and adds it to the block's softmax with the usual running maximum m
and running sum l (FlashAttention):

    m' = max(m, max_n s_n),   l' = l e^(m - m') + sum_n e^(s_n - m'),   acc' = acc e^(m - m') + sum_n e^(s_n - m') v_n

ending in out = acc / l and lse = m + log l. Sigmoid attention has no normaliser: its tiles simply add up.

The backward pass is written by hand, because differentiating the loops would save every tile. It keeps only out and
lse, follows the same schedule, recomputes each tile's weights p = e^(s - lse), and with
delta = rowsum(dout * out) - dlse (so a cotangent for lse costs nothing) adds up

    dv += p^T dout,   ds = p * (dout v^T - delta),   dq += ds k,   dk += ds^T q

dk and dv are accumulated in place in the scan's carry.

Everything else is algebra around that core. Sink logits join afterwards through lse. Routed attention computes the
window's keys and the keys outside it as two disjoint parts and merges them through lse. Full heads get a schedule
each, by mapping over the KV heads, so that windowed heads do not pay for full ones. Decoding has few queries, and all
their logits together: a cache is read once.
"""

import dataclasses
import functools
import math
import os
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.blocks import platform
from pallas_kernels.math import parts
from pallas_kernels.math.nonfinite import finite, nan_marks
from pallas_kernels.math.ring import Ring, attend_to_all, gradients_of_all
from pallas_kernels.math.schedule import Schedule, schedule_pairs
from pallas_kernels.math.spec import AttentionSpec, Coordinates, PerHead, visible

_CACHE = 900_000  # logits, of a CPU's core: as many as were fastest, for 4 to 32 heads


def attention(
    q: jax.Array,  # [B, T, H, D]
    k: jax.Array,  # [B, S, K, D]
    v: jax.Array,  # [B, S, K, D]
    spec: AttentionSpec,
    where: Coordinates,
    per_head: PerHead,
    ring: Ring | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns out [B, T, H, D] and lse [B, T, H] (None for sigmoid), both in float32 or wider."""
    static = _XlaStatic.choose(spec, q, k, per_head.full_heads, ring)
    out, lse = _by_kv_head(q, k, v, per_head, where, static)
    return parts.join_sinks(out, lse, per_head.sink_logits)


def routed_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    gate: jax.Array,  # [B, T]
    spec: AttentionSpec,
    where: Coordinates,
    per_head: PerHead,
    *,
    inference: bool = False,
    ring: Ring | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns gate * O_full + (1 - gate) * O_window and the branch disagreement [B, T]; see `parts.route`."""
    static = _XlaStatic.choose(spec, q, k, per_head.full_heads, ring)

    def part(q, where, outside):
        return _by_kv_head(q, k, v, per_head, where, dataclasses.replace(static, outside=outside))

    return parts.route(part, q, gate, where, per_head.sink_logits, inference=inference)


def decode_attention(
    q: jax.Array, k_cache: jax.Array, v_cache: jax.Array, spec: AttentionSpec, where: Coordinates, per_head: PerHead
) -> jax.Array:
    """Attention of a few queries over a cache, each number of which is read once: all logits are there together."""
    q, k, v, where, per_head = parts.vary_alike((q, k_cache, v_cache, where, per_head))
    return again_with_marks(lambda marked: at_once(q, k, v, spec, where, per_head, marked=marked))


def again_with_marks(attend: Callable[[bool], jax.Array]) -> jax.Array:
    """`attend(False)`, or where a number of it is not finite, as it comes through a weight of zero, `attend(True)`."""
    out = attend(False)
    return lax.cond(jnp.isfinite(out).all(), lambda: out, lambda: attend(True))


def at_once(q, k, v, spec: AttentionSpec, where: Coordinates, per_head: PerHead, *, marked: bool) -> jax.Array:
    """out [B, T, H, D]; not `marked`, it is right where it is finite."""
    operands = _XlaOperands(q, k, v, PerHead(per_head.alibi_slopes, per_head.sigmoid_bias), where)
    tile, wide = (_BlockPair(_XlaStatic(one, q.shape[1], k.shape[1]), operands) for one in (spec, spec.full))
    (rows,) = _cut_rows(q, q.shape[1], k.shape[2])  # [B, K, G, T, D]
    no_marks = jnp.zeros((1, 1, 1), q.dtype)  # what is not finite in queries and keys shows in their logits by itself
    marks, v = (nan_marks(v), finite(v)) if marked else (no_marks, v)
    row = _Queries(rows, no_marks[None], where.q_pos, where.q_segment_ids, where.full_rows)
    keys = _Keys(k.swapaxes(1, 2), v.swapaxes(1, 2), marks.swapaxes(1, 2), where.kv_pos, where.kv_segment_ids)
    logits, _ = tile.logits(row, keys)
    mask = tile.mask(row, keys)
    if per_head.full_heads is not None:
        mask = jnp.where(per_head.full_heads[:, None, None, None], wide.mask(row, keys), mask)
    if spec.activation == "sigmoid":
        out = tile.dot("bkgqs,bksd->bkgqd", jnp.where(mask, jax.nn.sigmoid(logits), 0), keys.v)
        return _join_rows(out[None], q.shape)
    logits = jnp.where(mask, logits, -jnp.inf)
    top = logits.max(axis=-1)
    weights = jnp.exp(logits - jnp.where(top == -jnp.inf, 0, top)[..., None])
    total = weights.sum(axis=-1)
    sees_any = total != 0  # NaN is not to be hidden
    total = jnp.where(sees_any, total, 1)
    out = _join_rows(tile.dot("bkgqs,bksd->bkgqd", weights, keys.v)[None] / total[..., None], q.shape)
    lse = _join_rows(jnp.where(sees_any, top + jnp.log(total), -jnp.inf)[None], q.shape[:3])
    return parts.join_sinks(out, lse, per_head.sink_logits)[0]


class _XlaOperands(NamedTuple):
    """What the core reads."""

    q: jax.Array  # [B, T, H, D]
    k: jax.Array  # [B, S, K, D]
    v: jax.Array  # [B, S, K, D]
    bias: PerHead  # slopes and bias alone
    where: Coordinates

    def of_keys(self, keys: tuple[jax.Array, jax.Array], where: Coordinates) -> "_XlaOperands":
        return self._replace(k=keys[0], v=keys[1], where=where)


@dataclasses.dataclass(frozen=True)
class _XlaStatic:
    spec: AttentionSpec
    q_block: int
    kv_block: int
    ring: Ring | None = None
    together: int = 1  # sequences of a batch in one pass of the loops
    outside: bool = False  # attend to what `spec` does *not* see of the keys that full attention would

    @classmethod
    def choose(cls, spec: AttentionSpec, q, k, full_heads, ring: Ring | None) -> "_XlaStatic":
        batch, q_length, heads, _ = q.shape
        if full_heads is not None:
            heads //= full_heads.shape[0]
        blocks = attention_blocks(heads, spec.window, q_length, k.shape[1])
        apart = ring is None and platform() == "cpu"
        return cls(spec, *blocks, ring, _sequences_abreast(batch, heads * math.prod(blocks)) if apart else batch)


def _sequences_abreast(batch: int, tile: int) -> int:
    """Sequences of a batch that a CPU works on at once, each with tiles of so many logits: what its caches hold."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    most = cores * max(1, _CACHE // tile)
    return max(n for n in range(1, min(most, batch) + 1) if batch % n == 0)


def attention_blocks(heads: int, window: int | None, q_length: int, kv_length: int, tiles: int = 1) -> tuple[int, int]:
    """Tokens of the blocks of queries and keys, for tiles of so many heads.

    On a CPU what a visit holds, `tiles` tiles of logits, should stay in the cache. Blocks much longer than half of the
    window compute too much outside it; very short ones leave the matmuls too little to do.
    """
    largest = 512
    if platform() == "cpu":
        largest = math.isqrt(_CACHE // (heads * tiles))
    if window is not None:
        largest = min(largest, max(64, window // 2))
    block = 2 ** max(5, min(9, largest.bit_length() - 1))
    return min(block, q_length), min(block, kv_length)


def _by_kv_head(q, k, v, per_head: PerHead, where: Coordinates, static: _XlaStatic):
    """The core, once for all KV heads, or once for each when some are full and so have another schedule."""
    bias, full_heads = PerHead(per_head.alibi_slopes, per_head.sigmoid_bias), per_head.full_heads
    q, k, v, bias, where, full_heads = parts.vary_alike((q, k, v, bias, where, full_heads))
    if full_heads is None:
        return _of_sequences(static, _XlaOperands(q, k, v, bias, where))

    kv_heads = k.shape[2]

    def split(x, axis):  # [.., H or K, ..] -> [K, .., H/K or 1, ..]
        return jnp.moveaxis(x.reshape(*x.shape[:axis], kv_heads, -1, *x.shape[axis + 1 :]), axis, 0)

    def one_head(args):
        q, k, v, bias, full = args
        rows = jnp.broadcast_to(full, where.q_pos.shape)
        rows = rows if where.full_rows is None else rows | where.full_rows
        return _of_sequences(static, _XlaOperands(q, k, v, bias, where._replace(full_rows=rows)))

    bias = jax.tree.map(lambda x: split(x, 0), bias)
    out, lse = lax.map(one_head, (split(q, 2), split(k, 2), split(v, 2), bias, full_heads))
    # [K, B, T, G, ...] -> [B, T, H, ...]
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 2).reshape(*q.shape[:3], *x.shape[4:]), (out, lse))


def _of_sequences(static: _XlaStatic, x: _XlaOperands):
    """The core, for `static.together` sequences of the batch after the other."""
    batch, together = len(x.q), static.together
    if together == batch:
        return _flash(static, x)
    own = {name: one for name, one in x.where._asdict().items() if one is not None and len(one) == batch}

    def some(args):
        q, k, v, own = args
        return _flash(static, _XlaOperands(q, k, v, x.bias, x.where._replace(**own)))

    groups = jax.tree.map(lambda x: x.reshape(-1, together, *x.shape[1:]), (x.q, x.k, x.v, own))
    return jax.tree.map(lambda x: x.reshape(batch, *x.shape[2:]), lax.map(some, groups))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _flash(static: _XlaStatic, x: _XlaOperands):
    """The core: out [B, T, H, D] and lse [B, T, H] (None for sigmoid) in the accumulation dtype."""
    return _flash_fwd(static, x)[0]


def _flash_fwd(static, x):
    def attend(keys, where, results, last):
        out, lse = _forward(static, x.of_keys(keys, where))
        if not results:
            return out, lse
        out_so_far, lse_so_far = results
        return (out_so_far + out, None) if lse is None else parts.merge(out_so_far, lse_so_far, out, lse)

    out, lse = parts.named(*attend_to_all(static.ring, (x.k, x.v), x.where, attend))
    return (out, lse), (x, out, lse)


def _flash_bwd(static, saved, cotangents):
    x, *results = saved

    def backward(keys, where):
        return _backward(static, x.of_keys(keys, where), results, cotangents)

    dq, dk, dv, dbias = gradients_of_all(static.ring, (x.k, x.v), x.where, backward)
    return (_XlaOperands(dq.astype(x.q.dtype), dk, dv, dbias, None),)  # type: ignore[arg-type]  # integers


_flash.defvjp(_flash_fwd, _flash_bwd)


class _Queries(NamedTuple):
    """A block of queries (outside the scan, all of them, with a leading axis nq)."""

    q: jax.Array  # [B, K, G, bq, D], finite
    nan_marks: jax.Array  # [B, K, G, bq]
    pos: jax.Array  # [B, bq]
    segment_ids: jax.Array | None
    full: jax.Array | None


class _Keys(NamedTuple):
    """A block of keys (outside the loop, all of them, with an axis nk behind B); one head's lie together, so that no
    visit moves them."""

    k: jax.Array  # [B, K, bk, D], finite
    v: jax.Array
    nan_marks: jax.Array  # [B, K, bk]
    pos: jax.Array  # [B, bk]
    segment_ids: jax.Array | None

    def block(self, j) -> "_Keys":
        return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, j, axis=1, keepdims=False), self)


def _forward(static: _XlaStatic, x: _XlaOperands):
    spec, tile = static.spec, _BlockPair(static, x)
    queries, visits, keys = _cut(static, x)

    def query_block(_, inputs: tuple[_Queries, Schedule]):
        row, visits = inputs

        def softmax_visit(i, carry):
            top, total, acc = carry
            kv = keys.block(visits.blocks[i])
            logits, _ = tile.logits(row, kv)
            # Without the barrier XLA would compute them twice, for the maximum and for the weights.
            logits = lax.optimization_barrier(jnp.where(tile.mask(row, kv), logits, -jnp.inf))
            new_top = jnp.maximum(top, logits.max(axis=-1))
            shift = jnp.where(new_top == -jnp.inf, 0, new_top)
            weights = jnp.exp(logits - shift[..., None])
            decay = jnp.exp(top - shift)
            acc = acc * decay[..., None] + tile.dot("bkgqs,bksd->bkgqd", weights, kv.v)
            return new_top, total * decay + weights.sum(axis=-1), acc

        def sigmoid_visit(i, acc):
            kv = keys.block(visits.blocks[i])
            logits, _ = tile.logits(row, kv)
            weights = jnp.where(tile.mask(row, kv), jax.nn.sigmoid(logits), 0)
            return acc + tile.dot("bkgqs,bksd->bkgqd", weights, kv.v)

        acc = jnp.zeros_like(row.q, tile.dtype)
        if spec.activation == "sigmoid":
            return None, (lax.fori_loop(0, visits.counts, sigmoid_visit, acc), None)
        total = jnp.zeros_like(acc[..., 0])
        top, total, acc = lax.fori_loop(0, visits.counts, softmax_visit, (total - jnp.inf, total, acc))
        sees_any = total != 0  # NaN is not to be hidden
        total = jnp.where(sees_any, total, 1)
        return None, (acc / total[..., None], jnp.where(sees_any, top + jnp.log(total), -jnp.inf))

    _, (out, lse) = lax.scan(query_block, None, (queries, visits))
    return _join_rows(out, x.q.shape), None if lse is None else _join_rows(lse, x.q.shape[:3])


def _backward(static: _XlaStatic, x: _XlaOperands, results, cotangents):
    q, k, _, bias, _ = x
    (out, lse), (dout, dlse) = results, cotangents
    spec, tile = static.spec, _BlockPair(static, x)
    q_block, kv_block = attention_blocks(q.shape[2], spec.window, q.shape[1], k.shape[1], tiles=4)
    static = dataclasses.replace(static, q_block=q_block, kv_block=kv_block)
    queries, visits, keys = _cut(static, x)
    statistics: tuple[jax.Array, ...] = ()
    if lse is not None:
        sees_any = lse != -jnp.inf  # true for NaN, which is not to be hidden
        delta = jnp.where(sees_any, (dout * out).sum(axis=-1) - dlse, 0)
        statistics = tuple(_cut_rows(x, static.q_block, k.shape[2]) for x in (jnp.where(sees_any, lse, 0), delta))
    dout = _cut_rows(dout, static.q_block, k.shape[2])
    queries = queries._replace(nan_marks=queries.nan_marks + nan_marks(dout))
    # A block of rows whose cotangents are all zero (rows routed to the other branch, padding) changes nothing.
    active = jnp.stack([(x != 0).any(axis=range(1, x.ndim)) for x in (dout, *statistics[1:])]).any(axis=0)  # [nq]
    visits = visits._replace(counts=jnp.where(active, visits.counts, 0))
    dout = finite(dout)

    def query_block(carry, inputs):
        row, visits, dout, statistics = inputs

        def visit(i, carry):
            dq, dbias, dk, dv = carry
            j = visits.blocks[i]
            kv = keys.block(j)
            logits, slope = tile.logits(row, kv)
            mask = tile.mask(row, kv)
            dweights = tile.dot("bkgqd,bksd->bkgqs", dout, kv.v)
            if spec.activation == "sigmoid":
                weights = jnp.where(mask, jax.nn.sigmoid(logits), 0)
                dlogits = weights * (1 - weights) * dweights
            else:
                lse, delta = statistics
                weights = lax.optimization_barrier(jnp.where(mask, jnp.exp(logits - lse[..., None]), 0))
                dlogits = weights * (dweights - delta[..., None])
            dlogits = jnp.where(mask, dlogits, 0)  # a row's delta may be NaN
            if dbias is not None:
                dbias = dbias + dlogits.sum(axis=-1)
            dlogits = dlogits * slope
            dq = dq + tile.dot("bkgqs,bksd->bkgqd", dlogits, kv.k)
            dk = _add_block(dk, j, tile.dot("bkgqs,bkgqd->bksd", dlogits, row.q))
            dv = _add_block(dv, j, tile.dot("bkgqs,bkgqd->bksd", weights, dout))
            return dq, dbias, dk, dv

        dq = jnp.zeros_like(row.q, tile.dtype)
        # Summed along rows first, [B, K, G, bq]: one long sum over all tiles would lose digits.
        dbias = None if bias.sigmoid_bias is None else jnp.zeros_like(dq[..., 0])
        dq, dbias, *carry = lax.fori_loop(0, visits.counts, visit, (dq, dbias, *carry))
        return tuple(carry), (dq.astype(q.dtype), None if dbias is None else dbias.sum(axis=(0, 3)))

    zeros = jnp.zeros_like(keys.k, tile.dtype), jnp.zeros_like(keys.v, tile.dtype)
    (dk, dv), (dq, dbias) = lax.scan(query_block, zeros, (queries, visits, dout, statistics))
    by_token = (x.swapaxes(2, 3).reshape(x.shape[0], -1, *k.shape[2:]) for x in (dk, dv))
    dk, dv = (_trim(x, k.shape).astype(k.dtype) for x in by_token)
    if dbias is not None:
        dbias = dbias.sum(axis=0).reshape(-1).astype(bias.sigmoid_bias.dtype)
    return _join_rows(dq, q.shape), dk, dv, PerHead(None, dbias)


class _BlockPair:
    """Logits and mask of one (query block, KV block) pair."""

    def __init__(self, static: _XlaStatic, x: _XlaOperands):
        q, k, _, bias, _ = x
        self.spec, self.outside = static.spec, static.outside
        self.dtype = jnp.promote_types(q.dtype, jnp.float32)
        self.precision = lax.Precision.DEFAULT if q.dtype.itemsize < 4 else lax.Precision.HIGHEST
        self.scale = self.spec.scale_for(q.shape[3])
        self.bias = jax.tree.map(lambda x: x.astype(self.dtype).reshape(k.shape[2], -1), bias)  # [K, G]

    def dot(self, equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.einsum(equation, a.astype(self.dtype), b.astype(self.dtype), precision=self.precision)

    def products(self, rows: jax.Array, keys: jax.Array) -> jax.Array:
        """rows [B, K, G, bq, D] times keys [B, K, bk, D]: [B, K, G, bq, bk], as one product a KV head. With the queries
        on two axes XLA would turn the keys round, in memory."""
        joined = rows.reshape(*rows.shape[:2], -1, rows.shape[-1])
        return self.dot("bknd,bksd->bkns", joined, keys).reshape(*rows.shape[:-1], -1)

    def logits(self, row: _Queries, kv: _Keys) -> tuple[jax.Array, jax.Array | float]:
        """Logits [B, K, G, bq, bk], and their derivative with respect to q.k."""
        logits = self.scale * self.products(row.q, kv.k)
        slope: jax.Array | float = self.scale
        if self.spec.logit_softcap is not None:
            tanh = jnp.tanh(logits / self.spec.logit_softcap)
            logits, slope = self.spec.logit_softcap * tanh, self.scale * (1 - tanh * tanh)
        if self.bias.alibi_slopes is not None:
            distance = row.pos[:, :, None] - kv.pos[:, None, :]  # [B, bq, bk]
            logits = logits + self.bias.alibi_slopes[:, :, None, None] * distance[:, None, None]
        if self.bias.sigmoid_bias is not None:
            logits = logits + self.bias.sigmoid_bias[:, :, None, None]
        return logits + (row.nan_marks[..., None] + kv.nan_marks[:, :, None, None]), slope

    def mask(self, row: _Queries, kv: _Keys) -> jax.Array:
        """[B, 1, 1, bq, bk] bool, B being 1 when all rows of the batch agree."""
        q_pos, q_segment_ids, full = (
            None if x is None else x[:, :, None] for x in (row.pos, row.segment_ids, row.full)
        )
        kv_pos, kv_segment_ids = (None if x is None else x[:, None, :] for x in (kv.pos, kv.segment_ids))
        seen = visible(self.spec, q_pos, kv_pos, q_segment_ids, kv_segment_ids, full)
        if self.outside:
            seen = visible(self.spec.full, q_pos, kv_pos, q_segment_ids, kv_segment_ids) & ~seen
        return seen[:, None, None]


def _cut(static: _XlaStatic, operands: _XlaOperands) -> tuple[_Queries, Schedule, _Keys]:
    """Pads to whole blocks (padding is at position -1, so nothing sees it), cuts, and schedules."""
    q, k, v, _, where = operands
    where = parts.in_blocks(where, static.q_block, static.kv_block, _pad)
    schedule = schedule_pairs(static.spec, where, static.q_block, static.kv_block, outside=static.outside)

    def blocks(x):  # [B, T] -> [nq, B, bq]
        return None if x is None else jnp.moveaxis(x.reshape(x.shape[0], -1, static.q_block), 1, 0)

    rows = _cut_rows(q, static.q_block, k.shape[2])
    queries = _Queries(
        finite(rows), nan_marks(rows), blocks(where.q_pos), blocks(where.q_segment_ids), blocks(where.full_rows)
    )
    keys = _Keys(finite(k), finite(v), nan_marks(k, v), where.kv_pos, where.kv_segment_ids)
    keys = jax.tree.map(
        lambda x: (x := _pad(x, static.kv_block, 0)).reshape(x.shape[0], -1, static.kv_block, *x.shape[2:]), keys
    )
    by_head = {name: getattr(keys, name).swapaxes(2, 3) for name in ("k", "v", "nan_marks")}
    return queries, schedule, keys._replace(**by_head)


def _pad(x: jax.Array, block: int, fill) -> jax.Array:
    """Extends axis 1 to a multiple of `block`."""
    excess = -x.shape[1] % block
    return jnp.pad(x, [(0, excess if axis == 1 else 0) for axis in range(x.ndim)], constant_values=fill)


def _cut_rows(x: jax.Array, block: int, kv_heads: int) -> jax.Array:
    """[B, T, H, ...] -> [nq, B, K, G, bq, ...]."""
    x = _pad(x, block, 0)
    batch, length, heads = x.shape[:3]
    x = x.reshape(batch, length // block, block, kv_heads, heads // kv_heads, *x.shape[3:])
    return jnp.moveaxis(x, (1, 2), (0, 4))


def _join_rows(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """[nq, B, K, G, bq, ...] -> [B, T, H, ...], the padding cut off."""
    x = jnp.moveaxis(x, (0, 4), (1, 2))
    return _trim(x.reshape(shape[0], -1, *shape[2:]), shape)


def _trim(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return x[:, : shape[1]]


def _add_block(x: jax.Array, j, block: jax.Array) -> jax.Array:
    """Adds to block j of x [B, nk, ...], in place inside a loop."""
    return lax.dynamic_update_index_in_dim(x, x[:, j] + block, j, axis=1)
