"""The algebra of attention in parts: disjoint key sets, sink logits, and routing, for any kernel underneath.

A query's keys are split into those that a spec sees (the window, its sink tokens) and those outside. Softmax
over both follows exactly from the softmax over each and its lse; sigmoid parts add up.
"""

import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.math.spec import Coordinates, PerHead

LOG2E = math.log2(math.e)


def natural_lse(lse: jax.Array | None) -> jax.Array | None:
    """The natural log-sum-exp from a kernel's, which is in base 2 (both None for sigmoid).

    Kernels take exponentials in base 2, and their backward passes subtract lse from logits in the same unit. There and
    back again would cost digits: 1e4 * log2 e rounded is off by 5e-4, and so is every weight. So residuals stay in base
    2, and only what a differentiable function returns goes through here.
    """
    return None if lse is None else lse * (1 / LOG2E)


def route(
    part: Callable,
    q: jax.Array,
    gate: jax.Array,
    where: Coordinates,
    sink_logits: jax.Array | None,
    *,
    inference: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """SwiAttn from window and outside: gate * O_full + (1 - gate) * O_window [B, T, H, D], and the
    disagreement [B, T].

    Args:
      part: `part(q, where, outside)` returns the out [B, T, H, D] and lse [B, T, H] (None for sigmoid) of the
        keys that the spec sees, or of the others; its backward pass skips query blocks whose cotangents are all zero.
      gate: [B, T]. Rows whose gate is 0 send no gradient outside. Sorted behind the others, they fill whole
        blocks.
      inference: leave rows whose gate is 0 out of the pass over the keys outside; their disagreement is then 0.
    """
    window, window_lse = part(q, where, False)

    order, inverse = front(gate != 0)
    rows = {name: getattr(where, name) for name in ("q_pos", "q_order", "q_segment_ids", "full_rows")}
    rows = jax.tree.map(lambda x: permute(jnp.broadcast_to(x, order.shape), order, inverse), rows)
    if inference:
        rows["q_pos"] = jnp.where(permute(gate, order, inverse) == 0, -1, rows["q_pos"])
    outside = part(permute(q, order, inverse), where._replace(**rows), True)
    outside, outside_lse = jax.tree.map(lambda x: permute(x, inverse, order), outside)

    if window_lse is None:
        full, full_lse = window + outside, None
    else:
        full, full_lse = merge(window, window_lse, outside, outside_lse)
    out, disagreement = mix(gate, window, window_lse, full, full_lse, sink_logits)
    # Where nothing was added outside, the compiler may still round the two branches apart.
    return out, jnp.where(gate == 0, 0, disagreement) if inference else disagreement


def mix(gate, window, window_lse, full, full_lse, sink_logits) -> tuple[jax.Array, jax.Array]:
    """gate * O_full + (1 - gate) * O_window [B, T, H, D] f32, and the mean squared difference of the two [B, T]."""
    full, _ = join_sinks(full.astype(jnp.float32), full_lse, sink_logits)
    window, _ = join_sinks(window.astype(jnp.float32), window_lse, sink_logits)
    share = gate.astype(full.dtype)[:, :, None, None]
    return share * full + (1 - share) * window, jnp.square(full - window).mean(axis=(2, 3))


def merge(out_a, lse_a, out_b, lse_b, base: Literal["e", 2] = "e"):
    """Softmax over the union of two disjoint key sets from the softmax over each; lse is to this base."""
    exp, log = (jnp.exp, jnp.log) if base == "e" else (jnp.exp2, jnp.log2)
    top = lax.stop_gradient(jnp.maximum(lse_a, lse_b))
    top = jnp.where(top == -jnp.inf, 0, top)
    part_a, part_b = exp(lse_a - top), exp(lse_b - top)
    total = part_a + part_b
    sees_any = total != 0  # NaN is not to be hidden
    total = jnp.where(sees_any, total, 1)
    out = out_a * (part_a / total)[..., None] + out_b * (part_b / total)[..., None]
    return out, jnp.where(sees_any, top + log(total), -jnp.inf)


def join_sinks(out, lse, sink_logits):
    """Adds exp(sink) to the softmax denominator: out shrinks by 1 / (1 + exp(sink - lse))."""
    if sink_logits is None:
        return out, lse
    sink_logits = sink_logits.astype(lse.dtype)
    sees_any = lse != -jnp.inf  # true for NaN, which is not to be hidden
    shown = jnp.where(sees_any, lse, 0)  # a sink logit may be -inf too, and their difference NaN
    joined = jnp.logaddexp(shown, sink_logits)
    share = jnp.where(sees_any, jax.nn.sigmoid(shown - sink_logits), 0)
    return out * share[..., None], jnp.where(sees_any, joined, -jnp.inf)


def front(member: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The permutation of each row of `member` [B, T] bool that moves members to its front, orders kept; its inverse.

    One sort of one array: sorting twice would take a kernel's time.
    """
    member = member.astype(jnp.int32)
    length = member.shape[1]
    inverse = jnp.where(
        member == 1,
        jnp.cumsum(member, axis=1) - 1,
        member.sum(axis=1, keepdims=True) + jnp.cumsum(1 - member, axis=1) - 1,
    )
    index = jnp.arange(length, dtype=jnp.int32)
    return jnp.sort(jnp.where(member == 1, index, index + length), axis=1) % length, inverse


def members(member: jax.Array, count: int) -> jax.Array:
    """The indexes of the first `count` members of each row of `member` [B, T] bool, in order: [B, count] int32.

    Where there are fewer, any index. Found block by block, without the sort or scatter that would take a kernel's time.
    """
    length, width = member.shape[1], 128
    blocks = jnp.pad(member, ((0, 0), (0, -length % width))).reshape(member.shape[0], -1, width)
    within = jnp.cumsum(blocks, axis=2, dtype=jnp.int32)  # [B, blocks, width]
    through = jnp.cumsum(within[:, :, -1], axis=1)
    rank = jnp.arange(count, dtype=jnp.int32)[:, None]
    block = (through[:, None] <= rank).sum(axis=2, dtype=jnp.int32)  # [B, count]
    one_hot = block[:, :, None] == jnp.arange(blocks.shape[1], dtype=jnp.int32)
    before = jnp.where(one_hot, (through - within[:, :, -1])[:, None], 0).sum(axis=2)
    # Its counts, which bfloat16 holds exactly: they are at most 128.
    counts = jnp.einsum("bcn,bnw->bcw", one_hot.astype(jnp.bfloat16), within.astype(jnp.bfloat16))
    column = (counts <= (rank[:, 0] - before)[:, :, None]).sum(axis=2, dtype=jnp.int32)
    return jnp.minimum(block * width + column, length - 1)


def in_blocks(where: Coordinates, q_block: int, kv_block: int, pad: Callable) -> Coordinates:
    """The coordinates with queries and keys in whole blocks, where `pad(x, block, fill)` extends an array."""

    def queries(x, fill):
        return None if x is None else pad(x, q_block, fill)

    def keys(x, fill):
        return None if x is None else pad(x, kv_block, fill)

    return Coordinates(
        q_pos=queries(where.q_pos, -1),
        kv_pos=keys(where.kv_pos, -1),
        q_order=queries(where.q_order, -1),
        kv_order=keys(where.kv_order, -1),
        q_segment_ids=queries(where.q_segment_ids, 0),
        kv_segment_ids=keys(where.kv_segment_ids, 0),
        full_rows=queries(where.full_rows, False),
    )


def scale_queries(q: jax.Array, per_head: PerHead) -> tuple[jax.Array, PerHead]:
    """The queries times `logit_scales`, and the options without them: kernels need not know them."""
    if per_head.logit_scales is None:
        return q, per_head
    scales = per_head.logit_scales[:, None].astype(jnp.promote_types(q.dtype, jnp.float32))  # [H, 1]
    return (q * scales).astype(q.dtype), per_head._replace(logit_scales=None)


# What the backward pass needs of the forward pass, by the names that `jax.checkpoint` policies know.
OUT, LSE = "attention_out", "attention_lse"


def named(out: jax.Array, lse: jax.Array | None = None) -> tuple[jax.Array, jax.Array | None]:
    """`out` and `lse` under their names, so that a policy can keep them and the kernel need not run again."""
    return checkpoint_name(out, OUT), None if lse is None else checkpoint_name(lse, LSE)


@jax.custom_vjp
def permute(x, order, inverse):
    """Reorders axis 1 of x [B, T, ...] by order [B, T]; with the inverse at hand the gradient is no scatter."""
    return jnp.take_along_axis(x, order.reshape(*order.shape, *(1,) * (x.ndim - 2)), axis=1)


permute.defvjp(
    lambda x, order, inverse: (permute(x, order, inverse), (order, inverse)),
    lambda saved, dx: (permute(dx, *saved[::-1]), None, None),
)


def vary_alike(tree):
    """Inside shard_map: marks every array as varying over the mesh axes that any of them varies over.

    The loops' carries mix all of them, and the transpose of this mark sums the gradient of a replicated one.
    """

    def varies_over(x) -> frozenset[str]:
        return frozenset(jax.typeof(x).manual_axis_type.varying)

    axes = frozenset[str]().union(*(varies_over(x) for x in jax.tree.leaves(tree)))
    return jax.tree.map(lambda x: lax.pcast(x, tuple(axes - varies_over(x)), to="varying"), tree)
