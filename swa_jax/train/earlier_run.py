"""What a run takes from an earlier one: what was chosen when it began itself, or the optimizer of another, with its
weights and its moments, out of its last checkpoint.

The schedule is not taken over: `optimizer.first_step` says where in it the new run begins.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import jax
import optax

from swa_jax.base.errors import CheckpointError, ConfigError
from swa_jax.base.settings import from_dict, parse_yaml
from swa_jax.model.attention import cast_parameters
from swa_jax.model.sharding import AUTO, MeshConfig
from swa_jax.train.config import TrainConfig
from swa_jax.train.run_checkpoints import from_first_process, has_checkpoint, last_good, load_state, recorded
from swa_jax.train.step import TrainState, abstract_state


def as_begun(config: TrainConfig) -> TrainConfig:
    """A run that has begun, with what was chosen for it then in place of "auto"; other devices choose their mesh."""
    file = recorded(Path(config.output), "config.yaml")
    if file is None or config == config.without_auto():
        return config
    before = from_dict(TrainConfig, parse_yaml(file.read_text(), str(file)))
    if len(before.stages) != len(config.stages):
        return config  # another run, which is refused
    stages = tuple(
        dataclasses.replace(stage, accumulate=old.accumulate) if stage.accumulate == AUTO else stage
        for stage, old in zip(config.stages, before.stages, strict=True)
    )
    changes: dict[str, Any] = {
        name: getattr(before, name) for name in ("remat", "scan_layers") if getattr(config, name) == AUTO
    }
    same = math.prod(before.mesh.sizes.values()) * before.mesh.slices == jax.device_count()
    if same and config.mesh == MeshConfig(slices=config.mesh.slices):
        changes["mesh"] = before.mesh
    return dataclasses.replace(config, stages=stages, **changes)


def check_earlier_run(config: TrainConfig) -> TrainConfig:
    """The configuration of the run that made `init_from`, whose optimizer state it is to go on with; reads no arrays.

    Raises `ConfigError`: `init_from` is no run's model, or the run's optimizer is another.
    """
    assert config.init_from is not None
    run, folder = _earlier_run(config)
    if not has_checkpoint(folder):
        raise ConfigError(
            f"'init_optimizer': {config.init_from} has no optimizer state, because {folder} holds no checkpoint; an "
            "imported model never has one. Set 'init_from' to the 'model' folder of a run whose checkpoints are "
            "there, or 'init_optimizer' to false"
        )
    settings = recorded(run, "config.yaml")
    if settings is None:
        raise ConfigError(f"'init_optimizer': {run} holds no config.yaml that says what its optimizer was")
    before = from_dict(TrainConfig, parse_yaml(settings.read_text(), str(settings)))
    if before.lora is not None:
        raise ConfigError(f"'init_optimizer': {run} trained LoRA adapters, and its optimizer has no other moments")
    if before.optimizer.name != config.optimizer.name:
        raise ConfigError(
            f"'init_optimizer': 'optimizer.name' is {config.optimizer.name}, but that of {run} was "
            f"{before.optimizer.name}: set it to that, or 'init_optimizer' to false"
        )
    whole = before.optimizer.first_step + before.total_steps
    if config.optimizer.first_step not in (0, whole):
        raise ConfigError(
            f"'optimizer.first_step' = {config.optimizer.first_step}, but the schedule of {run} ended at step {whole}: "
            f"set it to {whole} to go on with the schedule, or to 0 to start it anew"
        )
    return before


def with_earlier_optimizer(state: TrainState, config: TrainConfig) -> TrainState:
    """The state before step 0 with the weights and the optimizer state of the run that made `init_from`.

    The weights are those of its last checkpoint, in f32 whatever `save_dtype` was. The schedule's count, the running
    mean of gradient norms and the number of skipped updates are the new run's own. All processes call it.

    Raises `CheckpointError`: the checkpoint is damaged, of another model, or not what `init_from` was saved from.
    """
    before = check_earlier_run(config)
    run, folder = _earlier_run(config)
    step, problem = from_first_process(lambda: _last_step(folder))
    if problem:
        raise CheckpointError(f"'init_optimizer': {problem}")
    if step != before.total_steps:
        raise CheckpointError(
            f"'init_optimizer': the last checkpoint of {run} is of step {step} of {before.total_steps}: finish that run"
        )
    earlier, _ = load_state(folder / str(step), abstract_state(state.without_frozen()))
    if not _equal(cast_parameters(earlier.params, before.save_dtype), state.params):
        raise CheckpointError(
            f"'init_optimizer': the weights of {config.init_from} are not those of {folder / str(step)}: the folder "
            "holds another model than the run has trained"
        )
    optimizer = jax.tree.map(
        lambda fresh, old: fresh if _is_schedule(fresh) else old,
        state.optimizer,
        earlier.optimizer,
        is_leaf=_is_schedule,
    )
    return dataclasses.replace(state, params=earlier.params, optimizer=optimizer)


def _earlier_run(config: TrainConfig) -> tuple[Path, Path]:
    """(the run's folder, its checkpoints)."""
    assert config.init_from is not None
    run = Path(config.init_from).expanduser().resolve().parent
    return run, run / "checkpoints"


def _last_step(folder: Path) -> tuple[int, str]:
    """(step, "" or what stands in the way): the other processes wait for an answer."""
    try:
        return last_good(folder), ""
    except (CheckpointError, OSError) as error:
        return 0, str(error)


def _is_schedule(node: Any) -> bool:
    return isinstance(node, optax.ScaleByScheduleState)


@jax.jit
def _equal(rounded: Any, loaded: Any) -> jax.Array:
    """Whether every weight is, the first tree being of a dtype that holds no more digits than the second."""
    same = jax.tree.map(lambda x, y: (x.astype(y.dtype) == y).all(), rounded, loaded)
    return jax.tree.reduce(lambda x, y: x & y, same)
