"""The next-token loss of hidden states, in chunks, on one device or a mesh."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from swa_jax.model.sharding import Partition, whole

CHUNK = 1024  # tokens whose logits exist at one time
LANES = 128  # tokens of the vocabulary, of which a piece has a multiple: what a TPU cuts arrays into


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
    """Cross-entropy in nats; logits of `chunk` tokens, or as many, exist at a time (on each device).

    Args:
      hidden: [B, T, d]; head: [d, V]; targets: [B, T] int32; weights: [B, T] f32.
      teacher: adds the divergence from it: of `Teacher` at each target (`_divergence`), of `TeacherStates` wherever it
        has weight (`_whole_divergence`); its logits exist for a chunk at a time too. No gradient flows to it.
      partition: the mesh they lie on; each device then scores its tokens over its part of the vocabulary.
      logit_multiplier, logit_softcap: as in `scaled_logits`.
    """
    axis = None if partition is None or partition.size("vocab") == 1 else partition.rules.axes("vocab")[0]
    how = _How(chunk, axis, logit_multiplier, logit_softcap)
    teacher_head = None
    said: Any = teacher
    if isinstance(teacher, TeacherStates):
        how = how._replace(temperature=teacher.temperature)
        teacher_head, said = teacher.head, (teacher.hidden, teacher.weight)
    loss: Callable[..., Any] = functools.partial(_local_loss, how, partition)
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


class _How(NamedTuple):
    chunk: int  # tokens whose logits exist at one time
    axis: str | None  # of the mesh, that splits the vocabulary
    multiplier: float
    softcap: float | None
    temperature: float = 1.0  # of a teacher's whole distribution

    def adjust(self, logits: jax.Array) -> jax.Array:
        return scaled_logits(logits, self.multiplier, self.softcap)

    def split(self, x: jax.Array) -> jax.Array:
        """[n, ...] -> [chunks, chunk, ...], with zeros at the end."""
        chunk = min(self.chunk, len(x))
        return jnp.pad(x, [(0, -len(x) % chunk)] + [(0, 0)] * (x.ndim - 1)).reshape(-1, chunk, *x.shape[1:])

    def logits(self, hidden: jax.Array, head: jax.Array) -> jax.Array:
        return self.adjust(jnp.einsum("nd,dv->nv", hidden, head, preferred_element_type=jnp.float32))

    def log_sum_exp(self, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The greatest logit `top` and log sum exp(logits - top), each [n]."""
        top = logits.max(axis=-1)
        top = top if self.axis is None else jax.lax.pmax(top, self.axis)
        return top, jnp.log(self.sum(jnp.exp(logits - top[:, None]).sum(axis=-1)))

    def sum(self, part: jax.Array) -> jax.Array:
        """Over the devices that have parts of the vocabulary."""
        return part if self.axis is None else jax.lax.psum(part, self.axis)


def scaled_logits(logits: jax.Array, multiplier: float, softcap: float | None) -> jax.Array:
    """c * tanh(multiplier * logits / c) for the softcap c, f32; None caps nothing."""
    if multiplier != 1:
        logits = logits * multiplier
    return logits if softcap is None else softcap * jnp.tanh(logits / softcap)


def _local_loss(
    how: _How,
    partition: Partition | None,
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    teacher: Any,
    teacher_head: jax.Array | None,
) -> Any:
    """nll, correct, log_z and divergence of `TokenLoss`.

    With a `teacher_head` [d, V] the teacher is its hidden states [B, T, d] and the weights [B, T] of what it says.
    """
    if partition is not None:
        head, teacher_head = jax.tree.map(lambda one: whole(one, partition, "embed", 0), (head, teacher_head))
    batch, length, _ = hidden.shape
    hidden, targets, weights, teacher = jax.tree.map(
        lambda x: x.reshape(batch * length, *x.shape[2:]), (hidden, targets, weights, teacher)
    )
    found = _scores(how, hidden, head, _Given(targets, weights, teacher, teacher_head))
    return jax.tree.map(lambda x: x.reshape(batch, length).astype(jnp.float32), found)


class _Given(NamedTuple):
    """What the scores of n tokens depend on and no gradient flows to."""

    targets: jax.Array  # [n]
    weights: jax.Array  # [n]
    teacher: Any  # `Teacher`, or hidden states [n, d] and weights [n], or None
    teacher_head: jax.Array | None  # [d, V]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scores(how: _How, hidden: jax.Array, head: jax.Array, given: _Given) -> Any:
    """nll, correct, log_z and divergence, each [n], of hidden states [n, d] and the head [d, V].

    The forward pass takes some tokens at a time, with all of the vocabulary. So does the backward pass if tokens
    outnumber the vocabulary. Otherwise it takes all tokens with a piece of the vocabulary, as many logits: the head's
    gradient, the largest array there is, is then written once, and what is added up piece by piece is as large as the
    hidden states.
    """
    return _scores_fwd(how, hidden, head, given)[0]


def _scores_fwd(how: _How, hidden: jax.Array, head: jax.Array, given: _Given) -> Any:
    rows, first = len(hidden), _first_token(how, head)

    def one_chunk(_: None, piece: tuple[jax.Array, jax.Array, jax.Array, Any]) -> tuple[None, Any]:
        x, target, weight, teacher = piece
        logits = how.logits(x, head)  # [chunk, V]
        chosen = how.sum(jnp.sum(jnp.where(_is(target, logits, first), logits, 0), axis=-1))
        top, log_total = how.log_sum_exp(logits)
        log_z, scored = top + log_total, weight > 0
        divergence, of_teacher = None, cast(Any, None)
        if given.teacher_head is not None:
            divergence, of_teacher = _whole_divergence(how, logits, how.logits(teacher[0], given.teacher_head))
            divergence = jnp.where(teacher[1] > 0, divergence, 0)
        elif teacher is not None:
            divergence, of_teacher = _divergence(how, logits, log_z, teacher, first)
            divergence = jnp.where(scored, divergence, 0)
        nll = jnp.where(scored, log_total + (top - chosen), 0)  # not from log_z, which is rounded as logits are
        found = nll, scored & (chosen >= top), jnp.where(scored, log_z, 0), divergence
        return None, (found, (log_z, of_teacher))

    pieces = jax.tree.map(how.split, (hidden, given.targets, given.weights, given.teacher))
    _, results = jax.lax.scan(one_chunk, None, pieces)
    found, saved = jax.tree.map(lambda x: x.reshape(-1)[:rows], results)
    return found, (hidden, head, given, *saved)


def _scores_bwd(how: _How, saved: Any, cotangents: Any) -> Any:
    hidden, head, given, log_z, of_teacher = saved
    to_nll, _, to_log_z, to_divergence = cotangents
    scored = given.weights > 0
    # What each device is given is its share of a cotangent.
    to_nll, to_log_z = (how.sum(jnp.where(scored, one, 0)) for one in (to_nll, to_log_z))
    if given.teacher is not None:
        taught = scored if given.teacher_head is None else given.teacher[1] > 0
        to_divergence = how.sum(jnp.where(taught, to_divergence, 0))
    tokens = _Tokens(hidden, given.targets, given.teacher, log_z, of_teacher, to_nll, to_log_z, to_divergence)
    gradients = functools.partial(_gradients, how, head, given.teacher_head)
    if len(hidden) <= head.shape[1]:
        return *gradients(head.dtype, tokens), None

    def one_chunk(total: jax.Array, chunk: _Tokens) -> tuple[jax.Array, jax.Array]:
        of_hidden, of_head = gradients(total.dtype, chunk)
        return total + of_head, of_hidden

    total = jnp.zeros(head.shape, jnp.float32)
    total, of_hidden = jax.lax.scan(one_chunk, total, jax.tree.map(how.split, tokens))
    return of_hidden.reshape(-1, hidden.shape[1])[: len(hidden)], total.astype(head.dtype), None


class _Tokens(NamedTuple):
    """What the gradient of n tokens' logits is made of."""

    hidden: jax.Array  # [n, d]
    targets: jax.Array  # [n]
    teacher: Any  # as of `_Given`
    log_z: jax.Array  # [n]
    of_teacher: Any  # what its divergence saved
    to_nll: jax.Array  # [n], cotangents
    to_log_z: jax.Array
    to_divergence: jax.Array | None

    def to_logits(self, how: _How, logits: jax.Array, first: Any, teacher_head: jax.Array | None) -> jax.Array:
        """The gradient of logits [n, v], whose tokens begin with `first`."""
        to_nll, share = self.to_nll[:, None], jnp.exp(logits - self.log_z[:, None])
        gradient = (to_nll + self.to_log_z[:, None]) * share - jnp.where(_is(self.targets, logits, first), to_nll, 0)
        if self.to_divergence is None:
            return gradient
        if teacher_head is not None:
            theirs = how.logits(self.teacher[0], teacher_head)
            more = _whole_divergence_gradient(how, logits, theirs, self.of_teacher)
        else:
            more = _divergence_gradient(logits, share, self.teacher, self.of_teacher, first)
        return gradient + self.to_divergence[:, None] * more


def _gradients(
    how: _How, head: jax.Array, teacher_head: jax.Array | None, dtype: Any, tokens: _Tokens
) -> tuple[jax.Array, jax.Array]:
    """Of the hidden states [n, d], and of the head [d, V] in `dtype`."""
    hidden, vocabulary, first = tokens.hidden, head.shape[1], _first_token(how, head)
    width = min(vocabulary, -(-vocabulary * how.chunk // (len(hidden) * LANES)) * LANES)

    def one_piece(start: Any, width: int, gradients: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        of_hidden, of_head = gradients
        part, theirs = (
            None if one is None else jax.lax.dynamic_slice_in_dim(one, start, width, axis=1)
            for one in (head, teacher_head)
        )
        raw = jnp.einsum("nd,dv->nv", hidden, part, preferred_element_type=jnp.float32)
        logits, adjusted = jax.vjp(how.adjust, raw)
        (gradient,) = adjusted(tokens.to_logits(how, logits, first + start, theirs))
        gradient = gradient.astype(jnp.result_type(hidden, part))
        of_part = jnp.einsum("nd,nv->dv", hidden, gradient, preferred_element_type=jnp.float32)
        of_head = jax.lax.dynamic_update_slice_in_dim(of_head, of_part.astype(dtype), start, axis=1)
        return of_hidden + jnp.einsum("nv,dv->nd", gradient, part, preferred_element_type=jnp.float32), of_head

    gradients = jnp.zeros(hidden.shape, jnp.float32), jax.lax.empty(head.shape, dtype)
    count, rest = divmod(vocabulary, width)
    gradients = jax.lax.fori_loop(0, count, lambda i, both: one_piece(i * width, width, both), gradients)
    if rest:
        gradients = one_piece(vocabulary - rest, rest, gradients)
    return gradients[0].astype(hidden.dtype), gradients[1]


_scores.defvjp(_scores_fwd, _scores_bwd)


def _first_token(how: _How, head: jax.Array) -> jax.Array | int:
    """The first token of this device's part of the vocabulary."""
    return 0 if how.axis is None else jax.lax.axis_index(how.axis) * head.shape[1]


def _is(target: jax.Array, logits: jax.Array, first: Any) -> jax.Array:
    """Whether a logit [n, v] is the target's [n]; its tokens begin with `first`.

    A sum over rows reads them once, beside other sums, where a gather and its gradient, a scatter, have them written.
    """
    return first + jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1) == target[:, None]


def _divergence(
    how: _How, logits: jax.Array, log_z: jax.Array, teacher: Teacher, first: Any
) -> tuple[jax.Array, jax.Array]:
    """KL(p || q) in nats [n], the teacher p and the model q seen as K tokens and one class for all others:

    sum_k p_k (log p_k - log q_k) + p_r (log p_r - log q_r), where p_r = 1 - sum_k p_k and q_r = 1 - sum_k q_k.

    Without the last term q could give any share to tokens that p thinks unlikely.

    Args:
      logits: [n, V], or the part of the vocabulary from token `first`; log_z: [n].
      teacher: leaves [n, K] with K < V.

    Returns:
      The divergence, and log sum exp of the other tokens' logits [n], for its gradient.
    """
    row, place = _places(logits, teacher, first)
    here = place < logits.shape[1]
    chosen = how.sum(jnp.where(here, jnp.take_along_axis(logits, jnp.where(here, place, 0), axis=1), 0))
    top, log_total = how.log_sum_exp(logits.at[row, place].set(-jnp.inf, mode="drop"))
    log_q, log_q_rest = chosen - log_z[:, None], top + log_total - log_z  # not from 1 - sum q, which cancels
    p, p_rest = _teacher_shares(teacher)
    log_p_rest = jnp.log(jnp.where(p_rest > 0, p_rest, 1))
    divergence = (p * (teacher.logprobs - log_q)).sum(axis=-1) + p_rest * (log_p_rest - log_q_rest)
    return divergence, top + log_total


def _divergence_gradient(
    logits: jax.Array, share: jax.Array, teacher: Teacher, log_rest: jax.Array, first: Any
) -> jax.Array:
    """Of `_divergence` to logits [n, v], whose softmax is `share`: q - p, and q - p_r q / q_r of other tokens."""
    row, place = _places(logits, teacher, first)
    p, p_rest = _teacher_shares(teacher)
    others = logits.at[row, place].set(-jnp.inf, mode="drop")
    gradient = (p.sum(axis=-1) + p_rest)[:, None] * share - p_rest[:, None] * jnp.exp(others - log_rest[:, None])
    return gradient.at[row, place].add(-p, mode="drop")


def _places(logits: jax.Array, teacher: Teacher, first: Any) -> tuple[jax.Array, jax.Array]:
    """Rows [n, 1] and columns [n, K] of the teacher's tokens in logits [n, v]; v where they have none."""
    place, size = teacher.tokens - first, logits.shape[1]
    return jnp.arange(len(logits))[:, None], jnp.where((place >= 0) & (place < size), place, size)


def _teacher_shares(teacher: Teacher) -> tuple[jax.Array, jax.Array]:
    """p of its tokens [n, K] and of all others [n]; stored log-probabilities are rounded."""
    p = jnp.exp(teacher.logprobs)
    return p, jnp.maximum(1 - p.sum(axis=-1), 0)


def _whole_divergence(how: _How, logits: jax.Array, theirs: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """KL(p || q) in nats [n], p and q the softmax over `theirs` and `logits`, both divided by the temperature.

    Args:
      logits, theirs: [n, V], or a part of the vocabulary.

    Returns:
      The divergence, and log sum exp of both [n], for its gradient.
    """
    logits, theirs = logits / how.temperature, theirs / how.temperature
    log_z, their_log_z = (top + log_total for top, log_total in map(how.log_sum_exp, (logits, theirs)))
    log_p, log_q = theirs - their_log_z[:, None], logits - log_z[:, None]
    return how.sum((jnp.exp(log_p) * (log_p - log_q)).sum(axis=-1)), (log_z, their_log_z)


def _whole_divergence_gradient(
    how: _How, logits: jax.Array, theirs: jax.Array, log_z: tuple[jax.Array, jax.Array]
) -> jax.Array:
    """Of `_whole_divergence` to logits [n, v]: (q - p) / temperature."""
    q, p = (jnp.exp(x / how.temperature - z[:, None]) for x, z in zip((logits, theirs), log_z, strict=True))
    return (q - p) / how.temperature
