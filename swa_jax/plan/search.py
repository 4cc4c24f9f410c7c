"""Searches settings for a run on given chips: estimates all by formula, compiles the best one after another.

The next to be compiled is the one with the least estimated time of those whose estimated memory fits. Estimates are
corrected on the way: by the ratio of compiled to estimated of the settings most alike. Then XLA's own options are added
to the best, one at a time. What helps stays.
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
from swa_jax.plan.cost import StepEstimate, Workload, estimate, least_bytes
from swa_jax.plan.plan import check_stage
from swa_jax.train.compiler import check_options
from swa_jax.train.config import TrainConfig
from swa_jax.train.patterns import Start, stage_patterns, teacher_pattern

MARGIN = 1.1  # of a chip's memory: an estimate above it is not compiled, as long as nothing has corrected it
TRIES = 6
NEXT_BEST = 20  # of those that were not compiled, that a report has

# What libtpu's compiler can do otherwise, and may do better for some programs. One that it refuses costs seconds.
XLA_OPTIONS: tuple[tuple[XlaOption, ...], ...] = (
    (("xla_tpu_scoped_vmem_limit_kib", 114688),),  # VMEM for one operation
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
Say = Callable[[str], None]


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
    def fits(self) -> bool:
        return self.report is not None and self.report["memory"]["fits"]

    @property
    def seconds(self) -> float | None:
        """Of a step as it is scheduled; None where it does not fit or, above the chips' peak, is not counted whole."""
        if self.report is None or not self.fits or self.report["time"]["mfu_scheduled"] > 1:
            return None
        return self.report["time"]["seconds"]

    @property
    def bytes(self) -> float | None:
        """Of a chip, also where it does not fit."""
        return None if self.report is None else self.report["memory"]["total"]


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


def workload(config: TrainConfig, start: Start, devices: Sequence[Any], stage: int) -> Workload:
    """What the search is for: a stage of a run, which begins with `start`, on all of `devices`.

    Raises:
      ConfigError: as `plan`.
    """
    check_stage(config, stage)
    check_options(config.xla_options, devices[0])
    pattern = stage_patterns(config, start, config.stages[stage])[0]
    teacher = teacher_pattern(config, start) if config.teaches else None
    chip = chip_name(devices[0].device_kind) or ""
    return Workload(config, stage, start.config, pattern, chip, len(devices), teacher)


def search(
    work: Workload,
    compile_one: Compile,
    *,
    tries: int = TRIES,
    options: Sequence[tuple[XlaOption, ...]] = XLA_OPTIONS,
    pinned: bool = False,
    known: Sequence[Tried] = (),
    keep: Callable[[Tried], None] = lambda tried: None,
    say: Say = lambda line: None,
) -> Found:
    """Compile the configuration as it stands, then what looks best, then the best with options.

    Args:
      compile_one: the plan of settings; `ConfigError` where they cannot be had.
      tries: settings that are compiled, the configuration's own included; options come after them.
      pinned: try only what agrees with the configuration, "auto" standing for anything, and no longer than something
        is expected to be faster than the best.
      known: what an earlier call has compiled, which is not compiled again.
      keep: is given each `Tried` as soon as it is known.
      say: is given a line before and one after each compilation.

    Raises:
      ConfigError: no settings suit the run and the chips.
    """
    stage, tried = work.stage_number, list[Tried]()
    by_settings = {one.settings: one for one in known}
    settings_of_all = candidates(work.config, work.model, stage, work.devices, pinned=pinned)
    guesses = {one: estimate(work, one) for one in settings_of_all}
    own, refused = _as_it_stands(work)
    if not guesses:
        none = f"no mesh of {work.devices} devices suits the run: its heads, batch and lengths cannot be split so often"
        raise ConfigError(refused if pinned and refused else none)

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

    if own is not None and not pinned:
        run(own, guesses[own])
    if pinned and not _in_order(guesses, tried, work):  # what takes least says by how much nothing fits
        run(least := min(guesses, key=lambda one: guesses[one].bytes), guesses[least])
    while len(tried) < tries and (order := _in_order(guesses, tried, work)):
        best = _best(tried)
        if pinned and best is not None and (best.seconds or 0) <= _corrected(order[0], guesses[order[0]], tried)[0]:
            break
        run(order[0], guesses[order[0]])
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
    # Of one that the compiler could not make to fit, it has said how far it comes.
    known = any(one.settings.computed_again and one.report and not one.fits for one in tried)
    fitting = [one for one, (_, size) in corrected.items() if (size if known else least_bytes(one, size)) <= most]
    # Estimates do not know what the way to the host's memory takes.
    return sorted(fitting, key=lambda one: (one.remat == "offload", corrected[one]))


def _corrected(settings: RunChanges, guess: StepEstimate, tried: Sequence[Tried]) -> tuple[float, float]:
    """Estimated seconds and bytes times the mean ratio of what was compiled to its estimate, of what is most alike.

    For seconds that is what keeps as much and is compiled alike, on the same mesh. The ratio of what shares one of the
    two counts by its root, and of what shares neither by the root of that: a mesh that sends more slowly than estimated
    says less of others.
    """
    shared = [
        ((t.settings.kind == settings.kind) + (t.settings.sizes == settings.sizes), t.seconds / t.estimate.seconds)
        for t in tried
        if t.seconds is not None
    ]
    nearest = max((both for both, _ in shared), default=0)
    slower = _mean([ratio for both, ratio in shared if both == nearest]) ** 2.0 ** (nearest - 2)
    # What the compiler has made to fit says nothing of others.
    telling = [t for t in tried if not (t.settings.computed_again and t.fits)]
    sizes = [(_likeness(settings, t.settings), t.bytes / t.estimate.bytes) for t in telling if t.bytes is not None]
    most = max((likeness for likeness, _ in sizes), default=0)
    return guess.seconds * slower, guess.bytes * _mean([ratio for likeness, ratio in sizes if likeness == most])


def _mean(ratios: Sequence[float]) -> float:
    """The geometric mean; 1 of none."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else 1.0


def _likeness(one: RunChanges, other: RunChanges) -> int:
    """What two settings share of that by which their memory differs most."""
    same_axes = sum((getattr(one, axis) > 1) == (getattr(other, axis) > 1) for axis in ("expert", "context", "tensor"))
    return same_axes + 2 * (one.remat == other.remat) + 3 * (one.computed_again == other.computed_again)


def outcome(tried: Tried) -> str:
    """What came of a compilation, in a line."""
    if tried.report is None:
        return f"cannot be had: {tried.why_not}"
    gib = f"{(tried.bytes or 0) / GIB:.2f} GiB of a chip"
    if not tried.fits:
        return f"does not fit: {gib}"
    time = tried.report["time"]
    if tried.seconds is None:
        return f"{gib}, but its time is not known: MFU {time['mfu_scheduled']:.0%}"
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
