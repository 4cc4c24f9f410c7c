"""Searches settings for a run on given chips: estimates all by formula, compiles the best one after another.

The next to be compiled is the one with the least estimated time of those whose estimated memory fits. Estimates are
corrected on the way: by the ratio of compiled to estimated of the settings most alike. The best settings are then
compiled without the loop over layers, and so are the best that keep everything; then XLA's own options are added one
at a time. What helps stays.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from swa_jax.base.chips import GIB, chip_name
from swa_jax.base.errors import ConfigError
from swa_jax.base.files import START_OVER, check_content, read_document, sum_of_json, write_json
from swa_jax.base.settings import to_dict
from swa_jax.plan.candidates import RunChanges, XlaOption, candidates, present, refusal
from swa_jax.plan.cost import StepEstimate, Workload, estimate
from swa_jax.plan.plan import check_stage, planned_start, topology_devices
from swa_jax.train.compiler import check_options
from swa_jax.train.config import TrainConfig
from swa_jax.train.patterns import stage_patterns

MARGIN = 1.1  # of a chip's memory: an estimate above it is not compiled, as long as nothing has corrected it
# Times a chip's memory, by estimate: without the loop over layers, the compiler computes again what does not fit. That
# has brought SWAT 340M with `remat: none` from an estimate of 2.5 times to 0.97 (docs/plans).
COMPUTED_AGAIN = 3.0
TRIES = 6
NEXT_BEST = 20  # of those that were not compiled, that a report has

# What libtpu's compiler can do otherwise, and may do better for some programs. One that it refuses costs seconds.
XLA_OPTIONS: tuple[tuple[XlaOption, ...], ...] = (
    (("xla_tpu_scoped_vmem_limit_kib", 98304),),  # VMEM for one operation
    (  # collectives beside matrix products
        ("xla_enable_async_all_gather", True),
        ("xla_tpu_enable_async_collective_fusion_fuse_all_gather", True),
        ("xla_tpu_enable_async_collective_fusion_multiple_steps", True),
        ("xla_tpu_overlap_compute_collective_tc", True),
    ),
    (("xla_tpu_enable_async_collective_fusion_with_mosaic_custom_call", True),),  # and beside kernels
    (("xla_tpu_prefer_async_allgather_to_allreduce", True),),
    (("xla_tpu_enable_all_experimental_scheduler_features", True),),
)

Compile = Callable[[RunChanges], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Tried:
    """Settings that were compiled, or that could not be.

    Attributes:
      report: the plan; None where there is none.
      why_not: they cannot be had, in one sentence; None if they can.
    """

    settings: RunChanges
    estimate: StepEstimate
    report: dict[str, Any] | None = None
    why_not: str | None = None

    @property
    def seconds(self) -> float | None:
        """Of a step as it is scheduled; None where it does not fit."""
        return self.report["time"]["seconds"] if self.report and "time" in self.report else None

    @property
    def bytes(self) -> float | None:
        """Of a chip, also where it does not fit."""
        if self.report is None:
            return None
        memory = self.report["memory"]
        return memory["total"] if memory["fits"] else memory["needed"]


@dataclasses.dataclass(frozen=True)
class Found:
    """What a search came to.

    Attributes:
      tried: in the order of compilation.
      not_tried: the best of the rest, by corrected estimates.
      counts: all that the run's sizes allow, and those of them that were expected to fit or were compiled.
      own, refused: the settings of the configuration as it stands, or why it does not suit the chips.
    """

    tried: list[Tried]
    not_tried: list[Tried]
    counts: dict[str, int]
    own: RunChanges | None
    refused: str | None

    @property
    def best(self) -> Tried | None:
        """The fastest that fits."""
        return _best(self.tried)


def workload(config: TrainConfig, topology: str, stage: int) -> Workload:
    """What the search is for.

    Raises:
      ConfigError, CheckpointError: as `plan`.
    """
    check_stage(config, stage)
    devices = topology_devices(topology, config.mesh.slices)
    check_options(config.xla_options, devices[0])
    start = planned_start(config)
    chip = chip_name(devices[0].device_kind)
    assert chip is not None  # `topology_devices` takes no other
    pattern = stage_patterns(config, start, config.stages[stage])[0]
    return Workload(config, stage, start.config, pattern, chip, len(devices))


def search(
    work: Workload,
    compile_one: Compile,
    *,
    tries: int = TRIES,
    options: Sequence[tuple[XlaOption, ...]] = XLA_OPTIONS,
    known: Sequence[Tried] = (),
    keep: Callable[[Tried], None] = lambda tried: None,
    say: Callable[[str], None] = lambda line: None,
) -> Found:
    """Compile the configuration as it stands, then what looks best, then the best without the loop and with options.

    Args:
      compile_one: the plan of settings; `ConfigError` where they cannot be had.
      tries: settings that are compiled, the configuration's own included; the rest comes after them.
      known: what an earlier call has compiled, which is not compiled again.
      keep: is given each `Tried` as soon as it is known.
      say: is given a line before and one after each compilation.

    Raises:
      ConfigError: no settings suit the run and the chips.
    """
    stage, tried = work.stage_number, list[Tried]()
    by_settings = {one.settings: one for one in known}
    guesses = {one: estimate(work, one) for one in candidates(work.config, work.model, stage, work.devices)}
    if not guesses:
        raise ConfigError(
            f"no mesh of {work.devices} devices suits the run: its heads, batch and lengths cannot be split so often"
        )

    def run(settings: RunChanges, guess: StepEstimate) -> Tried:
        seconds, size = _corrected(settings, guess, tried)
        found = by_settings.pop(settings, None)
        if found is None:
            say(f"{len(tried) + 1}. {settings}: {seconds:.3g} s and {size / GIB:.1f} GiB by estimate; compiling")
            try:
                found = Tried(settings, guess, compile_one(settings))
            except ConfigError as error:
                found = Tried(settings, guess, why_not=str(error))
            keep(found)
            say(f"   {outcome(found)}")
        tried.append(found)
        return found

    own, refused = _as_it_stands(work)
    if own is not None:
        run(own, guesses[own])
    while len(tried) < tries and (order := _in_order(guesses, tried, work)):
        run(order[0], guesses[order[0]])
    best = _best(tried)
    if best is not None and best.settings.scan_layers:  # every layer by itself, too, and so the best that keeps all
        run(best.settings._replace(scan_layers=False), best.estimate)
        most = COMPUTED_AGAIN * work.chip.hbm_gib * GIB
        keeping = [one for one, guess in guesses.items() if one.remat == "none" and guess.bytes <= most]
        fastest = min(keeping, key=lambda one: guesses[one].seconds, default=best.settings)
        if guesses[fastest].seconds < best.estimate.seconds:
            run(fastest._replace(scan_layers=False), guesses[fastest])
    for option in options:
        best = _best(tried)
        if best is None:
            break
        run(best.settings._replace(xla_options=(*best.settings.xla_options, *option)), best.estimate)
    order = _in_order(guesses, tried, work)
    everything = [*tried, *by_settings.values()]
    counts = {"allowed": len(guesses), "would_fit": len({*order, *(one.settings for one in tried)} & {*guesses})}
    not_tried = [Tried(one, guesses[one]) for one in order[:NEXT_BEST]]
    return Found(everything, not_tried, counts, own, refused)


def _as_it_stands(work: Workload) -> tuple[RunChanges | None, str | None]:
    """The configuration's own settings, or why the chips cannot have them."""
    try:
        own = present(work.config, work.stage_number, work.devices)
    except ConfigError as error:
        return None, str(error)
    refused = refusal(own, work.config, work.model, work.stage_number)
    return (own, None) if refused is None else (None, refused)


def _best(tried: Sequence[Tried]) -> Tried | None:
    return min((one for one in tried if one.seconds is not None), key=lambda one: one.seconds or 0.0, default=None)


def _in_order(guesses: dict[RunChanges, StepEstimate], tried: list[Tried], work: Workload) -> list[RunChanges]:
    """What was not compiled and is expected to fit, by corrected time."""
    done = {one.settings for one in tried}
    corrected = {one: _corrected(one, guess, tried) for one, guess in guesses.items() if one not in done}
    most = work.chip.hbm_gib * GIB * (1 if any(one.report for one in tried) else MARGIN)
    return sorted((one for one in corrected if corrected[one][1] <= most), key=lambda one: corrected[one])


def _corrected(settings: RunChanges, guess: StepEstimate, tried: Sequence[Tried]) -> tuple[float, float]:
    """Estimated seconds and bytes times the mean ratio of what was compiled to its estimate, of those most alike."""
    seconds = [(t.settings, t.seconds / t.estimate.seconds) for t in tried if t.seconds is not None]
    sizes = [(t.settings, t.bytes / t.estimate.bytes) for t in tried if t.bytes is not None]
    return guess.seconds * _ratio(settings, seconds), guess.bytes * _ratio(settings, sizes)


def _ratio(settings: RunChanges, ratios: Sequence[tuple[RunChanges, float]]) -> float:
    """The geometric mean of those most alike; 1 where there are none."""
    most = max((_likeness(settings, other) for other, _ in ratios), default=0)
    alike = [math.log(ratio) for other, ratio in ratios if _likeness(settings, other) == most]
    return math.exp(sum(alike) / len(alike)) if alike else 1.0


def _likeness(one: RunChanges, other: RunChanges) -> int:
    """What two settings share of that by which programs differ most."""
    same_axes = sum((getattr(one, axis) > 1) == (getattr(other, axis) > 1) for axis in ("expert", "context", "tensor"))
    return same_axes + 2 * (one.remat == other.remat) + 3 * (one.scan_layers == other.scan_layers)


def outcome(tried: Tried) -> str:
    """What came of a compilation, in a line."""
    if tried.report is None:
        return f"cannot be had: {tried.why_not}"
    gib = f"{(tried.bytes or 0) / GIB:.2f} GiB of a chip"
    if tried.seconds is None:
        return f"does not fit: {gib}"
    time = tried.report["time"]
    return f"{time['seconds']:.3g} s a step, MFU {time['mfu_scheduled']:.0%}, {gib}"


# ---- what is kept ----


def key_of(work: Workload, topology: str) -> dict[str, Any]:
    """What a file's results are of; everything that they depend on but the settings."""
    content = [to_dict(work.config), to_dict(work.model), work.pattern.to_json()]
    names = ("jax", "libtpu", "swa-jax")
    return {
        "configuration": sum_of_json(content),
        "topology": topology,
        "stage": work.stage_number,
        "versions": {name: importlib.metadata.version(name) for name in names},
    }


class SearchFile:
    """A JSON file that holds a search's results: what was compiled as it comes, the whole at the end."""

    def __init__(self, file: Path, key: dict[str, Any]):
        """Reads what an earlier call has left.

        Raises:
          ConfigError: the file holds something else, or another search.
        """
        data = read_document(file, "results of --search", "search", START_OVER)
        if data:
            check_content(file, "results of --search", data["search"], key)
        self.file, self.key, self.records = file, key, data.get("tried", [])

    @property
    def tried(self) -> list[Tried]:
        return [_from_record(record) for record in self.records]

    def add(self, tried: Tried) -> None:
        self.records.append(_record(tried))
        self.finish({})

    def finish(self, rest: dict[str, Any]) -> None:
        write_json(self.file, {"search": self.key, **rest, "tried": self.records})


def to_json(found: Found, config: TrainConfig, stage: int) -> dict[str, Any]:
    """All but what was tried."""
    return {
        "best": None if found.best is None else found.best.settings.overrides(config, stage),
        "as_it_stands": found.refused,
        "counts": found.counts,
        "not_tried": [_record(one) for one in found.not_tried],
    }


def _record(tried: Tried) -> dict[str, Any]:
    return {
        "settings": tried.settings._asdict(),
        "estimate": tried.estimate._asdict(),
        "report": tried.report,
        "why_not": tried.why_not,
    }


def _from_record(record: dict[str, Any]) -> Tried:
    fields = record["settings"]
    options = tuple((name, value) for name, value in fields["xla_options"])
    settings = RunChanges(**fields | {"xla_options": options})
    return Tried(settings, StepEstimate(**record["estimate"]), record["report"], record["why_not"])
