"""The teacher of distillation in the step: the model that a run starts from, under a pattern of its own.

Under LoRA its weights are the frozen ones of the student, without the adapters. Where all weights are trained, a copy
of the first ones is kept beside them, in the dtype of the compute.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from swa_jax.model.attention import cast_parameters
from swa_jax.model.decoder import Decoder
from swa_jax.model.memory import check_fits
from swa_jax.model.parameters import parameters
from swa_jax.model.remat import PLAIN
from swa_jax.train.config import TrainConfig
from swa_jax.train.patterns import Start, teacher_pattern
from swa_jax.train.rows import Batch, Rows


class Lesson(NamedTuple):
    """What the teacher makes of a batch, whose rows lie as the student's do."""

    hidden: jax.Array  # [B, T, d], normed
    head: jax.Array  # [d, V]
    streams: jax.Array | None  # [L, B, T, d]: the residual stream behind each layer, where that is learned


def find_teacher(config: TrainConfig, start: Start) -> Decoder | None:
    """The teacher's shapes, without weights; None for a run that has none in its step."""
    if not config.teaches:
        return None
    pattern = teacher_pattern(config, start)
    return nnx.eval_shape(lambda: Decoder(start.teacher, pattern, rngs=nnx.Rngs(0)))


def check_teacher_fits(config: TrainConfig, teacher: Decoder) -> None:
    """Raises `ConfigError` where the devices have no room for a copy of the first weights beside those trained."""
    if config.lora is None:
        bytes_each = 4 + 4 + (2 if config.bfloat16 else 4)  # trained, a moment at least, and the teacher's
        check_fits(
            bytes_each * sum(parameter.size for parameter in parameters(teacher.config)) / jax.device_count(),
            "the weights that are trained, their optimizer and the copy that teaches them ('distill')",
            "train adapters ('lora'), which need no second copy, or kept log-probabilities ('distill.top_k')",
        )


def kept_weights(config: TrainConfig, teacher: Decoder | None, trained: Any) -> Any:
    """A copy of the weights of a run's first step that the teacher has and that are trained, for `TrainState`."""
    if teacher is None:
        return nnx.State({})
    wanted = dict(nnx.to_flat_state(nnx.state(teacher)))
    kept = [(path, leaf) for path, leaf in nnx.to_flat_state(trained) if path in wanted]
    dtype = jnp.bfloat16 if config.bfloat16 else jnp.float32
    return jax.tree.map(lambda x: jnp.array(x, copy=True), cast_parameters(nnx.from_flat_state(kept), dtype))


def make_teacher(teacher: Decoder, config: TrainConfig) -> Callable[[Any, Any, Batch, Rows], Lesson]:
    """`teach(kept, frozen, batch, rows) -> Lesson`: a forward pass that is not differentiated, so that nothing of its
    layers is saved; the weights are `kept_weights` and those that the student does not train."""
    assert config.distill is not None
    graph, weights = nnx.split(teacher)
    wanted, hidden_too = [path for path, _ in nnx.to_flat_state(weights)], config.distill.hidden > 0

    def teach(kept: Any, frozen: Any, batch: Batch, rows: Rows) -> Lesson:
        there = dict(nnx.to_flat_state(frozen)) | dict(nnx.to_flat_state(kept))
        own = nnx.from_flat_state([(path, there[path]) for path in wanted])
        if config.bfloat16:
            own = cast_parameters(own, jnp.bfloat16)
        model: Decoder = nnx.merge(graph, own)
        hidden, _, streams = model.features(
            rows.tokens,
            rows.segment_ids,
            rows.positions,
            model.pattern.full_from(batch["full_from"]) if "full_from" in batch else None,
            partition=rows.partition,
            training=PLAIN._replace(unroll=config.training.unroll),
            watch=lambda x, _: x if hidden_too else None,
        )
        return Lesson(hidden, model.head(), streams)

    return teach
