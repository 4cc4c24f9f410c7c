"""What a run leaves open ("auto"): its mesh, remat, the loop over layers, and the pieces that a batch is taken in.

For TPUs that a plan can be made for, here or not, settings are compiled in the order of their estimated times, until
one that fits is as fast as all others are expected to be. On other devices nothing says what is fast, and the first
that fits into the memory by estimate is taken: all is kept, or more of a layer is computed again, or pieces are small.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax

from swa_jax.base.chips import find_chip
from swa_jax.base.errors import ConfigError
from swa_jax.model.memory import free_memory
from swa_jax.model.remat import Remat
from swa_jax.model.sharding import AUTO
from swa_jax.plan.candidates import RunChanges, divisors, present, refusal
from swa_jax.plan.cost import Workload, estimate_bytes
from swa_jax.plan.plan import plan_training
from swa_jax.plan.search import Compile, Say, Tried, outcome, search, workload
from swa_jax.train.config import TrainConfig
from swa_jax.train.patterns import Start, find_start
from swa_jax.train.run_checkpoints import from_first_process

TRIES = 4  # settings that are compiled at most
SHARE = 0.8  # of the free memory, where no compiler says what a step takes
ORDER: tuple[Remat, ...] = ("none", "projections", "attention", "layer")
PIECE = 8192  # tokens of a device's piece, below which its products are small


def is_open(config: TrainConfig, stage: int) -> bool:
    """Whether anything is left to be chosen of a stage's step."""
    values = [config.remat, config.scan_layers, config.stages[stage].accumulate]
    return AUTO in [*values, *dataclasses.asdict(config.mesh).values()]


def settled(config: TrainConfig, say: Say) -> TrainConfig:
    """A run on the devices that are here, with nothing left open. `say` is given lines about what is chosen.

    Raises:
      ConfigError: no settings suit the run and the devices, or none fit.
    """
    numbers = range(len(config.stages))
    if not any(is_open(config, stage) for stage in numbers):
        return config
    devices, start = jax.devices(), find_start(config)
    tokens = [stage.steps * stage.batch_size * stage.sequence_length for stage in config.stages]
    chip = find_chip(devices[0].device_kind)
    for stage in sorted(numbers, key=lambda number: -tokens[number]):  # the first chooses for the others
        if not is_open(config, stage):
            continue
        work = workload(config, start, devices, stage)
        if chip is None or chip.target is None:
            settings = fitting(work)
            if settings != present(config, stage, len(devices)):
                say(f"chosen to fit into the memory: {settings}")
        else:
            plan_one = functools.partial(_plan_one, config, start, devices, stage)
            best = fastest(work, plan_one, say)
            if best.seconds is None:
                raise ConfigError(f"no settings tried will do for the {len(devices)} devices: {outcome(best)}")
            settings = best.settings
        config = settings.apply(config, stage)
    return config


def _plan_one(
    config: TrainConfig, start: Start, devices: Sequence[Any], stage: int, settings: RunChanges
) -> dict[str, Any]:
    return plan_training(settings.apply(config, stage), start, devices, stage)


def fastest(work: Workload, compile_one: Compile, say: Say) -> Tried:
    """The fastest settings of those compiled that fit; if none do, the smallest, whose `seconds` are None.

    Raises:
      ConfigError: no settings suit the run and the devices, or no plan can be made of those that do.
    """
    found = search(work, compile_one, tries=TRIES, options=(), pinned=True, say=say)
    if found.best is not None:
        pins = " ".join(found.best.settings.overrides(work.config, work.stage_number))
        say(f"chosen: {outcome(found.best)}; to pin it: {pins}")
        return found.best
    smallest = min((one for one in found.tried if one.bytes), key=lambda one: one.bytes or 0, default=None)
    if smallest is None:
        raise ConfigError(found.tried[-1].why_not or "no plan can be made")
    return smallest


def fitting(work: Workload) -> RunChanges:
    """The first that fits into the memory that is here, by estimate; where none does, the one that takes least."""
    config, stage, here = work.config, work.stage, jax.local_devices()
    memory = from_first_process(free_memory)  # all compile the same program
    limit = SHARE * memory / (len(here) if here[0].platform == "cpu" else 1)
    own = present(config, work.stage_number, work.devices)
    pieces = divisors(stage.batch_size) if stage.accumulate == AUTO else [own.accumulate]
    kept = ORDER if config.remat == AUTO else (own.remat,)
    all_of_them = [own._replace(remat=remat, accumulate=count) for remat in kept for count in pieces]
    allowed = [one for one in all_of_them if refusal(one, config, work.model, work.stage_number) is None] or [own]
    tokens = stage.batch_size * stage.sequence_length / work.devices
    allowed.sort(key=lambda one: tokens < PIECE * one.accumulate)
    sizes = {one: estimate_bytes(work, one) for one in allowed}
    return next((one for one, size in sizes.items() if size <= limit), min(sizes, key=lambda one: sizes[one]))
