"""What training minimises beside the loss of each token: SwiAttn's regularisation of full attention, even experts,
what a teacher says."""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from swa_jax.base.errors import ConfigError
from swa_jax.model.attention import Routing
from swa_jax.model.experts import ExpertLoad
from swa_jax.model.loss import TokenLoss, next_token_targets


class Totals(NamedTuple):
    """What the sums over a batch are divided by; of the whole batch when it is taken in several pieces."""

    weight: jax.Array  # of all targets
    targets: jax.Array  # how many
    tokens: jax.Array  # that are not padding
    followed: jax.Array  # by another of their segment


def totals_of(segment_ids: jax.Array, weights: jax.Array) -> Totals:
    """segment_ids [..., B, T]; weights [..., B, T] of the targets, as `next_token_targets` gives them."""
    return Totals(
        jnp.maximum(jnp.sum(weights), 1e-6),
        jnp.maximum(jnp.sum(weights > 0), 1).astype(jnp.float32),
        jnp.maximum(jnp.sum(segment_ids != 0), 1).astype(jnp.float32),
        jnp.maximum(jnp.sum(next_token_targets(segment_ids, segment_ids, None)[1]), 1),
    )


def load_balancing_loss(load: ExpertLoad, layers: int, tokens: jax.Array) -> jax.Array:
    """Hugging Face's `load_balancing_loss_func`: E * sum_e f_e P_e (Switch Transformers, Fedus et al., Eq. 4 to 6).

    f_e is how often a token of the layers chose expert e, P_e its mean probability, both over all layers. It is the
    number of experts a token meets where tokens are spread evenly; no gradient flows through f.

    Args:
      load: leaves [L, E]; layers: those of them that have experts.
      tokens: that are counted in the load of a layer.
    """
    rows = jnp.maximum(tokens, 1) * layers
    chosen, probability = (jnp.sum(x, axis=0) / rows for x in load)
    return len(chosen) * jnp.sum(jax.lax.stop_gradient(chosen) * probability)


@dataclasses.dataclass(frozen=True)
class SwitchLoss:
    """SwiAttn's regulariser; defaults are the paper's (Eq. 8).

    Its ablations (Table 4): V1 `adaptive: false`, V2 `nll: 0`, V3 `alpha: 10`, V4 `alpha: 1`, V5 `alpha: 0`,
    V6 `eps: 0.2`, V7 `eps: 0.01`.
    """

    base: float = 1e-3  # the numerator of gamma
    eps: float = 0.1
    alpha: float = 100.0  # weight of the branch disagreement
    nll: float = 1.0  # weight of the token's loss
    adaptive: bool = True  # False: gamma is `base` for every token


def switch_regularizer(routing: Routing, loss: TokenLoss, constants: SwitchLoss, total_targets: jax.Array) -> jax.Array:
    """Eq. 7 to 9: the mean over tokens and layers of `gamma * softplus(logit)`.

    `gamma = base / (eps + NLL_t + alpha * MSE_tl)` is a weight: no gradient flows through it. NLL_t is that of target
    t + 1; positions without a target are left out.

    Args:
      routing: leaves [L, B, T] of the layers that are routed; loss: leaves [B, T].
      total_targets: of the whole batch, of which `loss` may be a piece.
    """
    counted = (loss.weight > 0).astype(jnp.float32)[None]  # [1, B, T]
    gamma = jnp.full_like(routing.logit, constants.base)
    if constants.adaptive:
        gamma = constants.base / (
            constants.eps + constants.nll * loss.nll[None] + constants.alpha * routing.disagreement
        )
    penalty = jax.lax.stop_gradient(gamma) * jax.nn.softplus(routing.logit) * counted
    return jnp.sum(penalty) / (total_targets * routing.logit.shape[0])


def mean_by_layer(values: jax.Array, segment_ids: jax.Array, total_tokens: jax.Array) -> jax.Array:
    """values [L, B, T] -> [L], of the tokens that are not padding; the whole batch has `total_tokens` of them."""
    return jnp.sum(values * (segment_ids != 0), axis=(1, 2)) / total_tokens


@dataclasses.dataclass(frozen=True)
class Distill:
    """Learning from the model that a run starts from: its logits in the step, or what was kept of them before."""

    teacher: str | None = None  # its pattern, a recipe or a file; left out: the one that `init_from`'s model has
    tokens: Literal["answers", "all"] = "answers"  # where it is learned: "answers" is where cross-entropy is
    temperature: float = 1.0  # that the logits of both are divided by
    weight: float = 1.0  # of the KL from the teacher at the first step; cross-entropy has the rest to 1
    last_weight: float | None = None  # at the last step, on a straight line from `weight`; left out: the same
    hidden: float = 0.0  # weight of the distance between both models' hidden states behind each layer
    top_k: int | None = None  # in place of a teacher in the step: so many log-probabilities of distilled data

    def __post_init__(self) -> None:
        if not (self.temperature > 0 and self.temperature < float("inf")):
            raise ConfigError(f"'distill.temperature' must be a number above 0, got {self.temperature}")
        for name, share in (("weight", self.weight), ("last_weight", self.last_weight)):
            if share is not None and not 0 <= share <= 1:
                raise ConfigError(f"'distill.{name}' must be a share from 0 to 1, got {share}")
        if not 0 <= self.hidden < float("inf"):
            raise ConfigError(f"'distill.hidden' must be 0 or more, got {self.hidden}")
        if not (self.weight or self.last_weight or self.hidden):
            raise ConfigError("'distill' learns nothing, as all its weights are 0: set one, or leave 'distill' out")
        if self.top_k is None:
            return
        if self.top_k < 1:
            raise ConfigError(f"'distill.top_k' must be at least 1, or left out, got {self.top_k}")
        for name in ("teacher", "tokens", "temperature", "hidden"):
            if getattr(self, name) != getattr(type(self), name):
                raise ConfigError(
                    f"'distill.{name}' is for a teacher that runs in the step: leave it or 'distill.top_k' out"
                )

    def share(self, step: jax.Array | int, total_steps: int) -> jax.Array | float:
        """The weight of the KL at a step, from 0, of so many."""
        if self.last_weight is None:
            return self.weight
        return self.weight + (self.last_weight - self.weight) * step / max(total_steps - 1, 1)


def hidden_error(x: jax.Array, theirs: jax.Array) -> jax.Array:
    """|x - theirs|^2 / |theirs|^2 over the last axis, [B, T, d] -> [B, T] f32."""
    x, theirs = x.astype(jnp.float32), theirs.astype(jnp.float32)
    size = jnp.square(theirs).sum(-1)
    return jnp.square(x - theirs).sum(-1) / jnp.where(size > 0, size, 1)
