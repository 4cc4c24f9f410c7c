"""Optimisers and learning-rate schedules, all optax's own."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Sequence
from typing import Any, Literal

import optax
from optax import contrib

from swa_jax.base.errors import ConfigError
from swa_jax.model.config import ModelConfig
from swa_jax.model.parameters import Parameter, declared, map_parameters

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW for everything, or Muon for the matrices and AdamW for the rest.

    Weights and moments are f32. Weight decay is for the matrices only: not for embeddings, norms, biases, routers.
    """

    name: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = 3e-4  # the peak; muon: of the matrices
    adam_learning_rate: float = 3e-3  # muon: for embeddings, norms, biases and the router
    schedule: Literal["constant", "linear", "cosine", "warmup-stable-decay"] = "cosine"
    warmup_steps: int = 0  # from 0 to the peak
    first_step: int = 0  # the schedule's step at which this run begins: what an earlier run has made of it
    decay_steps: int = 0  # warmup-stable-decay: length of the final cosine
    final_fraction: float = 0.1  # of the peak, at the end
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.01
    clip_norm: float | None = 1.0  # of the global norm of the gradients; null: not clipped

    def __post_init__(self) -> None:
        for name in ("learning_rate", "adam_learning_rate", "eps", "clip_norm"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                off = ", or null for no clipping" if name == "clip_norm" else ""
                raise ConfigError(f"'optimizer.{name}' must be above 0{off}, got {value:g}")
        for name in ("warmup_steps", "first_step", "decay_steps", "final_fraction", "weight_decay"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"'optimizer.{name}' must be 0 or more, got {getattr(self, name):g}")
        for name in ("b1", "b2"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"'optimizer.{name}' must be from 0 to below 1, got {getattr(self, name):g}")


def learning_rate(config: OptimizerConfig, peak: float, total_steps: int) -> optax.Schedule:
    """The rate by step of this run: linear warmup, then constant, linear or cosine to the end, or stable with a final
    cosine. The whole schedule takes `config.first_step` + `total_steps` steps, of which these are the last."""
    schedule = _schedule(config, peak, config.first_step + total_steps)
    return schedule if config.first_step == 0 else lambda step: schedule(config.first_step + step)


def _schedule(config: OptimizerConfig, peak: float, total_steps: int) -> optax.Schedule:
    warmup = config.warmup_steps
    if config.schedule == "cosine":
        main = optax.cosine_decay_schedule(peak, max(total_steps - warmup, 1), config.final_fraction)
    elif config.schedule == "linear":
        main = optax.linear_schedule(peak, peak * config.final_fraction, max(total_steps - warmup, 1))
    elif config.schedule == "warmup-stable-decay":
        stable = max(total_steps - warmup - config.decay_steps, 0)
        decay = optax.cosine_decay_schedule(peak, max(config.decay_steps, 1), config.final_fraction)
        main = optax.join_schedules([optax.constant_schedule(peak), decay], [stable])
    else:
        main = optax.constant_schedule(peak)
    if warmup == 0:
        return main
    return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), main], [warmup])


def warn_of_short_runs(config: OptimizerConfig, total_steps: int) -> None:
    """Say so where a run ends before its schedule does; a few steps of a long configuration are a common trial."""
    decay = config.decay_steps if config.schedule == "warmup-stable-decay" else 0
    last = config.first_step + total_steps
    if total_steps > 0 and last < config.warmup_steps + decay:
        logger.warning(
            "the learning rate takes %d steps to warm up and %d to decay, but the run has %d steps in all",
            config.warmup_steps,
            decay,
            last,
        )


def is_matrix(params: Any, model: ModelConfig) -> Any:
    """True for what the model declares as a matrix: the projections, not embeddings, norms, biases or the router."""
    return map_parameters(lambda row, leaf: row is not None and row.matrix, params, declared(model))


def by_stage(rate: optax.Schedule, factors: Sequence[tuple[int, float]]) -> optax.Schedule:
    """The rate times the factor of the stage that a step is in; `factors`: first steps and factors, in order."""
    if all(factor == 1 for _, factor in factors):
        return rate
    starts, values = zip(*factors, strict=True)
    factor = optax.join_schedules([optax.constant_schedule(value) for value in values], list(starts[1:]))
    return lambda step: rate(step) * factor(step)


def make_optimizer(
    config: OptimizerConfig, total_steps: int, model: ModelConfig, factors: Sequence[tuple[int, float]] = ()
) -> optax.GradientTransformation:
    """Clipping by the global norm, then the optimizer.

    Args:
      model: what it declares says which parameters are matrices.
      factors: of the rates by stage, as `by_stage` has them.
    """
    rate = by_stage(learning_rate(config, config.learning_rate, total_steps), factors)
    matrices = functools.partial(is_matrix, model=model)
    if config.name == "adamw":
        update = optax.adamw(rate, config.b1, config.b2, config.eps, weight_decay=config.weight_decay, mask=matrices)
    else:
        update = contrib.muon(
            rate,
            weight_decay=config.weight_decay,
            weight_decay_mask=matrices,
            adam_b1=config.b1,
            adam_b2=config.b2,
            adam_learning_rate=by_stage(learning_rate(config, config.adam_learning_rate, total_steps), factors),
            muon_weight_dimension_numbers=functools.partial(_muon_axes, model=model),
        )
    # A chain of two either way, so that the optimiser's state keeps its form.
    clip = optax.identity() if config.clip_norm is None else optax.clip_by_global_norm(config.clip_norm)
    return optax.chain(clip, update)


def _muon_axes(params: Any, model: ModelConfig) -> Any:
    """Each layer's kernel [in, out] is orthogonalised on its own; None sends a leaf to AdamW."""

    def axes(row: Parameter | None, leaf: Any) -> contrib.MuonDimensionNumbers | None:
        if row is None or not row.matrix:
            return None
        rank = len(row.stacked_shape)
        return contrib.MuonDimensionNumbers(reduction_axis=rank - 2, output_axis=rank - 1)

    return map_parameters(axes, params, declared(model))
