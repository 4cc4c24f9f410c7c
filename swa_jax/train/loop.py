"""Training: pretraining, continued pretraining (CPT) and SwiAttn's routed CPT, from one YAML file, on one device or
many.

A run folder holds `config.yaml` (resolved), `patterns.json`, `metrics.jsonl` (one line a step), `checkpoints/` and, at
the end, `model/` and `loss.png`; under LoRA also `adapter/`, what was trained, which is merged in `model/`. Started
again with the same configuration, a run goes on from its last checkpoint, bit for bit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AbstractMesh

from swa_jax.base.chips import peak_flops
from swa_jax.base.errors import CheckpointError, ConfigError, NotFiniteError, full_disk, reason
from swa_jax.base.settings import to_dict
from swa_jax.checkpoint.families import with_keys_of
from swa_jax.checkpoint.folder import load_model, open_checkpoint, save_model
from swa_jax.checkpoint.peft import save_adapter
from swa_jax.data.batches import Batches
from swa_jax.data.tokenizer import Tokenizer, check_same_tokens, load_tokenizer
from swa_jax.model.attention import cast_parameters
from swa_jax.model.config import ModelConfig
from swa_jax.model.decoder import Decoder
from swa_jax.model.draws import split_over_devices
from swa_jax.model.flops import train_flops_per_token
from swa_jax.model.layer_types import SWITCH
from swa_jax.model.lora import merge_lora, trained_and_frozen, with_lora
from swa_jax.model.pattern import AttentionPattern
from swa_jax.model.sharding import AXES, Partition, check_batch, check_model, make_mesh, mesh_shape, state_shardings
from swa_jax.report.progress import Progress, rate
from swa_jax.train.compiler import check_options
from swa_jax.train.config import TrainConfig
from swa_jax.train.earlier_run import as_begun, check_earlier_run, with_earlier_optimizer
from swa_jax.train.optimizer import make_optimizer, warn_of_short_runs
from swa_jax.train.patterns import check_patterns, find_start, run_pattern, stage_patterns, with_folders
from swa_jax.train.preemption import Preempted, preemption_notices
from swa_jax.train.records import claimed, records_of
from swa_jax.train.run_checkpoints import RunCheckpoints, from_first_process, has_checkpoint
from swa_jax.train.run_log import RunLog, check_packages, draw_losses
from swa_jax.train.stage_data import check_same_data, local_rows, open_stages, stage_batches
from swa_jax.train.step import TrainState, abstract_state, init_state, make_step, make_validation_loss, shard_state
from swa_jax.train.teacher import check_teacher_fits, find_teacher, kept_weights
from swa_jax.train.worker import check_lease, compile_together, meet

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class CheckedRun:
    """What a run is made of, but for its model and what trains it."""

    config: TrainConfig
    tokenizer: Tokenizer
    partition: Partition | None
    model_config: ModelConfig
    pattern: AttentionPattern
    patterns: list[list[AttentionPattern]]  # by stage: those that its steps take in turn
    teacher: Decoder | None  # of distillation in the step, without weights
    batches: dict[int, Batches]  # by stage: of those that are still to come

    @property
    def folder(self) -> Path:
        return Path(self.config.output)

    @property
    def all_patterns(self) -> list[AttentionPattern]:
        """The model's, those of the stages, and the teacher's."""
        teacher = [] if self.teacher is None else [self.teacher.pattern]
        return [self.pattern, *itertools.chain(*self.patterns), *teacher]


@dataclasses.dataclass(frozen=True)
class TrainingRun(CheckedRun):
    """A run but for its state."""

    model: Decoder  # at step 0; without weights once they are in the state
    optimizer: optax.GradientTransformation


def train(config: TrainConfig, *, quiet: bool = False) -> Path:
    """Run, or go on with, a training run; returns the folder of the finished model (a checkpoint folder).

    With several processes (`jax.distributed`) all call it with the same configuration; they see the same run folder.

    Raises:
      ConfigError: the configuration cannot be used, or differs from that of the run being resumed.
      CheckpointError: a checkpoint could not be written, or none of those that are there is good.
      Preempted: the machine is being taken away (SIGTERM); a checkpoint of the last step is on the disk.
    """
    named = config.init_from
    config = with_folders(as_begun(config)).without_auto()
    run = _prepare(config)
    meet()
    check_same_data(run.batches)
    run, state = _begin(run)
    folder, records = run.folder / "checkpoints", records_of(config, run.all_patterns)
    if config.init_optimizer and not from_first_process(lambda: has_checkpoint(folder)):
        state = with_earlier_optimizer(state, config)
    first = jax.process_index() == 0
    keep, keep_period = config.keep_checkpoints, config.keep_checkpoint_period
    with (
        # The others wait for the first when they look for checkpoints.
        claimed(run.folder, config, records) if first else contextlib.nullcontext(),
        preemption_notices() as preempted,
        RunCheckpoints(folder, keep=keep, keep_period=keep_period, records=records) as checkpoints,
    ):
        data_state = None
        if checkpoints.newest is not None:
            fresh = state.without_frozen()
            wanted = abstract_state(fresh)
            jax.tree.map(lambda x: x.delete(), fresh)  # there is no room for both
            restored, data_state = checkpoints.restore(wanted)
            state = restored.with_frozen(state)
        done = int(state.step)
        peak = peak_flops(jax.devices()[0].device_kind)
        whole = None if peak is None else peak * jax.device_count()
        log = RunLog(run.folder, config.log, resume_at=done, settings=to_dict(config), peak_flops=whole)
        with Progress("step", transient=False, quiet=quiet or not first) as progress, log:
            session = _Session(run, checkpoints, log, progress, preempted)
            for number, start in enumerate(config.starts):
                if done < start + config.stages[number].steps:
                    progress.say(describe_stage(config, number, start, run.patterns[number]))
                    state = session.train_stage(number, start, state, data_state if done > start else None)
                    done = int(state.step)
    finished = _save_finished(run, state, named)
    if first:
        draw_losses(run.folder)
    return finished


@dataclasses.dataclass(frozen=True)
class _Session:
    """A run at work: what its steps are saved to and shown by, and who may end it."""

    run: TrainingRun
    checkpoints: RunCheckpoints
    log: RunLog
    progress: Progress
    preempted: Callable[[int], bool]
    held_out: dict[int, Batches] = dataclasses.field(default_factory=dict)  # by stage: opening reads all texts

    def train_stage(self, number: int, start: int, state: TrainState, data_state: Any) -> TrainState:
        """The steps of a stage that are left, the stage's first being `start`; consumes the state, returns the last."""
        run, config, partition, stage = self.run, self.run.config, self.run.partition, self.run.config.stages[number]
        batches = run.batches.pop(number, None) or stage_batches(config, number, run.tokenizer, partition)
        if data_state is not None:
            batches.set_state(data_state)
        models = [run.model.with_pattern(pattern) for pattern in run.patterns[number]]
        steps = [make_step(model, run.optimizer, config, partition, run.teacher) for model in models]
        losses = [make_validation_loss(model, config, partition) for model in models]
        tokens, end = stage.batch_size * stage.sequence_length, start + stage.steps
        length, own = stage.sequence_length, None if run.teacher is None else run.teacher.pattern
        flops = [
            tokens * train_flops_per_token(model.config, model.pattern, length, lora=model.lora, teacher=own)
            for model in models
        ]
        first = int(state.step)
        if first == 0 and config.validate_every is not None:
            self.validate(number, losses[0], state)
        for step in range(first, end):
            which, done = step % len(models), step + 1
            self.checkpoints.check()
            self.log.trace(step)
            batch = place_batch(next(batches), partition, stage.batch_size)
            if step < first + len(models):
                compile_together(steps[which], state, batch, stage.pieces)
            state, metrics = steps[which](state, batch, stage.pieces)
            self.show(self.log.write(done, metrics, tokens, flops[which]))
            stopping = self.preempted(done)
            saving = stopping or done % config.checkpoint_every == 0 or done == end
            validating = config.validate_every is not None and done % config.validate_every == 0
            if saving or validating:
                self.show(self.log.flush())  # a state that is no number is not saved
            # The loss first: after a checkpoint it would not be made up if the run were killed between the two. A run
            # that is told to stop has little time, and saves first.
            if validating and not stopping:
                self.validate(number, losses[which], state)
            if saving:
                self.log.sync()
                self.checkpoints.save(done, state.without_frozen(), batches.get_state())
            if validating and stopping:
                self.validate(number, losses[which], state)
            if stopping and done < config.total_steps:
                self.checkpoints.wait()
                logger.warning("stopped at step %d by SIGTERM: start the same command again to go on", done)
                raise Preempted
        return state

    def show(self, lines: list[dict[str, Any]]) -> None:
        """The lines of steps that are now known."""
        for line in lines:
            newest = self.checkpoints.newest
            note = "" if newest is None else f"last checkpoint {newest}"
            self.progress.update(line["step"], self.run.config.total_steps, _summary(line), note)
            _stop_on_nan(line, self.run.config)

    def validate(self, number: int, loss: Any, state: TrainState) -> None:
        """Log and show the loss of the documents that a stage holds out."""
        run = self.run
        if number not in self.held_out:
            self.held_out[number] = stage_batches(run.config, number, run.tokenizer, run.partition, held_out=True)
        done, value = int(state.step), held_out_loss(run, number, self.held_out[number], loss, state)
        self.log.add(done, {"validation_loss": value})
        self.progress.say(f"step {done}/{self.run.config.total_steps}  validation loss {value:.4f}")


def describe_stage(config: TrainConfig, number: int, start: int, patterns: Sequence[AttentionPattern]) -> str:
    """What is about to be trained: a recipe does not say by itself which window it takes."""
    stages, stage = config.stages, config.stages[number]
    head = (
        f"stage {number + 1} of {len(stages)}: steps {start + 1} to {start + stage.steps}, each "
        f"{stage.batch_size} rows of {stage.sequence_length} tokens"
    )
    return "\n".join([head, *(str(pattern) for pattern in patterns)])


def _save_finished(run: TrainingRun, state: TrainState, named: str | None) -> Path:
    """Write the model of a run that is done, unless it is there; all processes leave when it is."""
    config, destination = run.config, run.folder / "model"
    if from_first_process(destination.exists):
        return destination
    try:
        model = run.model if config.lora is None else _merged(run, state, named)
        trained = state.params if config.lora is None else nnx.state(model)
        nnx.update(model, cast_parameters(trained, config.save_dtype))
        check_lease()
        save_model(model, destination, hf_config=_hf_config(run), tokenizer_from=config.tokenizer)
    except (OSError, ValueError) as error:  # ValueError: TensorStore's, of a full disk
        if isinstance(error, ConfigError) or not (isinstance(error, OSError) or full_disk(error)):
            raise
        raise CheckpointError(
            f"{destination} could not be written: {reason(error)}; the checkpoint of step {int(state.step)} is "
            "untouched: start the same command again to write the model"
        ) from error
    from_first_process(lambda: None)
    return destination


def _hf_config(run: TrainingRun) -> dict[str, Any]:
    """The finished model's `config.json`: that of the model it started from, or what says the same beside changes."""
    if run.config.init_from is None:
        said: dict[str, Any] = {"bos_token_id": run.tokenizer.bos_id, "eos_token_id": run.tokenizer.eos_id}
        return with_keys_of(said, run.model_config)
    source = open_checkpoint(run.config.init_from)
    return source.hf_config if source.config == run.model_config else with_keys_of(source.hf_config, run.model_config)


def _merged(run: TrainingRun, state: TrainState, named: str | None) -> Decoder:
    """The trained model with its adapters merged, which are written first, for the base as it was named.

    Frozen weights are read again, since the run may have held them in bf16.
    """
    assert run.config.init_from is not None
    assert named is not None
    assert run.config.lora is not None
    jax.tree.map(lambda x: x.delete(), state.frozen)
    source = open_checkpoint(run.config.init_from)
    base = load_model(
        run.config.init_from,
        run.model.pattern,
        dtype=jnp.result_type(source.dtype, run.config.save_dtype),
        config=run.model.config,
        partition=run.partition,
    )
    model = with_lora(base, run.config.lora, nnx.Rngs(run.config.seed))
    nnx.update(model, state.params)
    destination = run.folder / "adapter"
    if not from_first_process(destination.exists):
        folder = Path(named).expanduser()
        save_adapter(model, destination, base=str(folder.resolve()) if folder.exists() else named)
    return merge_lora(model)


def place_batch(batch: dict[str, np.ndarray], partition: Partition | None, batch_size: int) -> dict[str, jax.Array]:
    """This process's rows [b, T] of a batch, on the devices as the whole batch [B, T], split by rows and tokens."""
    if partition is None:
        return jax.tree.map(jnp.asarray, batch)
    here = local_rows(partition, batch_size).start

    def place(name: str, x: np.ndarray) -> jax.Array:
        def piece(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            first, last, _ = index[0].indices(batch_size)
            return x[(slice(first - here, last - here), *index[1:])]

        sharding = partition.sharding("batch", None if name == "full_from" else "sequence")
        return jax.make_array_from_callback((batch_size, *x.shape[1:]), sharding, piece)

    return {name: place(name, x) for name, x in batch.items()}


def held_out_loss(run: TrainingRun, number: int, batches: Batches, loss: Any, state: TrainState) -> float:
    """Mean loss of the documents that a stage's data holds out, over `validation_batches` batches at most; `batches`
    stand where they stood afterwards."""
    config, stage, start = run.config, run.config.stages[number], batches.get_state()
    total = weight = 0.0
    for i, batch in enumerate(itertools.islice(batches, config.validation_batches * stage.pieces)):
        placed = place_batch(batch, run.partition, stage.batch_size // stage.pieces)
        if i == 0:
            compile_together(loss, state.params, state.frozen, placed)
        nll, weights = loss(state.params, state.frozen, placed)
        total, weight = total + float(nll), weight + float(weights)
    batches.set_state(start)
    return total / max(weight, 1e-6)


# ---- starting and resuming ----


def make_partition(config: TrainConfig, devices: int | None = None) -> Partition | None:
    """The mesh of a run, checked against its stages, of `devices` that need not be here; None on a single device."""
    mesh: Any = AbstractMesh(mesh_shape(config.mesh, devices), AXES) if devices else make_mesh(config.mesh)
    if mesh.size == 1:
        return None
    partition = Partition(mesh, config.sharding)
    for number, stage in enumerate(config.stages):
        rows = stage.batch_size // stage.pieces
        check_batch(partition, rows, stage.sequence_length, f"stages.{number}", order=config.sequence_order)
    return partition


def check_run(config: TrainConfig, devices: int | None = None) -> CheckedRun:
    """Everything that can be wrong is found before the model is drawn or read.

    Args:
      devices: how many devices the run will have, where they are not those that are here.
    """
    if config.lora is not None and config.init_from is None:
        raise ConfigError("'lora' adapts a trained model: set 'init_from' to its checkpoint folder in place of 'model'")
    check_packages(config.log)
    tokenizer = load_tokenizer(config.tokenizer)
    if config.init_from is not None:
        check_same_tokens(tokenizer, config.tokenizer, config.init_from)
    if devices is None:
        check_options(config.xla_options, jax.local_devices()[0])
    partition = make_partition(config, devices)
    start = find_start(config)
    model_config = start.config
    if partition is not None:
        check_model(model_config, partition)
    if config.init_from is not None:  # a released tokenizer may have more tokens than its model
        tokenizer = tokenizer.within(model_config.vocab_size)
    elif tokenizer.vocab_size > model_config.vocab_size:
        raise ConfigError(
            f"tokenizer {config.tokenizer} has {tokenizer.vocab_size} tokens, the model's vocab_size is "
            f"{model_config.vocab_size}: they do not belong together"
        )
    if config.router_aux_loss_coef and not model_config.num_experts:
        raise ConfigError("'router_aux_loss_coef' spreads tokens over experts, which this model does not have: drop it")
    if config.init_optimizer and not has_checkpoint(Path(config.output) / "checkpoints"):
        check_earlier_run(config)
    pattern = run_pattern(config, start)
    patterns = [stage_patterns(config, start, stage) for stage in config.stages]
    teacher = find_teacher(config, start)
    check_patterns(config, patterns, SWITCH in pattern.layer_types, None if teacher is None else teacher.pattern)
    if teacher is not None and devices is None:
        check_teacher_fits(config, teacher)
    batches = open_stages(config, tokenizer, partition if devices is None else None)
    return CheckedRun(config, tokenizer, partition, model_config, pattern, patterns, teacher, batches)


def _prepare(config: TrainConfig) -> TrainingRun:
    run = check_run(config)
    if config.init_from is not None:
        model = load_model(
            config.init_from,
            run.pattern,
            dtype=config.start_dtype,
            config=run.model_config,
            partition=run.partition,
            router_seed=config.seed,
        )
        if config.lora is not None:
            model = with_lora(model, config.lora, nnx.Rngs(config.seed))
    else:
        model = random_model(run.model_config, run.pattern, config.seed, run.partition)
    warn_of_short_runs(config.optimizer, config.total_steps)
    optimizer = make_optimizer(config.optimizer, config.total_steps, run.model_config, config.rate_factors)
    return TrainingRun(**vars(run), model=model, optimizer=optimizer)


def _begin(run: TrainingRun) -> tuple[TrainingRun, TrainState]:
    """The run, and its state before step 0, which alone holds the weights from now on."""
    trained, frozen = trained_and_frozen(run.model)
    state = init_state(trained, run.optimizer, frozen, kept_weights(run.config, run.teacher, trained))
    state = shard_state(state, run.partition, run.model_config)
    return dataclasses.replace(run, model=nnx.eval_shape(lambda: run.model)), state


def random_model(config: ModelConfig, pattern: AttentionPattern, seed: int, partition: Partition | None) -> Decoder:
    """A model drawn at random in f32; on a mesh every device draws its own part, and the whole is the same."""

    def draw() -> Decoder:
        return Decoder(config, pattern, rngs=nnx.Rngs(seed))

    if partition is None:
        return draw()
    graph, abstract = nnx.split(nnx.eval_shape(draw))
    shardings = state_shardings(abstract, partition, config)
    with split_over_devices():
        return nnx.merge(graph, jax.jit(lambda: nnx.state(draw()), out_shardings=shardings)())


# ---- what is shown ----


def _stop_on_nan(line: dict[str, Any], config: TrainConfig) -> None:
    if config.on_nonfinite == "stop" and not np.isfinite([line["loss"], line["gradient_norm"]]).all():
        raise NotFiniteError(
            f"the loss or its gradient is not a number at step {line['step']}: lower optimizer.learning_rate; the last "
            "checkpoint is untouched"
        )


def _summary(line: dict[str, Any]) -> str:
    words = [f"loss {line['loss']:.3f}", f"{rate(line['tokens_per_second'])} tokens/s"]
    if "mfu" in line:  # the peak of the chip is known
        words.append(f"MFU {100 * line['mfu']:.0f} %")
    return "  ".join(words)
