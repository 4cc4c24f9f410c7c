"""The next-token loss of hidden states, in chunks, on one device or a mesh."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from swa_jax.model.sharding import Partition, whole

CHUNK = 1024  # tokens whose logits exist at one time
LOG_Z = "log_z"  # the name by which it is saved for the backward pass


class Teacher(NamedTuple):
    """What another model says of each place's target: its K likeliest tokens."""

    tokens: jax.Array  # [B, T, K] int32, distinct where there is a target
    logprobs: jax.Array  # [B, T, K] f32, nats


class TeacherStates(NamedTuple):
    """The whole distribution of another model at each place, as hidden states and the matrix that they meet."""

    hidden: jax.Array  # [B, T, d], normed
    head: jax.Array  # [d, V]
    weight: jax.Array  # [B, T] f32: 0 where nothing is learned of it
    temperature: float  # that logits of both models are divided by


class TokenLoss(NamedTuple):
    nll: jax.Array  # [B, T] f32: of the *next* token, 0 where there is no target
    weight: jax.Array  # [B, T] f32: weight of that target, 0 where there is none
    correct: jax.Array  # [B, T] f32: 1 where the most likely token is the target
    log_z: jax.Array  # [B, T] f32: log of the softmax's denominator, 0 where there is no target
    divergence: jax.Array | None = None  # [B, T] f32: KL from the teacher, 0 where nothing is learned of it


def next_token_targets(
    tokens: jax.Array, segment_ids: jax.Array, weights: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Targets [B, T] int32 and their weights [B, T] f32: token t + 1 of the same segment, else weight 0.

    `weights` [B, T] belong to the *predicted* tokens (unshifted, as Hugging Face's labels are); None means 1.
    """
    targets = jnp.roll(tokens, -1, axis=1)
    follows = (jnp.roll(segment_ids, -1, axis=1) == segment_ids) & (segment_ids != 0)
    follows = follows.at[:, -1].set(False).astype(jnp.float32)
    return targets, follows if weights is None else follows * jnp.roll(weights, -1, axis=1)


def token_loss(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    chunk: int = CHUNK,
    partition: Partition | None = None,
    *,
    teacher: Teacher | TeacherStates | None = None,
    logit_multiplier: float = 1.0,
    logit_softcap: float | None = None,
) -> TokenLoss:
    """Cross-entropy in nats; logits exist for `chunk` tokens at a time (on each device), forward and backward.

    Args:
      hidden: [B, T, d]; head: [d, V]; targets: [B, T] int32; weights: [B, T] f32.
      teacher: adds the divergence from it: of `Teacher` at each target (`_divergence`), of `TeacherStates` wherever it
        has weight (`_whole_divergence`); its logits exist for a chunk at a time too.
      partition: the mesh they lie on; each device then scores its tokens over its part of the vocabulary.
      logit_multiplier, logit_softcap: as in `scaled_logits`.
    """
    adjust = functools.partial(scaled_logits, multiplier=logit_multiplier, softcap=logit_softcap)
    axis = None if partition is None or partition.size("vocab") == 1 else partition.rules.axes("vocab")[0]
    temperature, teacher_head = 1.0, None
    said: Any = teacher
    if isinstance(teacher, TeacherStates):
        temperature, teacher_head, said = teacher.temperature, teacher.head, (teacher.hidden, teacher.weight)
    loss: Callable[..., Any] = functools.partial(
        _local_loss, chunk=chunk, axis=axis, adjust=adjust, temperature=temperature, partition=partition
    )
    if partition is not None:
        tokens, head_spec = partition.spec("batch", "sequence"), partition.spec("embed", "vocab")
        loss = jax.shard_map(
            loss,
            mesh=partition.mesh,
            in_specs=(tokens, head_spec, tokens, tokens, tokens, head_spec),
            out_specs=tokens,
            check_vma=False,  # with it, differentiating this fails inside JAX 0.12.0 ("too few leaves")
        )
    nll, correct, log_z, divergence = loss(hidden, head, targets, weights, said, teacher_head)
    return TokenLoss(nll, weights, correct, log_z, divergence)


def scaled_logits(logits: jax.Array, multiplier: float, softcap: float | None) -> jax.Array:
    """c * tanh(multiplier * logits / c) for the softcap c, f32; None caps nothing."""
    if multiplier != 1:
        logits = logits * multiplier
    return logits if softcap is None else softcap * jnp.tanh(logits / softcap)


def _local_loss(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    teacher: Teacher | tuple[jax.Array, jax.Array] | None,
    teacher_head: jax.Array | None,
    *,
    chunk: int,
    axis: str | None,
    adjust: Callable[[jax.Array], jax.Array],
    temperature: float,
    partition: Partition | None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """nll, correct, log_z and divergence of `TokenLoss`; `axis`: the mesh axis that splits the vocabulary.

    With a `teacher_head` [d, V] the teacher is its hidden states [B, T, d] and the weights [B, T] of what it says.
    """
    if partition is not None:
        head, teacher_head = jax.tree.map(lambda one: whole(one, partition, "embed", 0), (head, teacher_head))
    batch, length, _ = hidden.shape
    rows = batch * length
    chunk = min(chunk, rows)
    padding = -rows % chunk
    first = 0 if axis is None else jax.lax.axis_index(axis) * head.shape[1]  # token id of this part's first column

    def split(x: jax.Array) -> jax.Array:
        flat = x.reshape(rows, *x.shape[2:])
        return jnp.pad(flat, [(0, padding)] + [(0, 0)] * (flat.ndim - 1)).reshape(-1, chunk, *flat.shape[1:])

    def logits_of(x: jax.Array, head: jax.Array) -> jax.Array:
        return adjust(jnp.einsum("cd,dv->cv", x, head, preferred_element_type=jnp.float32))

    wide = head.astype(jnp.float32)  # so that the gradients of the chunks add up in f32

    # The backward pass recomputes the chunk's logits, which are many, but not what was read off them.
    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(LOG_Z))
    def one_chunk(
        _: None, piece: tuple[jax.Array, jax.Array, jax.Array, Any]
    ) -> tuple[None, tuple[jax.Array | None, ...]]:
        x, target, weight, teacher = piece
        logits = logits_of(x, wide.astype(head.dtype))  # [chunk, V]
        log_total, top, chosen = _over_vocabulary(logits, target, first, axis)
        scored = weight > 0
        divergence = None
        if teacher_head is not None:
            theirs, learned = teacher
            divergence = _whole_divergence(logits, logits_of(theirs, teacher_head), temperature, axis)
            divergence = jnp.where(learned > 0, divergence, 0)
        elif teacher is not None:
            divergence = jnp.where(scored, _divergence(logits, top + log_total, teacher, first, axis), 0)
        return None, (
            jnp.where(scored, log_total + (top - chosen), 0),  # not from log_z, which is rounded as logits are
            scored & (chosen >= top),
            jnp.where(scored, top + log_total, 0),
            divergence,
        )

    pieces = jax.tree.map(split, (hidden, targets, weights, teacher))
    _, found = jax.lax.scan(one_chunk, None, pieces)

    def join(x: jax.Array) -> jax.Array:
        return x.reshape(-1)[:rows].reshape(batch, length).astype(jnp.float32)

    return jax.tree.map(join, found)


def _over_vocabulary(
    logits: jax.Array, target: jax.Array, first: jax.Array | int, axis: str | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """log sum exp(logits - top), the greatest logit `top`, and the target's, each [chunk].

    Args:
      logits: [chunk, V], or the part of the vocabulary from token `first`.

    Sums over the row read it once and side by side, where a gather and its gradient, a scatter, would have it written.
    """
    token = first + jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    chosen = jnp.sum(jnp.where(token == target[:, None], logits, 0), axis=-1)
    top = jax.lax.stop_gradient(logits).max(axis=-1)
    if axis is not None:
        chosen, top = jax.lax.psum(chosen, axis), jax.lax.pmax(top, axis)
    return _log_total(axis, logits, top), top, chosen


def _divergence(
    logits: jax.Array, log_z: jax.Array, teacher: Teacher, first: jax.Array | int, axis: str | None
) -> jax.Array:
    """KL(p || q) in nats [chunk], the teacher p and the model q seen as K tokens and one class for all others:

    sum_k p_k (log p_k - log q_k) + p_r (log p_r - log q_r), where p_r = 1 - sum_k p_k and q_r = 1 - sum_k q_k.

    Without the last term q could give any share to tokens that p thinks unlikely.

    Args:
      logits: [chunk, V], or the part of the vocabulary from token `first`; log_z: [chunk].
      teacher: leaves [chunk, K] with K < V.
    """
    size = logits.shape[1]
    place = teacher.tokens - first  # [chunk, K]
    here = (place >= 0) & (place < size)
    chosen = jnp.where(here, jnp.take_along_axis(logits, jnp.where(here, place, 0), axis=1), 0)
    row = jnp.arange(len(logits))[:, None]
    others = logits.at[row, jnp.where(here, place, size)].set(-jnp.inf, mode="drop")
    top = jax.lax.stop_gradient(others).max(axis=-1)
    if axis is not None:
        chosen, top = jax.lax.psum(chosen, axis), jax.lax.pmax(top, axis)
    log_q = chosen - log_z[:, None]
    log_q_rest = top + _log_total(axis, others, top) - log_z  # not from 1 - sum q, which cancels
    p = jnp.exp(teacher.logprobs)
    p_rest = jnp.maximum(1 - p.sum(axis=-1), 0)  # stored log-probabilities are rounded
    log_p_rest = jnp.log(jnp.where(p_rest > 0, p_rest, 1))
    return (p * (teacher.logprobs - log_q)).sum(axis=-1) + p_rest * (log_p_rest - log_q_rest)


def _whole_divergence(logits: jax.Array, theirs: jax.Array, temperature: float, axis: str | None) -> jax.Array:
    """KL(p || q) in nats [chunk], p and q the softmax over `theirs` and `logits`, both divided by the temperature.

    Args:
      logits, theirs: [chunk, V], or a part of the vocabulary. No gradient is asked of `theirs`.
    """

    def log_softmax(logits: jax.Array) -> jax.Array:
        logits = logits if temperature == 1 else logits / temperature
        top = jax.lax.stop_gradient(logits).max(axis=-1)
        top = top if axis is None else jax.lax.pmax(top, axis)
        return logits - (top + _log_total(axis, logits, top))[:, None]

    log_p, log_q = log_softmax(theirs), log_softmax(logits)
    divergence = (jnp.exp(log_p) * (log_p - log_q)).sum(axis=-1)
    return divergence if axis is None else jax.lax.psum(divergence, axis)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _log_total(axis: str | None, logits: jax.Array, top: jax.Array) -> jax.Array:
    """[chunk]; no gradient flows to `top`."""
    return _log_total_fwd(axis, logits, top)[0]


def _log_total_fwd(axis: str | None, logits: jax.Array, top: jax.Array) -> Any:
    total = jnp.exp(logits - top[:, None]).sum(axis=-1)
    if axis is not None:
        total = jax.lax.psum(total, axis)
    log_total = jnp.log(total)
    return log_total, (logits, checkpoint_name(top + log_total, LOG_Z))


def _log_total_bwd(axis: str | None, saved: tuple[jax.Array, jax.Array], cotangent: jax.Array) -> Any:
    logits, log_z = saved
    if axis is not None:  # what each device is given is its share of the cotangent
        cotangent = jax.lax.psum(cotangent, axis)
    return cotangent[:, None] * jnp.exp(logits - log_z[:, None]), None


_log_total.defvjp(_log_total_fwd, _log_total_bwd)
