"""The GPU's kernels, in Pallas for the Triton lowering: the only file that imports it.

That lowering is deprecated; everything but the kernels (schedules, tile sizes, gradients' algebra) is in
`gpu`. It has no scalar prefetch and no dynamic grid. Each program takes one block (of queries, or of keys)
and runs two loops whose bounds it reads from a small table made by `visits.loop_bounds`: one over tiles that
need a mask, one over tiles visible as a whole.

* forward: a program per query block and query head; out and lse by the running maximum and sum of
  FlashAttention.
* dq: a program per query block and query head.
* dkv: a program per KV block and KV head, which visits the query heads of its group, or one per query
  head. Its tiles are transposed, so that the weights need not be before `p^T dout`.
* decode, in `decode_kernels`: a program per KV head and share of the visits.

Logits are kept in units of log 2 inside, because the GPU's exponential is exp2. Keys and values are read
where they lie: nothing is repeated for grouped queries nor padded; ragged ends and odd head_dims are masked
at the load.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.gpu.loop_bounds import LoopBounds
from pallas_kernels.gpu.operands import GpuStatic, Operands, Side, Tile, key_grid, query_grid
from pallas_kernels.math.nonfinite import finite, is_finite
from pallas_kernels.math.parts import LOG2E
from pallas_kernels.math.spec import visible


def on_gpu() -> bool:
    """Whether kernels are compiled for a GPU: the default device, or the abstract one of the current mesh."""
    return plgpu.is_gpu_device()


def compute_capability() -> int:
    """The compute capability of that GPU: 90 for 9.0, and so on."""
    return plgpu.get_gpu_info().compute_capability


def forward(static: GpuStatic, tile: Tile, x: Operands) -> tuple[jax.Array, jax.Array | None]:
    """Out [B, T, H, D] in `static.out_dtype`, and lse [B, H, T of whole blocks] float32, base 2 (None: sigmoid)."""
    grid = query_grid(tile, x.q)
    results = [_sequence(x.q.shape, static.out_dtype)]
    if static.spec.activation == "softmax":
        results.append(_statistic(tile, grid))
    out, *lse = call(_forward_kernel, static, tile, x, grid, results)
    return out, lse[0] if lse else None


def dq(static: GpuStatic, tile: Tile, x: Operands) -> tuple[jax.Array, jax.Array | None]:
    """The gradient of q, and (if there is a bias) that of the bias by query row: [B, H, T of whole blocks] float32."""
    grid = query_grid(tile, x.q)
    results = [_sequence(x.q.shape, x.q.dtype)]
    if x.heads.sigmoid_bias is not None:
        results.append(_statistic(tile, grid))
    dq, *dbias = call(_dq_kernel, static, tile, x, grid, results)
    return dq, dbias[0] if dbias else None


def dkv(static: GpuStatic, tile: Tile, x: Operands, each_head: bool) -> tuple[jax.Array, jax.Array]:
    """The gradients of k and v; `x.bounds` are those of KV blocks.

    With `each_head`, what each query head adds to them: [B, S, H, D] float32.
    """
    heads = x.q.shape[2] if each_head else x.k.shape[2]
    grid = key_grid(tile, x.k, heads)
    results = [_sequence((*y.shape[:2], heads, y.shape[3]), jnp.float32 if each_head else y.dtype) for y in (x.k, x.v)]
    dk, dv = call(_dkv_kernel, static, tile, x, grid, results)
    return dk, dv


# Each program is handed the whole sequences of its KV head and row of the batch, and reads what it visits.
# Grids are (blocks, heads, batch), the blocks fastest, so that programs that run together share keys.


def call(kernel, static: GpuStatic, tile: Tile, x: Operands, grid: tuple[int, int, int], results):
    """Runs `kernel` over the grid; `results` are pairs of a shape and a block spec."""
    kv_heads, head_dim = x.k.shape[2:]
    width = channels(head_dim)
    per_kv_head = grid[1] // kv_heads

    def kv_head(h):
        return h if per_kv_head == 1 else lax.div(h, per_kv_head)

    def sequence(y, heads):  # [B, length, H or K, D]
        return pl.BlockSpec((None, y.shape[1], heads, width), lambda i, h, b: (b, 0, kv_head(h), 0))

    def by_row(y):  # [B or 1, ...]
        return pl.BlockSpec((None, *y.shape[1:]), lambda i, h, b: (b if y.shape[0] > 1 else 0, *(0,) * (y.ndim - 1)))

    def by_head(y):  # [H], or [K]
        per_program = y.shape[0] // kv_heads
        return pl.BlockSpec((per_program,), lambda i, h, b: (kv_head(h),))

    def statistic(y):  # [B, H, length]
        return pl.BlockSpec((None, y.shape[1] // kv_heads, y.shape[2]), lambda i, h, b: (b, kv_head(h), 0))

    group = x.q.shape[2] // kv_heads
    specs = Operands(
        sequence(x.q, group),
        sequence(x.k, None),
        sequence(x.v, None),
        jax.tree.map(by_row, x.queries),
        jax.tree.map(by_row, x.keys),
        jax.tree.map(by_head, x.heads),
        by_row(x.bounds),
        None if x.dout is None else sequence(x.dout, group),
        *jax.tree.map(statistic, (x.lse, x.delta)),
    )
    lengths = x.q.shape[1], x.k.shape[1]
    program = GpuProgram(static, tile, *lengths, head_dim, x.q.dtype, per_kv_head)
    return launch(kernel, program, x, specs, grid, results)


def launch(kernel, program: "GpuProgram", x, specs, grid: tuple[int, int, int], results):
    """`kernel(program, references to x, references to the results)` over the grid."""
    shapes, out_specs = zip(*results, strict=True)
    tile = program.tile
    return pl.pallas_call(
        functools.partial(kernel, program),
        grid=grid,
        in_specs=[specs],
        out_specs=out_specs,
        out_shape=shapes,
        interpret=program.static.interpret,
        compiler_params=plgpu.CompilerParams(num_warps=tile.num_warps, num_stages=tile.num_stages),
        name=kernel.__name__.strip("_"),
    )(x)


def channels(head_dim: int) -> int:
    """Channels of a tile: a power of two, and 16 at least. Of fewer, the tensor cores of an H100 added each four times
    (head_dim 4) without a word.
    """
    return max(16, pl.next_power_of_2(head_dim))


def _latest_first(i, blocks):
    """The query block of program i: causal work grows with the position, so the long programs start first."""
    return blocks - 1 - i


def _sequence(shape, dtype):
    """A result [B, length, heads, D]. A program is handed the sequence of its head and stores what is inside of it:
    the lowering would write a whole block, over the next row of the batch and beyond the array.
    """
    block = (None, shape[1], None, channels(shape[3]))
    return jax.ShapeDtypeStruct(shape, dtype), pl.BlockSpec(block, lambda i, h, b: (b, 0, h, 0))


def _statistic(tile: Tile, grid):
    """[B, H, T of whole blocks] float32."""
    shape = jax.ShapeDtypeStruct((grid[2], grid[1], grid[0] * tile.q_block), jnp.float32)
    return shape, pl.BlockSpec((None, None, tile.q_block), lambda i, h, b: (b, h, _latest_first(i, grid[0])))


# Inside the kernels.


@dataclasses.dataclass(frozen=True)
class GpuProgram:
    """What a kernel knows when it is compiled, and the pieces that all kernels share."""

    static: GpuStatic
    tile: Tile
    q_length: int
    kv_length: int
    head_dim: int
    dtype: jnp.dtype  # of q
    per_kv_head: int  # programs of the grid's second axis

    @property
    def scale(self) -> float:
        return self.static.spec.scale_for(self.head_dim)

    @property
    def query_factor(self) -> float:
        """What q is multiplied by before its products with k; `logits` multiplies these by the rest of the scale.

        In float32 it is all of it. A compiler may take the maximum of rounded logits, but fold `product * scale - lse`
        into one operation that rounds once: at logits of 1e5 the weights were then off by 1e-3.
        """
        if self.dtype != jnp.float32 or self.static.spec.logit_softcap is not None:
            return 1.0
        return self.scale * LOG2E

    def load_queries(self, ref, i, *g, edge=True):
        q = self._load(ref, i, self.tile.q_block, self.q_length, edge, *g)  # [bq, width]
        return q * self.query_factor if self.query_factor != 1 else q

    def load_cotangents(self, ref, i, g, edge=True):
        return self._load(ref, i, self.tile.q_block, self.q_length, edge, g)  # [bq, width]

    def load_keys(self, ref, j, edge=True):
        return self._load(ref, j, self.tile.kv_block, self.kv_length, edge)  # [bk, width]

    def load_entries(self, pool, slot, j):
        """Block j of row `slot` of a pool [rows, entries, width]: [bk, width]."""
        return self._load(pool, j, self.tile.kv_block, self.kv_length, True, slot=(slot,))

    def load_positions(self, ref, j):
        """Block j of the positions [entries] of a cache's entries, -1 beyond their end: [1, bk]."""
        index = j * self.tile.kv_block + jnp.arange(self.tile.kv_block)
        view = ref.at[pl.ds(j * self.tile.kv_block, self.tile.kv_block)]
        return plgpu.load(view, mask=index < self.kv_length, other=-1)[None]

    def _load(self, ref, i, block, length, edge, *head, slot=()):
        """Zero beyond the sequence's end and head_dim; `edge` False says that the block lies inside the sequence."""
        mask = self._inside(ref, i, block, length if edge else None)
        view = ref.at[*slot, pl.ds(i * block, block), *head, :]
        return plgpu.load(view, mask=mask, other=None if mask is None else 0.0)

    def store_queries(self, ref, i, x):
        self._store(ref, i, x, self.q_length)

    def store_keys(self, ref, j, x):
        self._store(ref, j, x, self.kv_length)

    def _store(self, ref, i, x, length):
        block = x.shape[0]
        mask = self._inside(ref, i, block, length)
        plgpu.store(ref.at[pl.ds(i * block, block), :], x.astype(ref.dtype), mask=mask)

    def _inside(self, ref, i, block, length):
        """Where block i lies inside the array: [block, width] bool, or None for everywhere."""
        width = ref.shape[-1]
        mask = None
        if length is not None and length % block:
            mask = (i * block + jnp.arange(block) < length)[:, None]
        if width != self.head_dim:
            channels = (jnp.arange(width) < self.head_dim)[None, :]
            mask = channels if mask is None else mask & channels
        return None if mask is None else jnp.broadcast_to(mask, (block, width))

    def queries(self, side: Side, i, axis: int) -> Side:
        return jax.tree.map(
            lambda ref: jnp.expand_dims(ref[pl.ds(i * self.tile.q_block, self.tile.q_block)], axis), side
        )

    def keys(self, side: Side, j, axis: int) -> Side:
        block = self.tile.kv_block
        return jax.tree.map(lambda ref: jnp.expand_dims(ref[pl.ds(j * block, block)], axis), side)

    def dot(self, a, b, contract=(1, 0)):
        precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
        axes = (((contract[0],), (contract[1],)), ((), ()))
        return lax.dot_general(a, b, axes, precision=precision, preferred_element_type=jnp.float32)

    def bounds(self, x: Operands, block) -> tuple[LoopBounds, jax.Array | None]:
        """The bounds of a block's loops, and whether the head is full."""
        full = None if x.heads.full_heads is None else x.heads.full_heads[0]
        variant = 0 if full is None else full
        return LoopBounds.read(lambda i: x.bounds[variant, block, i]), None if full is None else full != 0

    def loops(self, bounds: LoopBounds, visit, carry):
        """Runs `carry = visit(block, carry, masked)` over both kinds of visits."""
        carry = lax.fori_loop(0, bounds.num_masked, lambda i, c: visit(bounds.block(i), c, True), carry)
        first, last = bounds.whole
        return lax.fori_loop(first, last, lambda j, c: visit(j, c, False), carry)

    def logits(self, products, queries: Side, keys: Side, slopes, bias):
        """Logits in units of log 2 from the products of (multiplied) q and k.

        Also their derivative, times log2 e, by the scaled q.k (None for 1).
        """
        spec = self.static.spec
        derivative = None
        if spec.logit_softcap is None:
            rest = self.scale * LOG2E / self.query_factor
            logits = products if rest == 1 else products * rest
        else:
            tanh = 1 - 2 / (1 + jnp.exp2(products * (2 * LOG2E * self.scale / spec.logit_softcap)))
            logits, derivative = tanh * (spec.logit_softcap * LOG2E), 1 - tanh * tanh
        if slopes is not None:
            logits += (slopes * LOG2E) * (queries.pos - keys.pos).astype(jnp.float32)
        if bias is not None:
            logits += bias * LOG2E
        return logits, derivative

    def mask(self, queries: Side, keys: Side, full_head):
        spec = self.static.spec
        full = None if queries.full is None else queries.full != 0
        if full_head is not None:
            full = jnp.broadcast_to(full_head, queries.pos.shape) if full is None else full | full_head
        seen = visible(spec, queries.pos, keys.pos, queries.segment_ids, keys.segment_ids, full)
        if self.static.outside:
            seen = visible(spec.full, queries.pos, keys.pos, queries.segment_ids, keys.segment_ids) & ~seen
        return seen

    def keys_of(self, x: Operands):
        """`load(j, masked)`: where the keys of block j stand, the keys and the values."""

        def load(j, masked):
            keys = self.keys(x.keys, j, 0)  # if nothing needs them, the compiler drops the loads
            return keys, *(self.load_keys(ref, j, masked) for ref in (x.k, x.v))

        return load

    def attend(self, q, queries: Side, load, slopes, bias, full_head):
        """Returns the `visit` and the initial carry of a forward pass: (top, total, acc), or acc for sigmoid."""
        rows, width = q.shape
        acc = jnp.zeros((rows, width), jnp.float32)

        def tile_logits(j, masked):
            keys, k, v = load(j, masked)
            logits, _ = self.logits(self.dot(q, k, (1, 1)), queries, keys, slopes, bias)
            if not masked:
                return logits, None, v
            nonfinite = jnp.where(is_finite(v), 0.0, 1.0).sum(axis=1) > 0  # [keys]: NaN for those who see them
            logits = jnp.where(nonfinite[None, :], jnp.nan, logits)
            return logits, self.mask(queries, keys, full_head), finite(v)

        def sigmoid(j, acc, masked):
            logits, mask, v = tile_logits(j, masked)
            weights = 1 / (1 + jnp.exp2(-logits))
            weights = jnp.where(mask, weights, 0.0) if masked else weights
            high = weights.astype(v.dtype)
            acc = acc + self.dot(high, v)
            if v.dtype == jnp.float32:
                return acc
            # Without a normaliser the rounding of many weights near 1 adds up: what it cut off is added as well.
            return acc + self.dot((weights - high.astype(jnp.float32)).astype(v.dtype), v)

        def softmax(j, carry, masked):
            top, total, acc = carry
            logits, mask, v = tile_logits(j, masked)
            logits = jnp.where(mask, logits, -jnp.inf) if masked else logits
            new_top = jnp.maximum(top, logits.max(axis=1))
            shift = _finite(new_top) if masked else new_top
            weights = jnp.exp2(logits - shift[:, None])
            decay = jnp.exp2(top - shift)
            acc = acc * decay[:, None] + self.dot(weights.astype(v.dtype), v)
            return new_top, total * decay + weights.sum(axis=1), acc

        if self.static.spec.activation == "sigmoid":
            return sigmoid, acc
        total = jnp.zeros((rows,), jnp.float32)
        return softmax, (total - jnp.inf, total, acc)

    def gradients(self, logits, derivative, mask, dweights, lse, delta):
        """Weights of a tile, the gradient of its logits, and that of its scaled q.k."""
        if self.static.spec.activation == "sigmoid":
            weights = 1 / (1 + jnp.exp2(-logits))
            weights = weights if mask is None else jnp.where(mask, weights, 0.0)
            dlogits = weights * (1 - weights) * dweights
        else:
            weights = jnp.exp2(logits - lse)
            weights = weights if mask is None else jnp.where(mask, weights, 0.0)
            dlogits = weights * (dweights - delta)
        dproducts = dlogits if derivative is None else dlogits * derivative
        if mask is not None:  # last, so that nothing of what it hides gets through, not even NaN
            dlogits, dproducts = jnp.where(mask, dlogits, 0.0), jnp.where(mask, dproducts, 0.0)
        return weights, dlogits, dproducts


def _finite(top):
    """A maximum that can be subtracted: 0 for rows that have seen nothing."""
    return jnp.where(top == -jnp.inf, 0.0, top)


def normalise(carry, sink=None):
    """Out and lse (base 2) from a running maximum, sum and accumulator; `sink` joins the sum."""
    top, total, acc = carry
    sees_any = total != 0  # NaN is not to be hidden
    if sink is not None:
        joined = _finite(jnp.maximum(top, sink * LOG2E))
        decay = jnp.exp2(top - joined)
        total, acc, top = total * decay + jnp.exp2(sink * LOG2E - joined), acc * decay[:, None], joined
    total = jnp.where(sees_any, total, 1.0)
    lse = jnp.where(sees_any, top + jnp.log2(total), -jnp.inf)
    return acc / total[:, None], lse


def _scalar(ref, g):
    return None if ref is None else ref[g]


def _forward_kernel(program: GpuProgram, x: Operands, out_ref, lse_ref=None):
    i, g = _latest_first(pl.program_id(0), pl.num_programs(0)), lax.rem(pl.program_id(1), x.q.shape[1])
    q = program.load_queries(x.q, i, g)
    queries = program.queries(x.queries, i, 1)
    bounds, full_head = program.bounds(x, i)
    slope, bias = _scalar(x.heads.alibi_slopes, g), _scalar(x.heads.sigmoid_bias, g)
    visit, carry = program.attend(q, queries, program.keys_of(x), slope, bias, full_head)
    carry = program.loops(bounds, visit, carry)
    out = carry
    if lse_ref is not None:
        out, lse_ref[...] = normalise(carry, sink=_scalar(x.heads.sink_logits, g))
    program.store_queries(out_ref, i, out)


def _dq_kernel(program: GpuProgram, x: Operands, dq_ref, dbias_ref=None):
    i, g = _latest_first(pl.program_id(0), pl.num_programs(0)), lax.rem(pl.program_id(1), x.q.shape[1])
    block = program.tile.q_block
    q, dout = program.load_queries(x.q, i, g), program.load_cotangents(x.dout, i, g)
    queries = program.queries(x.queries, i, 1)
    lse, delta = (None if ref is None else ref[g, pl.ds(i * block, block)][:, None] for ref in (x.lse, x.delta))
    slope, bias = _scalar(x.heads.alibi_slopes, g), _scalar(x.heads.sigmoid_bias, g)
    bounds, full_head = program.bounds(x, i)

    def visit(j, carry, masked):
        dq, dbias = carry
        keys = program.keys(x.keys, j, 0)
        k, v = (program.load_keys(ref, j, masked) for ref in (x.k, x.v))
        logits, derivative = program.logits(program.dot(q, k, (1, 1)), queries, keys, slope, bias)
        mask = program.mask(queries, keys, full_head) if masked else None
        dweights = program.dot(dout, v, (1, 1))
        _, dlogits, dproducts = program.gradients(logits, derivative, mask, dweights, lse, delta)
        if dbias is not None:
            dbias += dlogits.sum(axis=1)
        return dq + program.dot(dproducts.astype(k.dtype), finite(k) if masked else k), dbias

    dbias = None if dbias_ref is None else jnp.zeros((block,), jnp.float32)
    dq, dbias = program.loops(bounds, visit, (jnp.zeros(q.shape, jnp.float32), dbias))
    program.store_queries(dq_ref, i, dq * program.scale)
    if dbias_ref is not None:
        dbias_ref[...] = dbias


def _dkv_kernel(program: GpuProgram, x: Operands, dk_ref, dv_ref):
    j = pl.program_id(0)
    block = program.tile.q_block
    k, v = (program.load_keys(ref, j) for ref in (x.k, x.v))
    keys = program.keys(x.keys, j, 1)
    bounds, full_head = program.bounds(x, j)

    def head(g, carry):
        slope, bias = _scalar(x.heads.alibi_slopes, g), _scalar(x.heads.sigmoid_bias, g)

        def visit(i, carry, masked):  # tiles are [bk, bq]
            dk, dv = carry
            queries = program.queries(x.queries, i, 0)
            q, dout = (program.load_queries(x.q, i, g, edge=masked), program.load_cotangents(x.dout, i, g, masked))
            rows = pl.ds(i * block, block)
            lse, delta = (None if ref is None else ref[g, rows][None, :] for ref in (x.lse, x.delta))
            logits, derivative = program.logits(program.dot(k, q, (1, 1)), queries, keys, slope, bias)
            mask = program.mask(queries, keys, full_head) if masked else None
            dweights = program.dot(v, dout, (1, 1))
            weights, _, dproducts = program.gradients(logits, derivative, mask, dweights, lse, delta)
            if masked:
                q, dout = finite(q), finite(dout)
            dv += program.dot(weights.astype(dout.dtype), dout)
            return dk + program.dot(dproducts.astype(q.dtype), q), dv

        return program.loops(bounds, visit, carry)

    zeros = jnp.zeros(k.shape, jnp.float32)
    group = x.q.shape[1]
    if program.per_kv_head == 1:
        dk, dv = lax.fori_loop(0, group, head, (zeros, zeros))
    else:
        dk, dv = head(lax.rem(pl.program_id(1), group), (zeros, zeros))
    program.store_keys(dk_ref, j, dk * (program.scale / program.query_factor))
    program.store_keys(dv_ref, j, dv)
