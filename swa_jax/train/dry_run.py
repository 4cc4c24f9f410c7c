"""What a run would do, after everything that could be wrong with it has been looked at; no step is taken."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import jax
from flax import nnx

from swa_jax.base.errors import ConfigError
from swa_jax.model.config import ModelConfig
from swa_jax.model.decoder import Decoder
from swa_jax.model.pattern import AttentionPattern
from swa_jax.model.sharding import AUTO, MeshConfig
from swa_jax.train.config import TrainConfig
from swa_jax.train.earlier_run import as_begun
from swa_jax.train.loop import check_run, describe_stage, make_partition
from swa_jax.train.patterns import with_folders
from swa_jax.train.records import check_folder, records_of
from swa_jax.train.run_checkpoints import newest_step


def describe_run(config: TrainConfig, devices: int | None = None) -> str:
    """The run in lines.

    Args:
      devices: how many devices it will have. None: as many as the mesh names, or those that are here.

    Raises `ConfigError` as `train` would before its first step.
    """
    config = with_folders(as_begun(config))
    devices = devices or _named(config.mesh)
    others = None if devices in (None, jax.device_count()) else devices
    mesh = None
    given = dataclasses.asdict(config.mesh).values()
    if AUTO in given and -1 not in given:
        try:
            make_partition(config, others)
        except ConfigError as error:
            mesh = f"to be chosen on TPUs; as it stands, {error}"
            config, others = dataclasses.replace(config, mesh=MeshConfig(1, 1, 1, 1, expert=1)), 1
    checked = check_run(config, others)
    check_folder(checked.folder, config.without_auto(), records_of(config, checked.all_patterns))
    done = newest_step(Path(config.output) / "checkpoints")
    start = f"goes on from step {done} of {config.total_steps}" if done else f"begins, {config.total_steps} steps"
    source = "drawn at random" if config.init_from is None else f"from {config.init_from}"
    partition = checked.partition
    if mesh is None:
        mesh = "one device" if partition is None else ", ".join(f"{k} {v}" for k, v in partition.mesh.shape.items())
    lines = [
        f"run: {config.output}, {start}",
        f"model: {checked.model_config.model_type}, {_parameters(checked.model_config, checked.pattern):,} parameters, "
        f"{source}",
        f"tokenizer: {config.tokenizer}, {checked.tokenizer.vocab_size} tokens",
        f"mesh: {mesh}",
    ]
    for number, begin in enumerate(config.starts):
        lines.append(describe_stage(config, number, begin, checked.patterns[number]))
        lines += [f"data: {source.kind} {' '.join(source.files)}".rstrip() for source in config.stages[number].data]
    return "\n".join([*lines, "nothing was trained: leave out --dry-run to start"])


def _named(mesh: MeshConfig) -> int | None:
    """The devices that a mesh asks for; None where one of its axes takes what there is."""
    sizes = mesh.sizes.values()
    return None if -1 in sizes else mesh.slices * math.prod(sizes)


def _parameters(config: ModelConfig, pattern: AttentionPattern) -> int:
    model = nnx.eval_shape(lambda: Decoder(config, pattern, rngs=nnx.Rngs(0)))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
