"""What the TPU kernels share: the static side of a call, logits and masks of one tile, and what describes tokens.

Arrays are head-major, q [B, H, T, D] and k, v [B, K, S, D], with lengths that are multiples of the blocks.

Units. A kernel's logits come in base 2 for softmax, so that exp2 needs no multiplication, and halved for sigmoid,
which is 0.5 + 0.5 tanh(x / 2) because tanh is one instruction. The factor, with the scale, is in q already
(`query_factor`), for sigmoid all but a rest (`rest_factor`).
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.blocks import Tiles, vmem_limit
from pallas_kernels.math.parts import LOG2E
from pallas_kernels.math.ring import RowOrder
from pallas_kernels.math.spec import AttentionSpec, Coordinates, visible

MASKED = -1e30  # finite, so that a difference of two is no NaN
LANES = 128

Ref = Any  # Pallas references have no useful static types

NN = ((1,), (0,))  # a @ b
NT = ((1,), (1,))  # a @ b.T


@dataclasses.dataclass(frozen=True)
class Call:
    """The static side of one call."""

    spec: AttentionSpec
    tiles: Tiles
    window_kernel: bool = False  # default positions, causal, and a window that fits: the whole window in one grid step
    max_window: int = 2048  # that a window kernel takes: `longest_window`
    indexed: bool = False  # query and key i are token i of each row of the batch, segments or not
    order: RowOrder | None = None  # of a row that devices share: the queries are one device's, the keys all
    outside: bool = False  # attend to what `spec` does *not* see of the keys that full attention would
    has_slopes: bool = False
    has_bias: bool = False
    zero_cut: int = 0  # the `window.Cut` that a zero in scalar memory stands for: what a simulator reads
    rotated_by: int = (
        0  # `Rotation.distance` of queries that the kernels are to rotate (`rotation`); 0: of rotated ones
    )
    abreast: int = 1  # heads that lie side by side in the lanes of q, k and v (`pairs`)
    in_parts: bool = False  # more is to be added to the result, which therefore is not rounded to q's dtype
    interpret: bool | pltpu.InterpretParams = False

    @property
    def softmax(self) -> bool:
        return self.spec.activation == "softmax"

    @property
    def sums_on_mxu(self) -> bool:
        """Whether a forward kernel's row sums come from columns of ones next to V (`beside_ones`)."""
        return self.softmax and self.tiles.sum_on_mxu

    @property
    def has_head_bias(self) -> bool:
        """Whether ALiBi or a bias is added to the logits."""
        return self.has_slopes or self.has_bias

    def result_dtype(self, q: jax.Array) -> jnp.dtype:
        return jnp.dtype(jnp.float32) if self.in_parts else q.dtype

    @property
    def unit(self) -> float:
        return LOG2E if self.softmax else 0.5

    @property
    def query_factor(self) -> float:
        """What q is multiplied by before it enters a kernel.

        Sigmoid has no normaliser that would take up what a rounded q adds to every logit of a row: only a power of two,
        which rounds nothing, goes into q.
        """
        return self._factor if self.softmax else 2.0 ** math.floor(math.log2(self._factor))

    @property
    def rest_factor(self) -> float:
        """What the products of that q and k are multiplied by, in [1, 2)."""
        return self._factor / self.query_factor

    @property
    def _factor(self) -> float:
        """The factor on q.k on the way to the logits, or to the softcap's tanh."""
        assert self.spec.scale is not None  # `make_call` says it
        softcap = self.spec.logit_softcap
        return self.spec.scale * self.unit if softcap is None else self.spec.scale / softcap

    @property
    def product_factor(self) -> float:
        """The derivative of a logit by its product of (multiplied) q and k, the softcap's own derivative aside."""
        softcap = self.spec.logit_softcap
        return self.rest_factor * (1 / self.unit if softcap is None else softcap)


def window_of(call: Call) -> int:
    """The window of a call that is known to have one."""
    assert call.spec.window is not None
    return call.spec.window


class LaunchHeads(NamedTuple):
    """The heads that one launch serves: all, or the first `count` of `order` (a traced count bounds the grid)."""

    count: jax.Array | int  # type: ignore[assignment]  # of tuples, a method that nothing here calls
    order: jax.Array | None = None  # [K] int32

    def queries(self, group: int) -> "LaunchHeads":
        """The query heads that read these KV heads."""
        if self.order is None:
            return LaunchHeads(self.count * group)
        order = self.order[:, None] * group + jnp.arange(group, dtype=jnp.int32)
        return LaunchHeads(self.count * group, order.reshape(-1))

    def prefetched(self) -> tuple[jax.Array, ...]:
        return () if self.order is None else (self.order,)


def head_at(index, order) -> jax.Array:
    """The head of a grid index, `order` being `LaunchHeads.prefetched` as the kernel or an index map got it."""
    return order[0][index] if order else index


class TpuOperands(NamedTuple):
    """What every launch of a call reads, heads first and in whole blocks."""

    q: jax.Array  # [B, H, T, D], times `Call.query_factor`
    k: jax.Array  # [B, K, S, D]
    v: jax.Array  # [B, K, S, D]
    head_bias: jax.Array  # [2, H] f32: ALiBi slopes and biases, zeros where there are none
    where: Coordinates
    full_heads: jax.Array | None = None  # [K] bool


class OutGradients(NamedTuple):
    """What a backward launch reads beside."""

    dout: jax.Array  # [B, H, T, D]
    statistics: jax.Array | None  # [B, H, 8, T] f32: lse in base 2 and delta, the rest unused; None for sigmoid


class LaunchGrid(NamedTuple):
    """The steps of a launch: row of the batch, one of `heads`, and whatever else."""

    shape: tuple[Any, ...]
    heads: LaunchHeads
    scalars: Sequence[jax.Array] = ()  # for scalar memory; index maps get them too, with the head order behind them


class Blocked(NamedTuple):
    """An input or output of a launch, and which block of it a step has."""

    array: Any  # of an output, its shape
    spec: pl.BlockSpec
    becomes: int | None = None  # of an input: the output written into it, block by block, each read before


def describe_tokens(where: Coordinates) -> tuple[jax.Array, jax.Array]:
    """Queries and keys as the kernels read them, a row of numbers for each property: [B or 1, 8, T or S] int32.

    The rows are position, segment and, of queries, whether the row is full.
    """

    def rows(*properties):
        first = properties[0]
        given = [jnp.zeros_like(first) if x is None else x.astype(jnp.int32) for x in properties]
        given = list(jnp.broadcast_arrays(*given))
        return jnp.stack(given + [jnp.zeros_like(given[0])] * (8 - len(given)), axis=1)

    q_pos, kv_pos = jnp.asarray(where.q_pos), jnp.asarray(where.kv_pos)
    return rows(q_pos, where.q_segment_ids, where.full_rows), rows(kv_pos, where.kv_segment_ids)


def whole_lanes(size: int) -> int:
    return -(-size // LANES) * LANES


def stored(room: Ref, tiles: list[Any]) -> list[Any]:
    """The same tiles with their logits in VMEM, where each is written once. The compiler would spill them more often.

    Args:
      room: [rows, keys] f32; each tile takes whole lanes of it.
      tiles: named tuples with `logits`, [rows, keys] or fewer.
    """
    column, found = 0, []
    for tile in tiles:
        rows, size = tile.logits.shape
        logits = room.at[:rows, column : column + size]
        logits[...] = tile.logits
        found.append(tile._replace(logits=logits))
        column += whole_lanes(size)
    return found


def by_head(head_bias: jax.Array) -> jax.Array:
    """[2, H] -> [H, 8, LANES], a tile a head: vector memory, as simulators of some chips know no scalar memory."""
    return jnp.broadcast_to(jnp.pad(head_bias.T, [(0, 0), (0, 6)])[:, :, None], (head_bias.shape[1], 8, LANES))


def slope_and_bias(head_bias: Ref):
    """Of a head, [1, 1] each, from its tile of `by_head`; None where the call has neither."""
    return None if head_bias is None else (head_bias[0:1, 0:1], head_bias[1:2, 0:1])


def batch_index(b, info: jax.Array):
    """The row of `describe_tokens` for a row of the batch."""
    return b if info.shape[0] > 1 else 0


def tile_mask(call: Call, has_segments: bool, has_full_rows: bool, query, key, shape: tuple[int, ...]) -> jax.Array:
    """`visible` on one tile.

    Args:
      query, key: rows of `describe_tokens` along axis 0 and 1 of the tile (or 1 and 0), each broadcastable to `shape`.
    """

    def spread(x, wanted=True):  # Comparisons of whole tiles, as a boolean vector does not broadcast.
        return jnp.broadcast_to(x, shape) if wanted else None

    spec = call.spec
    band = spec.window is not None and spec.causal and spec.banded
    if call.outside and band and not (spec.num_sink_tokens or has_full_rows):
        # One comparison: padding keys come behind every query, and padding queries before every key.
        key_pos = jnp.where(key[0] < 0, jnp.iinfo(jnp.int32).max, key[0])
        seen = spread(key_pos) <= spread(query[0] - spec.window)
        return seen & (spread(query[1]) == spread(key[1])) if has_segments else seen
    q_pos, q_segment_ids, full = spread(query[0]), spread(query[1], has_segments), spread(query[2], has_full_rows)
    kv_pos, kv_segment_ids = spread(key[0]), spread(key[1], has_segments)
    full = None if full is None else full != 0
    seen = visible(call.spec, q_pos, kv_pos, q_segment_ids, kv_segment_ids, full)
    if call.outside:
        seen = visible(call.spec.full, q_pos, kv_pos, q_segment_ids, kv_segment_ids) & ~seen
    return seen


def form_logits(call: Call, products: jax.Array, addend) -> tuple[jax.Array, jax.Array | None]:
    """Logits in the kernel's unit from q.k, and the softcap's derivative (None without softcap).

    Args:
      addend: function giving what ALiBi and the bias add, in the same unit; called if the call has either.
    """
    derivative = None
    if call.rest_factor != 1:
        products = products * call.rest_factor
    if call.spec.logit_softcap is not None:
        tanh = jnp.tanh(products)
        products, derivative = (call.spec.logit_softcap * call.unit) * tanh, 1 - tanh * tanh
    if call.has_head_bias:
        # Subtracted, as the compiler folds what is added to a product into the matmul, which then waits for it: the
        # backward pass took twice as long.
        products = products - (-addend())
    return products, derivative


def addend_at(call: Call, query, key, by_head):
    """ALiBi and bias of a tile.

    Args:
      query, key: rows of `describe_tokens` along the axes of the tile; read only if the call has slopes.
      by_head: slope and bias.
    """
    slope, bias = by_head
    if not call.has_slopes:
        return bias * call.unit
    ramp = (slope * call.unit) * (query[0] - key[0]).astype(jnp.float32)
    return ramp + bias * call.unit if call.has_bias else ramp


def sigmoid_weights(logits: jax.Array) -> jax.Array:
    """sigmoid(2 * logits): exactly zero where masked."""
    return 0.5 + 0.5 * jnp.tanh(logits)


def dot(a: jax.Array, b: jax.Array, contract: tuple[tuple[int, ...], tuple[int, ...]]) -> jax.Array:
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    return lax.dot_general(a, b, (contract, ((), ())), precision=precision, preferred_element_type=jnp.float32)


def largest_divisor(n: int, most: int) -> int:
    """The largest divisor of n that is at most `most`, and at least 1."""
    return max(i for i in range(1, n + 1) if n % i == 0 and i <= max(most, 1))


def sigmoid_values(weights, value, contract=NN):
    """weights @ value. Without a normaliser the rounding of many weights near 1 adds up: what it cut off is added."""
    high = weights.astype(value.dtype)
    acc = dot(high, value, contract)
    if value.dtype == jnp.float32:
        return acc
    return acc + dot((weights - high.astype(jnp.float32)).astype(value.dtype), value, contract)


def over_lanes(operator, tiles):
    """Combines tiles column group by column group, leaving [rows, LANES] for one pass over the lanes at the end."""
    width = math.gcd(LANES, *(tile.shape[1] for tile in tiles))
    groups = [tile[:, start : start + width] for tile in tiles for start in range(0, tile.shape[1], width)]
    return functools.reduce(operator, groups)


def beside_ones(values: jax.Array) -> jax.Array:
    """Values [keys, D], and columns of ones up to the next whole lanes: a product gives the weights' sums there."""
    num_keys, width = values.shape
    return jnp.concatenate([values, jnp.ones((num_keys, whole_lanes(width + 1) - width), values.dtype)], axis=1)


def read_width(call: Call, head_dim: int) -> int:
    """Columns of a head as forward kernels read it: whole lanes, of which `own_columns` are used."""
    return whole_lanes(head_dim) if call.sums_on_mxu else head_dim


def own_columns(x: jax.Array, head_dim: int) -> jax.Array:
    """x [n, D or whole lanes] with zeros in the columns that are not the head's; inside a kernel.

    By words of 32 bits: a mask for rows of bf16 would be made anew for each register.
    """
    if x.shape[1] == head_dim:
        return x
    words = pltpu.bitcast(x, jnp.int32)
    return pltpu.bitcast(jnp.where(lax.broadcasted_iota(jnp.int32, words.shape, 1) < head_dim, words, 0), x.dtype)


def sees_nothing(top: jax.Array) -> jax.Array:
    """Whether a row's greatest logit is still MASKED; not if it is NaN, which is not to be hidden."""
    return top <= 0.5 * MASKED


def take(items, *wanted: bool) -> Any:
    """The next item for each of `wanted` that is true and None for each of the others, then the rest."""
    items = list(items)
    return *(items.pop(0) if want else None for want in wanted), items


def split(items, *counts: int) -> Any:
    """Consecutive parts of a sequence, of the given lengths, and the rest."""
    parts, start = [], 0
    for count in counts:
        parts.append(items[start : start + count])
        start += count
    return *parts, items[start:]


def launch(
    call: Call,
    kernel,
    name: str,
    *,
    grid: LaunchGrid,
    inputs: Sequence[Blocked],
    outputs: Sequence[Blocked],
    scratch: Sequence[Any] = (),
    previous: Sequence[jax.Array] = (),
    cost: pl.CostEstimate | None = None,
) -> tuple[jax.Array, ...]:
    """`pallas_call` as all kernels here want it.

    Args:
      kernel: takes the head order, then refs of scalars, inputs, outputs and scratch.
      previous: results of another launch to write into, this one's heads only; each as the output it becomes.
      cost: `cost_of` the launch.
    """
    prefetched = (*grid.scalars, *grid.heads.prefetched())
    num_scalars, given = len(grid.scalars), len(prefetched) + len(inputs)

    def body(*refs):
        order = refs[num_scalars : len(prefetched)]
        kernel(order, *refs[:num_scalars], *refs[len(prefetched) : given], *refs[given + len(previous) :])

    semantics: list[Any] = ["parallel", "parallel"] + ["arbitrary"] * (len(grid.shape) - 2)
    in_place = {len(prefetched) + i: x.becomes for i, x in enumerate(inputs) if x.becomes is not None}
    return pl.pallas_call(
        body,
        out_shape=[x.array for x in outputs],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetched),
            grid=grid.shape,
            in_specs=[*(x.spec for x in inputs), *[pl.BlockSpec(memory_space=pl.ANY)] * len(previous)],
            out_specs=[x.spec for x in outputs],
            scratch_shapes=scratch,
        ),
        input_output_aliases={given + i: i for i in range(len(previous))} | in_place,
        compiler_params=pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=vmem_limit()),
        interpret=call.interpret,
        name=name,
        cost_estimate=cost,
    )(*prefetched, *(x.array for x in inputs), *previous)


def cost_of(call: Call, q: jax.Array, k: jax.Array, *, backward: bool = False) -> pl.CostEstimate:
    """What a pass of all heads takes: the compiler sends more beside a kernel of which it knows that it takes time.

    Args:
      q: [B, H, T, D].
      k: [B, K, S, D].
    """
    batch, heads, length, head_dim = q.shape
    kv_length, window = k.shape[2], call.spec.window
    keys = kv_length // 2 if window is None or call.outside else min(window, kv_length)
    pairs, products = batch * heads * length * keys, 5 if backward else 2
    arrays = products * q.size * q.dtype.itemsize + (4 if backward else 2) * k.size * k.dtype.itemsize
    return pl.CostEstimate(flops=2 * products * pairs * head_dim, transcendentals=pairs, bytes_accessed=arrays)


def shape_like(shape: tuple[int, ...], dtype, like: jax.Array) -> jax.ShapeDtypeStruct:
    """An output's shape; inside shard_map it varies over the mesh as `like` does."""
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(like).manual_axis_type)
