"""What training minimises: chunked cross-entropy, and SwiAttn's adaptive regularisation of full attention."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from swa_jax.attention import Routing

CHUNK = 1024  # tokens whose logits exist at one time


class TokenLoss(NamedTuple):
    nll: jax.Array  # [B, T] f32: of the *next* token, 0 where there is no target
    weight: jax.Array  # [B, T] f32: weight of that target, 0 where there is none
    correct: jax.Array  # [B, T] f32: 1 where the most likely token is the target


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
    hidden: jax.Array, head: jax.Array, targets: jax.Array, weights: jax.Array, chunk: int = CHUNK
) -> TokenLoss:
    """Cross-entropy in nats; logits exist for `chunk` tokens at a time, forward and backward.

    Args:
      hidden: [B, T, d]; head: [d, V]; targets: [B, T] int32; weights: [B, T] f32.
    """
    batch, length, _ = hidden.shape
    rows = batch * length
    chunk = min(chunk, rows)
    padding = -rows % chunk

    def split(x: jax.Array) -> jax.Array:
        flat = x.reshape(rows, *x.shape[2:])
        return jnp.pad(flat, [(0, padding)] + [(0, 0)] * (flat.ndim - 1)).reshape(-1, chunk, *flat.shape[1:])

    @jax.checkpoint  # the backward pass recomputes the chunk's logits
    def one_chunk(
        _: None, piece: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[None, tuple[jax.Array, jax.Array]]:
        x, target, weight = piece
        logits = jnp.einsum("cd,dv->cv", x, head, preferred_element_type=jnp.float32)  # [chunk, V]
        chosen = jnp.take_along_axis(logits, target[:, None], axis=-1)[:, 0]
        nll = jax.nn.logsumexp(logits, axis=-1) - chosen
        scored = weight > 0
        return None, (jnp.where(scored, nll, 0), scored & (jnp.argmax(logits, axis=-1) == target))

    _, (nll, correct) = jax.lax.scan(one_chunk, None, (split(hidden), split(targets), split(weights)))

    def join(x: jax.Array) -> jax.Array:
        return x.reshape(-1)[:rows].reshape(batch, length).astype(jnp.float32)

    return TokenLoss(join(nll), weights, join(correct))


def mean_loss(loss: TokenLoss) -> jax.Array:
    """Weighted mean over the targets, in nats."""
    return jnp.sum(loss.nll * loss.weight) / jnp.maximum(jnp.sum(loss.weight), 1e-6)


@dataclasses.dataclass(frozen=True)
class SwitchLoss:
    """SwiAttn's regulariser; defaults are the paper's (Eq. 8)."""

    base: float = 1e-3  # the numerator of gamma
    eps: float = 0.1
    alpha: float = 100.0  # weight of the branch disagreement


def switch_regularizer(routing: Routing, loss: TokenLoss, constants: SwitchLoss) -> jax.Array:
    """Eq. 7 to 9: the mean over tokens and layers of `gamma * softplus(logit)`.

    `gamma = base / (eps + NLL_t + alpha * MSE_tl)` is a weight: no gradient flows through it. NLL_t is that of target
    t + 1; positions without a target are left out.

    Args:
      routing: leaves [L, B, T]; loss: leaves [B, T].
    """
    gamma = constants.base / (constants.eps + loss.nll[None] + constants.alpha * routing.disagreement)
    counted = (loss.weight > 0).astype(jnp.float32)[None]  # [1, B, T]
    penalty = jax.lax.stop_gradient(gamma) * jax.nn.softplus(routing.logit) * counted
    return jnp.sum(penalty) / jnp.maximum(jnp.sum(counted) * routing.logit.shape[0], 1)


def full_attention_ratio(routing: Routing, counted: jax.Array) -> jax.Array:
    """Share of the counted tokens [B, T] that see everything, by layer: [L]."""
    weight = (counted > 0).astype(jnp.float32)
    return jnp.sum(routing.gate * weight, axis=(1, 2)) / jnp.maximum(jnp.sum(weight), 1)
