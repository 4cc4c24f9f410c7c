"""Training on one process: pretraining, continued pretraining (CPT) and SwiAttn's routed CPT, from one YAML file.

A run folder holds `config.yaml` (resolved), `metrics.jsonl` (one line a step), `checkpoints/` and, at the end,
`model/`. Started again with the same configuration, a run goes on from its last checkpoint, bit for bit.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
import yaml
from flax import nnx
from orbax.checkpoint import v1 as ocp
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from swa_jax.checkpoint import load_model, open_checkpoint, save_model
from swa_jax.config import ConfigError, ModelConfig, from_dict, to_dict
from swa_jax.data import SourceConfig, make_batches, text_files
from swa_jax.model import Decoder
from swa_jax.objectives import (
    SwitchLoss,
    full_attention_ratio,
    mean_loss,
    next_token_targets,
    switch_regularizer,
    token_loss,
)
from swa_jax.optimizer import OptimizerConfig, make_optimizer
from swa_jax.pattern import SWITCH, AttentionPattern, load_pattern
from swa_jax.tokenizer import load_tokenizer


@dataclasses.dataclass(frozen=True)
class StageConfig:
    """Consecutive steps with one shape of batch."""

    steps: int
    sequence_length: int
    batch_size: int
    data: tuple[SourceConfig, ...] = (SourceConfig(),)
    patterns: tuple[str, ...] = ()  # recipes taken in turn, a step each, in place of the run's pattern
    sliding_window: int | None = None  # in place of the run's


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """One run. Exactly one of `model` (random start) and `init_from` (a checkpoint folder) is given."""

    output: str
    tokenizer: str  # tokenizer.json, or a folder that has one
    stages: tuple[StageConfig, ...]
    model: ModelConfig | None = None
    init_from: str | None = None
    pattern: str = "full"  # a recipe, or the path of a pattern JSON
    sliding_window: int | None = None
    num_sink_tokens: int | None = None
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    switch_loss: SwitchLoss = dataclasses.field(default_factory=SwitchLoss)
    bfloat16: bool = False  # compute in bf16; weights and optimiser stay f32
    save_dtype: Literal["float32", "bfloat16"] = "float32"  # of the finished model's weights
    remat: bool = False
    seed: int = 0
    checkpoint_every: int = 500  # steps
    keep_checkpoints: int = 2

    def __post_init__(self) -> None:
        if (self.model is None) == (self.init_from is None):
            raise ConfigError(
                "give exactly one of 'model' (start at random) and 'init_from' (a checkpoint folder)"
            )
        if not self.stages:
            raise ConfigError(
                "'stages' is empty: name at least one, with steps, sequence_length and batch_size"
            )
        for i, stage in enumerate(self.stages):
            for name in ("steps", "sequence_length", "batch_size"):
                if getattr(stage, name) < 1:
                    raise ConfigError(f"'stages.{i}.{name}' must be at least 1, got {getattr(stage, name)}")
        if self.checkpoint_every < 1 or self.keep_checkpoints < 1:
            raise ConfigError("'checkpoint_every' and 'keep_checkpoints' must be at least 1")

    @property
    def total_steps(self) -> int:
        return sum(stage.steps for stage in self.stages)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class TrainState:
    step: jax.Array  # int32: steps done
    params: Any  # nnx.State of nnx.Param
    optimizer: optax.OptState


def train(config: TrainConfig, *, quiet: bool = False) -> Path:
    """Run, or go on with, a training run; returns the folder of the finished model (a checkpoint folder).

    Raises:
      ConfigError: the configuration cannot be used, or differs from that of the run being resumed.
    """
    run = Path(config.output)
    tokenizer = load_tokenizer(config.tokenizer)
    model, patterns = _start(config)
    if tokenizer.vocab_size > model.config.vocab_size:
        raise ConfigError(
            f"tokenizer {config.tokenizer} has {tokenizer.vocab_size} tokens, the model's vocab_size is "
            f"{model.config.vocab_size}: they do not belong together"
        )
    _claim(run, config)
    optimizer = make_optimizer(config.optimizer, config.total_steps)
    params = nnx.state(model, nnx.Param)
    state = TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))

    with _checkpointer(run, config) as checkpoints:
        data_state = None
        if checkpoints.latest is not None:
            state, data_state = _restore(checkpoints, state)
        done = int(state.step)
        _keep_lines(run / "metrics.jsonl", done)
        with _progress(quiet) as bar, open(run / "metrics.jsonl", "a") as metrics_file:
            task = bar.add_task("training", total=config.total_steps, completed=done, loss=float("nan"))
            for number, stage, first in _stages(config):
                if done >= first + stage.steps:
                    continue
                batches = make_batches(
                    stage.data, tokenizer, length=stage.sequence_length, batch_size=stage.batch_size,
                    seed=config.seed + 1000 * number,
                )  # fmt: skip
                if data_state is not None and done > first:
                    batches.set_state(data_state)
                steps = [_step_function(model.with_pattern(p), optimizer, config) for p in patterns[number]]
                clock = time.perf_counter()
                for step in range(done, first + stage.steps):
                    batch = jax.tree.map(jnp.asarray, next(batches))
                    state, metrics = steps[step % len(steps)](state, batch)
                    done = step + 1
                    line = {"step": done} | {name: _plain(value) for name, value in metrics.items()}
                    now = time.perf_counter()
                    line["tokens_per_second"] = round(batch["tokens"].size / (now - clock), 1)
                    clock = now
                    metrics_file.write(json.dumps(line) + "\n")
                    metrics_file.flush()
                    bar.update(task, completed=done, loss=line["loss"])
                    _stop_on_nan(line)
                    if done % config.checkpoint_every == 0 or done == first + stage.steps:
                        os.fsync(metrics_file.fileno())
                        _save(checkpoints, done, state, batches.get_state())
    nnx.update(model, jax.tree.map(lambda p: p.astype(config.save_dtype), state.params))
    if not (run / "model").exists():
        tokenizer_path = Path(config.tokenizer)
        folder = tokenizer_path if tokenizer_path.is_dir() else tokenizer_path.parent
        hf_config = open_checkpoint(config.init_from).hf_config if config.init_from else None
        save_model(model, run / "model", hf_config=hf_config, tokenizer_from=folder)
    return run / "model"


# ---- one step ----


def _step_function(
    model: Decoder, optimizer: optax.GradientTransformation, config: TrainConfig
) -> Callable[[TrainState, dict[str, jax.Array]], tuple[TrainState, dict[str, jax.Array]]]:
    graph, _ = nnx.split(model)  # every variable of the model is a parameter

    def loss_of(params: Any, batch: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
        if config.bfloat16:
            params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
        model = nnx.merge(graph, params)
        hidden, routing = model.features(
            batch["tokens"], segment_ids=batch["segment_ids"], remat=config.remat
        )
        targets, weights = next_token_targets(batch["tokens"], batch["segment_ids"], batch["weights"])
        tokens = token_loss(hidden, model.head(), targets, weights)
        loss = language_loss = mean_loss(tokens)
        metrics = {"accuracy": jnp.sum(tokens.correct * weights) / jnp.maximum(jnp.sum(weights), 1e-6)}
        if SWITCH in model.pattern.layer_types:
            penalty = switch_regularizer(routing, tokens, config.switch_loss)
            by_layer = full_attention_ratio(routing, batch["segment_ids"])
            loss = loss + penalty
            metrics |= {
                "regularization": penalty,
                "full_attention_ratio": jnp.mean(by_layer),
                "full_attention_ratio_by_layer": by_layer,
            }
        return loss, {"loss": language_loss} | metrics

    @jax.jit
    def step(state: TrainState, batch: dict[str, jax.Array]) -> tuple[TrainState, dict[str, jax.Array]]:
        (_, metrics), gradients = jax.value_and_grad(loss_of, has_aux=True)(state.params, batch)
        updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics["gradient_norm"] = optax.tree.norm(gradients)
        return TrainState(state.step + 1, params, optimizer_state), metrics

    return step


# ---- starting and resuming ----


def _start(config: TrainConfig) -> tuple[Decoder, list[list[AttentionPattern]]]:
    """The model at step 0 and, for each stage, the patterns its steps take in turn."""
    options = {
        "sliding_window": config.sliding_window,
        "num_sink_tokens": config.num_sink_tokens,
        "seed": config.seed,
    }
    if config.model is not None:
        pattern = load_pattern(config.pattern, config.model, **options)
        model = Decoder(config.model, pattern, rngs=nnx.Rngs(config.seed))
    else:
        assert config.init_from is not None
        loaded = load_model(config.init_from, dtype=jnp.float32)
        pattern = load_pattern(config.pattern, loaded.config, **options)
        model = loaded.with_pattern(pattern, rngs=nnx.Rngs(config.seed))
    patterns = []
    for number, stage in enumerate(config.stages):
        for source in stage.data:
            text_files(source.files)  # a missing file is better found now than when its stage begins
        window = {"sliding_window": stage.sliding_window or config.sliding_window}
        chosen = [load_pattern(name, model.config, **options | window) for name in stage.patterns]
        if stage.sliding_window is not None and not chosen:
            chosen = [load_pattern(config.pattern, model.config, **options | window)]
        patterns.append(chosen or [pattern])
        for one in patterns[-1]:
            if (SWITCH in one.layer_types) != (SWITCH in pattern.layer_types):
                raise ConfigError(f"'stages.{number}.patterns' and 'pattern' must both be routed, or neither")
            if one.full_attention_decode:
                raise ConfigError(
                    "training data of kind 'text' has no prompts and answers, so full-attention decode has no "
                    "boundary to start at: leave '+fa-decode' out of the pattern"
                )
    return model, patterns


def _claim(run: Path, config: TrainConfig) -> None:
    """Write `config.yaml`, or, if there is a checkpoint to go on from, check that the run there is the same one."""
    resolved, file = to_dict(config), run / "config.yaml"
    if file.exists() and any((run / "checkpoints").glob("[0-9]*")):
        before = to_dict(from_dict(TrainConfig, yaml.safe_load(file.read_text())))
        changed = sorted(key for key in resolved if before.get(key) != resolved[key])
        if changed:
            raise ConfigError(
                f"{run} holds a run whose '{changed[0]}' differs: set 'output' to a new folder, or resume with "
                f"{file} as it is"
            )
        return
    run.mkdir(parents=True, exist_ok=True)
    partial = run / "config.yaml.partial"
    partial.write_text(yaml.safe_dump(resolved, sort_keys=False))
    os.replace(partial, file)


def _stages(config: TrainConfig) -> Iterator[tuple[int, StageConfig, int]]:
    """Each stage with its number and its first step."""
    first = 0
    for number, stage in enumerate(config.stages):
        yield number, stage, first
        first += stage.steps


def _checkpointer(run: Path, config: TrainConfig) -> ocp.training.Checkpointer:
    return ocp.training.Checkpointer(
        (run / "checkpoints").resolve(),
        save_decision_policy=ocp.training.save_decision_policies.FixedIntervalPolicy(1),
        preservation_policy=ocp.training.preservation_policies.LatestN(config.keep_checkpoints),
        cleanup_tmp_directories=True,  # what a killed run left half written
    )


def _save(checkpoints: ocp.training.Checkpointer, step: int, state: TrainState, data_state: Any) -> None:
    checkpoints.save_checkpointables(
        step, {"state": _named(state), "data": {"iterator": _encode(data_state)}}
    )


def _restore(checkpoints: ocp.training.Checkpointer, state: TrainState) -> tuple[TrainState, Any]:
    wanted = _named(state)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), wanted)
    loaded = checkpoints.load_checkpointables(abstract_checkpointables={"state": abstract, "data": None})
    leaves = [loaded["state"][name] for name in wanted]
    return jax.tree.unflatten(jax.tree.structure(state), leaves), _decode(loaded["data"]["iterator"])


def _named(state: TrainState) -> dict[str, jax.Array]:
    """A flat dict in leaf order: what is on disk does not depend on optax's or NNX's container types."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _encode(value: Any) -> Any:
    """JSON keeps no tuples; grain's iterator states compare them, so they are marked."""
    if isinstance(value, tuple):
        return {"tuple": [_encode(item) for item in value]}
    if isinstance(value, dict):
        return {"dict": {key: _encode(item) for key, item in value.items()}}
    return [_encode(item) for item in value] if isinstance(value, list) else value


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if isinstance(value, dict):
        if "tuple" in value:
            return tuple(_decode(item) for item in value["tuple"])
        return {key: _decode(item) for key, item in value["dict"].items()}
    return value


# ---- metrics ----


def _keep_lines(file: Path, steps: int) -> None:
    """Drop the lines of steps after the last checkpoint: they are about to be run again."""
    if not file.exists():
        return
    lines = file.read_text().splitlines(keepends=True)[:steps]
    partial = file.with_suffix(".partial")
    partial.write_text("".join(lines))
    os.replace(partial, file)


def _plain(value: jax.Array) -> float | list[float]:
    return value.item() if value.ndim == 0 else value.tolist()


def _stop_on_nan(line: dict[str, Any]) -> None:
    if not (line["loss"] == line["loss"] and line["gradient_norm"] == line["gradient_norm"]):
        raise FloatingPointError(
            f"the loss or its gradient is not a number at step {line['step']}: lower optimizer.learning_rate; the last "
            "checkpoint is untouched"
        )


def _progress(quiet: bool) -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]:.3f}"),
        TimeElapsedColumn(), TimeRemainingColumn(), disable=quiet,
    )  # fmt: skip
