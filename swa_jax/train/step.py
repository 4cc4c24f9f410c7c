"""One training step as a pure function: loss, gradients over accumulated pieces, guarded update. On a mesh or off."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from swa_jax.model.attention import Routing, cast_parameters
from swa_jax.model.config import ModelConfig
from swa_jax.model.decoder import Decoder
from swa_jax.model.layer_types import SWITCH
from swa_jax.model.loss import Teacher, TeacherStates, TokenLoss, next_token_targets
from swa_jax.model.sharding import Partition, constrain, laid_out, state_shardings
from swa_jax.train.compiler import compiler_options
from swa_jax.train.config import TrainConfig
from swa_jax.train.objectives import (
    Distill,
    Totals,
    hidden_error,
    load_balancing_loss,
    mean_by_layer,
    switch_regularizer,
    totals_of,
)
from swa_jax.train.rows import Batch, held_rows
from swa_jax.train.teacher import make_teacher

Metrics = dict[str, jax.Array]

SPIKE_DECAY = 0.98  # of the running mean of gradient norms
SPIKE_WARMUP = 20  # updates before it is trusted


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class TrainState:
    step: jax.Array  # int32: steps done
    params: Any  # nnx.State of nnx.Param, f32: what is trained
    optimizer: optax.OptState
    norm_mean: jax.Array  # f32: running mean of the gradient norm, not debiased
    skipped: jax.Array  # int32: updates left out for their gradient
    frozen: Any = dataclasses.field(default_factory=lambda: nnx.State({}))  # the rest of the model, under LoRA
    teacher: Any = dataclasses.field(default_factory=lambda: nnx.State({}))  # `kept_weights`

    def without_frozen(self) -> TrainState:
        """What a checkpoint holds: all else is of the model that the run starts from."""
        return dataclasses.replace(self, frozen=nnx.State({}), teacher=nnx.State({}))

    def with_frozen(self, other: TrainState) -> TrainState:
        """The same with what a checkpoint has not, of another state."""
        return dataclasses.replace(self, frozen=other.frozen, teacher=other.teacher)


def init_state(
    params: Any, optimizer: optax.GradientTransformation, frozen: Any = None, teacher: Any = None
) -> TrainState:
    """The state before step 0; `frozen`: the parameters that are not trained, and `teacher`: `kept_weights`, if there
    are any."""

    def zero(dtype: Any) -> jax.Array:
        return jnp.zeros((), dtype)  # an array for each leaf: a step consumes them all

    rest, kept = (nnx.State({}) if one is None else one for one in (frozen, teacher))
    moments = optimizer.init(params)
    return TrainState(zero(jnp.int32), params, moments, zero(jnp.float32), zero(jnp.int32), rest, kept)


def shard_state(state: TrainState, partition: Partition | None, model: ModelConfig) -> TrainState:
    """The state laid out on the mesh."""
    if partition is None:
        return state
    return jax.tree.map(laid_out, state, state_shardings(state, partition, model))


def abstract_state(state: TrainState) -> TrainState:
    """What a checkpoint is to be read as: shapes, dtypes and shardings."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def make_step(
    model: Decoder,
    optimizer: optax.GradientTransformation,
    config: TrainConfig,
    partition: Partition | None,
    teacher: Decoder | None = None,
) -> Callable[[TrainState, Batch, int], tuple[TrainState, Metrics]]:
    """`step(state, batch, pieces) -> (state, metrics)`, compiled; the state passed in is consumed.

    `batch` has leaves [B, T] (and `full_from` [B, segments]); it is taken in `pieces` pieces of B / pieces rows. What
    LoRA's dropout drops depends on the configuration's seed, the step and the piece, on no mesh. `teacher` is what
    `find_teacher` gives.
    """
    loss_of = make_loss(model, config, partition, teacher)
    drops = model.lora is not None and model.lora.dropout > 0

    def step(state: TrainState, batch: Batch, pieces: int) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(jax.random.key(config.seed), state.step) if drops else None

        def loss(params: Any, piece: Batch, totals: Totals, key: jax.Array | None) -> tuple[jax.Array, Metrics]:
            return loss_of(params, state.frozen, piece, totals, key, state)

        gradients, metrics = _gradients(loss, state.params, batch, pieces, partition, key)
        norm = optax.tree.norm(gradients)
        metrics["gradient_norm"] = norm
        updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.params)
        norm_mean = SPIKE_DECAY * state.norm_mean + (1 - SPIKE_DECAY) * norm
        changed = (optax.apply_updates(state.params, updates), optimizer_state, norm_mean)
        skipped = state.skipped
        if config.on_nonfinite == "skip" or config.spike_factor is not None:
            accepted = _accept(state, metrics["loss"], norm, config)
            unchanged = (state.params, state.optimizer, _mean_beside_spikes(state, norm, config))
            changed = jax.tree.map(lambda new, old: jnp.where(accepted, new, old), changed, unchanged)
            skipped = metrics["skipped_updates"] = skipped + (1 - accepted.astype(jnp.int32))
        new_state = TrainState(state.step + 1, *changed, skipped, state.frozen, state.teacher)
        if partition is not None:
            shardings = state_shardings(new_state, partition, model.config)
            new_state = jax.lax.with_sharding_constraint(new_state, shardings)
        return new_state, metrics

    options = compiler_options(partition, config.xla_options)
    return jax.jit(step, static_argnums=2, donate_argnums=0, compiler_options=options)


def make_validation_loss(
    model: Decoder, config: TrainConfig, partition: Partition | None
) -> Callable[[Any, Any, Batch], tuple[jax.Array, jax.Array]]:
    """`loss(params, frozen, batch) -> (summed loss in nats, summed weight)` of the language model alone, compiled."""
    loss_of = make_loss(model, config, partition)

    def summed(params: Any, frozen: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
        _, weights = next_token_targets(batch["tokens"], batch["segment_ids"], batch["weights"])
        totals = totals_of(batch["segment_ids"], weights)
        _, metrics = loss_of(params, frozen, batch, totals, None)
        return metrics["loss"] * totals.weight, jnp.sum(weights)

    return jax.jit(summed, compiler_options=compiler_options(partition, config.xla_options))


def make_loss(
    model: Decoder, config: TrainConfig, partition: Partition | None, teacher: Decoder | None = None
) -> Callable[..., tuple[jax.Array, Metrics]]:
    """`loss(params, frozen, batch, totals, dropout_key, state) -> (objective, metrics)`; every mean is a sum over the
    batch by `totals`, so that the pieces of a batch add up to the whole. `state`, of which only the step and the
    teacher's weights are read, may be left out where there is no teacher."""
    graph, _ = nnx.split(model)  # every variable of the model is a parameter
    patterns = [model.pattern] if teacher is None else [model.pattern, teacher.pattern]
    teach = None if teacher is None else make_teacher(teacher, config)
    distill = config.distill

    def loss_of(
        params: Any,
        frozen: Any,
        batch: Batch,
        totals: Totals,
        dropout_key: jax.Array | None,
        state: TrainState | None = None,
    ) -> tuple[jax.Array, Metrics]:
        if config.bfloat16:
            params, frozen = cast_parameters((params, frozen), jnp.bfloat16)
        model = nnx.merge(graph, params, frozen)
        rows = held_rows(batch, partition, config.sequence_order, patterns, dropping=dropout_key is not None)
        targets, weights = next_token_targets(batch["tokens"], batch["segment_ids"], batch["weights"])
        lesson = None if teach is None or state is None else teach(state.teacher, state.frozen, batch, rows)
        said: Any = None
        heard = weights
        if "top_tokens" in batch:  # distilled data: the log-probabilities of each place's target
            said = Teacher(*(jnp.roll(batch[name], -1, axis=1) for name in ("top_tokens", "top_logprobs")))
        elif distill is not None and distill.tokens == "all":
            _, heard = next_token_targets(batch["tokens"], batch["segment_ids"], None)
        targets, weights, said, heard = rows.as_held((targets, weights, said, heard))
        hidden, routing, errors = model.features(
            rows.tokens,
            rows.segment_ids,
            rows.positions,
            model.pattern.full_from(batch["full_from"]) if "full_from" in batch else None,
            partition=rows.partition,
            training=config.training._replace(dropout_key=dropout_key),
            watch=lambda x, theirs: None if theirs is None else hidden_error(x, theirs),
            beside=None if lesson is None else lesson.streams,
        )
        if lesson is not None and distill is not None:
            said = TeacherStates(lesson.hidden, lesson.head, heard, distill.temperature)
        tokens = model.token_loss(hidden, targets, weights, teacher=said, partition=partition)
        means = {"loss": tokens.nll, "accuracy": tokens.correct}
        metrics = {name: jnp.sum(values * weights) / totals.weight for name, values in means.items()}
        loss = metrics["loss"]
        if distill is not None and tokens.divergence is not None:
            metrics |= (learned := _taught(distill, tokens, errors, heard, totals))
            share = distill.share(0 if state is None else state.step, config.total_steps)
            # Divided by the temperature twice, the gradient of the KL is multiplied by it twice (Hinton et al., 2015).
            loss = (1 - share) * loss + share * distill.temperature**2 * learned["divergence"]
            loss = loss + distill.hidden * learned.get("hidden_error", 0.0)
        added, others = _added(config, model, tokens, routing, rows.segment_ids, totals)
        return loss + added, metrics | others

    return loss_of


def _taught(distill: Distill, tokens: TokenLoss, errors: Any, heard: jax.Array, totals: Totals) -> Metrics:
    """The means of what is learned of a teacher, over the tokens that have weight in `heard` [B, T]."""
    total = totals.followed if distill.tokens == "all" else totals.weight
    assert tokens.divergence is not None
    means = {"divergence": jnp.sum(tokens.divergence * heard) / total}
    if errors is not None:
        means["hidden_error"] = jnp.sum(jnp.mean(errors, axis=0) * heard) / total
    return means


def _added(
    config: TrainConfig, model: Decoder, tokens: TokenLoss, routing: Routing, segments: jax.Array, totals: Totals
) -> tuple[jax.Array | float, Metrics]:
    """What is added to the loss of the tokens, whoever teaches them, and its metrics."""
    loss: jax.Array | float = 0.0
    metrics: Metrics = {}
    if config.z_loss:
        metrics["z_loss"] = jnp.sum(jnp.square(tokens.log_z) * tokens.weight) / totals.weight
        loss = loss + config.z_loss * metrics["z_loss"]
    if routing.experts is not None:
        counted = jnp.sum(segments != 0)
        balance = load_balancing_loss(routing.experts, len(model.config.sparse_layers), counted)
        # Not a sum over tokens: the pieces of a batch have each their own, and count by their tokens.
        metrics["load_balancing_loss"] = balance = balance * counted / totals.tokens
        loss = loss + config.router_aux_loss_coef * balance
    if SWITCH in model.pattern.layer_types:
        routed = np.array([layer for layer, kind in enumerate(model.pattern.layer_types) if kind == SWITCH])
        only = Routing(routing.logit[routed], routing.gate[routed], routing.disagreement[routed])
        metrics["regularization"] = switch_regularizer(only, tokens, config.switch_loss, totals.targets)
        metrics |= _routing_metrics(routing, segments, totals, routed)
        loss = loss + metrics["regularization"]
    return loss, metrics


def _routing_metrics(routing: Routing, segments: jax.Array, totals: Totals, routed: np.ndarray) -> Metrics:
    """By layer; the ratio of the whole model is that of its layers that are routed."""
    values = (
        ("full_attention_ratio", routing.gate),
        ("router_logit", routing.logit),
        ("disagreement", routing.disagreement),
    )
    found = {f"{name}_by_layer": mean_by_layer(value, segments, totals.tokens) for name, value in values}
    return {"full_attention_ratio": jnp.mean(found["full_attention_ratio_by_layer"][routed])} | found


def _gradients(
    loss_of: Callable,
    params: Any,
    batch: Batch,
    pieces: int,
    partition: Partition | None,
    dropout_key: jax.Array | None,
) -> tuple[Any, Metrics]:
    """The gradients and metrics of the whole batch, one piece in memory at a time."""
    _, weights = next_token_targets(batch["tokens"], batch["segment_ids"], batch["weights"])
    totals = totals_of(batch["segment_ids"], weights)
    differentiate = jax.value_and_grad(loss_of, has_aux=True)

    def one(piece: Batch, key: jax.Array | None) -> tuple[Any, Metrics]:
        (_, metrics), gradients = differentiate(params, piece, totals, key)
        return gradients, metrics

    if pieces == 1:
        return one(batch, dropout_key)

    def split(x: jax.Array) -> jax.Array:
        # Row r goes to piece r % pieces: every device's rows are spread over all pieces, so none is moved.
        x = x.reshape(x.shape[0] // pieces, pieces, *x.shape[1:]).swapaxes(0, 1)
        along_row = "sequence" if x.shape[2:3] == length else None
        return constrain(x, partition, None, "batch", along_row, *[None] * (x.ndim - 3))

    length = batch["tokens"].shape[1:]
    keys = None if dropout_key is None else jax.random.split(dropout_key, pieces)
    split_batch = (jax.tree.map(split, batch), keys)
    start = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(one, *jax.tree.map(lambda x: x[0], split_batch))
    )

    def add(total: tuple[Any, Metrics], piece: tuple[Batch, Any]) -> tuple[tuple[Any, Metrics], None]:
        return jax.tree.map(jnp.add, total, one(*piece)), None

    return jax.lax.scan(add, start, split_batch)[0]


def _accept(state: TrainState, loss: jax.Array, norm: jax.Array, config: TrainConfig) -> jax.Array:
    """Whether the update is made."""
    accepted = jnp.ones((), bool)
    if config.on_nonfinite == "skip":
        accepted &= jnp.isfinite(loss) & jnp.isfinite(norm)
    if config.spike_factor is not None:
        done = state.step - state.skipped
        accepted &= (done < SPIKE_WARMUP) | (norm <= _largest(state, config.spike_factor))
    return accepted


def _largest(state: TrainState, spike_factor: float) -> jax.Array:
    """The largest gradient norm that is no spike."""
    done = state.step - state.skipped
    mean = state.norm_mean / jnp.maximum(1 - SPIKE_DECAY**done, 1e-6)
    return spike_factor * mean


def _mean_beside_spikes(state: TrainState, norm: jax.Array, config: TrainConfig) -> jax.Array:
    """The running mean when an update is left out. A spike counts as the largest norm that is none: else a lasting rise
    of the norms would end all updates for good."""
    if config.spike_factor is None:
        return state.norm_mean
    counted = (SPIKE_DECAY + (1 - SPIKE_DECAY) * config.spike_factor) * state.norm_mean
    return jnp.where(jnp.isfinite(norm) & (norm > _largest(state, config.spike_factor)), counted, state.norm_mean)
