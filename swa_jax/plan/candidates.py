"""The settings that a search tries for a run: meshes, rematerialisation, pieces of a batch, the loop over layers,
options of XLA."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from typing import Any, NamedTuple, get_args

from jax.sharding import AbstractMesh

from swa_jax.base.errors import ConfigError
from swa_jax.model.config import ModelConfig
from swa_jax.model.remat import Remat
from swa_jax.model.sharding import AUTO, AXES, MeshConfig, Partition, check_batch, check_model, mesh_shape
from swa_jax.train.config import TrainConfig

XlaOption = tuple[str, str | bool | int]
REMAT: tuple[Remat, ...] = get_args(Remat)


class RunChanges(NamedTuple):
    """What a search may change in a run. `data` counts the devices of one slice, as in a configuration."""

    data: int
    fsdp: int
    context: int
    tensor: int
    remat: Remat
    accumulate: int
    xla_options: tuple[XlaOption, ...] = ()  # beside the configuration's own
    expert: int = 1
    scan_layers: bool = True

    def apply(self, config: TrainConfig, stage: int) -> TrainConfig:
        """The configuration with these settings; `stage` is the one whose batch is taken in pieces."""
        stages = list(config.stages)
        stages[stage] = dataclasses.replace(stages[stage], accumulate=self.accumulate)
        return dataclasses.replace(
            config,
            mesh=self._mesh(config),
            remat=self.remat,
            scan_layers=self.scan_layers,
            stages=tuple(stages),
            xla_options={**config.xla_options, **dict(self.xla_options)},
        )

    def overrides(self, config: TrainConfig, stage: int) -> list[str]:
        """What turns the configuration into `apply` of it, on the command line of `train` and `compile`."""
        changes: list[tuple[str, Any, Any]] = [
            (f"mesh.{axis}", getattr(config.mesh, axis), getattr(self, axis)) for axis in AXES
        ]
        changes.append(("remat", config.remat, self.remat))
        changes.append((f"stages.{stage}.accumulate", config.stages[stage].accumulate, self.accumulate))
        changes.append(("scan_layers", config.scan_layers, self.scan_layers))
        changes += [(f"xla_options.{name}", config.xla_options.get(name), value) for name, value in self.xla_options]
        return [f"{key}={_as_yaml(new)}" for key, old, new in changes if new != old]

    def partition(self, config: TrainConfig) -> Partition:
        """The mesh and its rules, without devices."""
        shape = mesh_shape(self._mesh(config), self.devices * config.mesh.slices)
        mesh: Any = AbstractMesh(shape, AXES)
        return Partition(mesh, config.sharding)

    def _mesh(self, config: TrainConfig) -> MeshConfig:
        return dataclasses.replace(config.mesh, **{axis: getattr(self, axis) for axis in AXES})

    @property
    def kind(self) -> tuple[Remat, bool]:
        """By what programs differ most."""
        return self.remat, self.scan_layers

    @property
    def sizes(self) -> tuple[int, ...]:
        """The mesh, along `AXES`."""
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def computed_again(self) -> bool:
        """Whether the compiler is free to keep less than everything: of layers in a loop it cannot."""
        return self.kind == ("none", False)

    @property
    def devices(self) -> int:
        """Devices of one slice."""
        return math.prod(self.sizes)

    def __str__(self) -> str:
        axes = [f"{axis} {size}" for axis in AXES if (size := getattr(self, axis)) > 1] or ["one device"]
        words = [*axes, f"remat {self.remat}", f"accumulate {self.accumulate}"]
        words += [] if self.scan_layers else ["every layer by itself"]
        return ", ".join(words + [f"{name}={_as_yaml(value)}" for name, value in self.xla_options])


def _as_yaml(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def present(config: TrainConfig, stage: int, devices: int) -> RunChanges:
    """The settings of a configuration as it stands, on so many devices of all slices.

    Raises `ConfigError`: its mesh does not suit the devices.
    """
    sizes: dict[str, Any] = dict(zip(AXES, mesh_shape(config.mesh, devices), strict=True))
    sizes["data"] //= config.mesh.slices
    remat, unroll, _ = config.training
    return RunChanges(**sizes, remat=remat, accumulate=config.stages[stage].pieces, scan_layers=not unroll)


def candidates(
    config: TrainConfig, model: ModelConfig, stage: int, devices: int, *, pinned: bool = False
) -> Iterator[RunChanges]:
    """All meshes of so many devices (of all slices), remat modes and pieces of the stage's batch that the run's sizes
    allow, with a loop over the layers and without. Every stage can be trained under each: the others keep their own
    pieces. `pinned`: only those that agree with what the configuration says, "auto" standing for anything."""
    rows = config.stages[stage].batch_size
    if devices % config.mesh.slices:
        return
    for shape in factorisations(devices // config.mesh.slices, len(AXES)):
        sizes: dict[str, Any] = dict(zip(AXES, shape, strict=True))
        if sizes["expert"] > 1 and not model.num_experts:
            continue  # the same as fsdp, with the weights repeated
        for accumulate in divisors(rows):
            settings = RunChanges(**sizes, remat=REMAT[0], accumulate=accumulate)
            if pinned and not _agrees(settings, config, stage, devices):
                continue
            if refusal(settings, config, model, stage) is None:
                kept = [config.remat] if pinned and config.remat != AUTO else REMAT
                loops = [config.scan_layers] if pinned and config.scan_layers != AUTO else (True, False)
                yield from (settings._replace(remat=one, scan_layers=loop) for one in kept for loop in loops)


def _agrees(settings: RunChanges, config: TrainConfig, stage: int, devices: int) -> bool:
    """Whether a mesh and pieces are what the configuration says of them."""
    given = {axis: getattr(config.mesh, axis) for axis in AXES}
    if -1 in given.values():  # it takes what remains, so that no axis is open
        own = present(config, stage, devices)
        given = {axis: getattr(own, axis) for axis in AXES}
    given["accumulate"] = config.stages[stage].accumulate
    return all(value in (AUTO, getattr(settings, name)) for name, value in given.items())


def refusal(settings: RunChanges, config: TrainConfig, model: ModelConfig, stage: int) -> str | None:
    """Why a run cannot have these settings, in one sentence; None if it can."""
    try:
        tried = settings.apply(config, stage)
        partition = settings.partition(config)
        check_model(model, partition)
        for number, one in enumerate(tried.stages):
            rows = one.batch_size // one.pieces
            check_batch(partition, rows, one.sequence_length, f"stages.{number}", order=config.sequence_order)
    except ConfigError as error:
        return str(error)
    return None


def factorisations(number: int, factors: int) -> Iterator[tuple[int, ...]]:
    """Every way to write a number as a product of so many, their order counted."""
    if factors == 1:
        yield (number,)
        return
    for first in divisors(number):
        for others in factorisations(number // first, factors - 1):
            yield (first, *others)


def divisors(number: int) -> list[int]:
    small = [i for i in range(1, math.isqrt(number) + 1) if number % i == 0]
    return sorted({*small, *(number // i for i in small)})
