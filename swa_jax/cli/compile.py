"""The verb `compile`: plans a run without its machines, or searches the settings to run it with."""

from __future__ import annotations

import dataclasses
import functools
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Argument

from swa_jax.base.errors import ConfigError
from swa_jax.base.settings import load_config
from swa_jax.cli.groups import Options
from swa_jax.cli.options import Json, check_output, in_output, panel, print_report, write_report

if TYPE_CHECKING:
    from swa_jax.plan.cost import Workload
    from swa_jax.train.config import TrainConfig

in_step, in_search = panel("What to plan"), panel("Search")


@dataclasses.dataclass
class SearchOptions(Options):
    """Whether to search, and how much of it."""

    search: Annotated[
        bool,
        in_search(
            "--search", help="Try meshes, remat modes, pieces of a batch and XLA options; print the best as overrides."
        ),
    ] = False
    tries: Annotated[int | None, in_search(help="Settings to compile, minutes each. Default: 6.", min=1)] = None
    options: Annotated[
        int | None, in_search(help="Sets of XLA options to try with the best settings. Default: all 5.", min=0)
    ] = None

    def check(self, step: str) -> None:
        """Raises `ConfigError` for what has no meaning without a search, or a search without."""
        for name, given in (("--tries", self.tries), ("--options", self.options)):
            if given is not None and not self.search:
                raise ConfigError(f"{name} counts what --search compiles: give both, or neither")
        if self.search and step != "train":
            raise ConfigError(f"--search is for training steps, and not for --step {step}")


def compile_(
    config: Annotated[Path, Argument(help="A YAML file of a training run; see configs/.")],
    overrides: Annotated[
        list[str] | None, Argument(metavar="[a.b=c]...", help="Settings that replace those of the file.")
    ] = None,
    *,
    topology: Annotated[str, in_step(help="A TPU slice, such as v5e:16x16, v5p:4x4x8 or v6e:16x16.")],
    step: Annotated[
        Literal["train", "prefill", "decode", "generate"],
        in_step(help="The step. prefill, decode and both (generate) are in bf16, on mesh.tensor x mesh.fsdp chips."),
    ] = "train",
    stage: Annotated[int, in_step(help="Which of the run's stages, from 0.", min=0)] = 0,
    batch_size: Annotated[int, in_step(help="Prompts of a prefill or decode step.", min=1)] = 8,
    length: Annotated[
        int | None, in_step(help="Tokens of a prompt. Default: the stage's sequence_length.", min=1)
    ] = None,
    new_tokens: Annotated[int, in_step(help="Tokens of each answer, for --step generate.", min=2)] = 512,
    searching: SearchOptions,
    out: Annotated[
        Path | None,
        in_output(
            help="Also write the plan to this JSON file. A search writes each result as it comes; the same command "
            "goes on after an interruption."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Plan a run without a pod: does it fit a TPU slice, what does it send, how long might a step take?"""
    searching.check(step)
    # libtpu compiles; the host's CPU is the only device that this process needs.
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)  # no program for absent chips can be read
    from swa_jax.plan.choose import fastest, is_open
    from swa_jax.plan.plan import check_stage, plan
    from swa_jax.plan.text import describe
    from swa_jax.train.config import TrainConfig

    check_output("--out", out)
    overrides = overrides or []
    settings = load_config(TrainConfig, config, overrides)
    compile_one = functools.partial(compile_apart, config, overrides, topology, stage)
    if searching.search:
        _search(settings, compile_one, topology, stage, searching, out, as_json)
        return
    check_stage(settings, stage)
    if step != "decode":
        _simulate_missing(settings, topology, stage, "train" if step == "train" else "prefill")
    if step == "generate":
        report, text = _generate(settings, topology, stage, batch_size, length, new_tokens)
    elif step == "train" and is_open(settings, stage):
        work = _work(settings, topology, stage)
        best = fastest(work, lambda one: compile_one(one.overrides(settings, stage)), _say)
        overrides = [*overrides, *best.settings.overrides(settings, stage)]
        report = best.report or {}
        text = describe(report)
    else:
        report = plan(settings, topology, step=step, stage=stage, batch_size=batch_size, length=length)
        text = describe(report)
    report = {"config": str(config), "overrides": overrides} | report
    print_report(report, text, as_json)
    write_report(report, out, as_json)
    if not report["serving" if step == "generate" else "memory"]["fits"]:
        raise typer.Exit(1)


def _generate(
    settings: TrainConfig, topology: str, stage: int, batch_size: int, length: int | None, new_tokens: int
) -> tuple[dict[str, Any], str]:
    """The plans of both steps with what they come to, and all of it as text."""
    from swa_jax.plan.plan import plan
    from swa_jax.plan.serving import describe_serving, serving
    from swa_jax.plan.text import describe

    prompt = length or settings.stages[stage].sequence_length
    sizes: dict[str, int] = {"prefill": prompt, "decode": prompt + new_tokens}
    reports = {}
    for step in ("prefill", "decode"):
        reports[step] = plan(settings, topology, step=step, stage=stage, batch_size=batch_size, length=sizes[step])
    found = serving(reports["prefill"], reports["decode"], new_tokens)
    text = "\n\n".join([*map(describe, reports.values()), describe_serving(found, new_tokens)])
    return {"new_tokens": new_tokens, "serving": found} | reports, text


def _say(line: str) -> None:
    typer.echo(line, err=True)


def _simulate_missing(settings: TrainConfig, topology: str, stage: int, step: str) -> None:
    """Gives the plan the cycles of those attention kernels that the table which is shipped does not have."""
    from swa_jax.bench.simulated_calls import simulated_row
    from swa_jax.plan.kernel_cycles import add_rows
    from swa_jax.plan.kernels import missing_calls
    from swa_jax.plan.step_time import ROUTED_SHARE

    work = _work(settings, topology, stage)
    for call, window in missing_calls(work.chip_name, work.model, work.pattern, ROUTED_SHARE, step):
        heads = {"H": call.group, "K": 1, "D": call.head_dim, "window": window, "num_sink_tokens": call.num_sink_tokens}
        row = simulated_row(call.function, call.chip, heads, _say)
        add_rows([] if row is None else [row])


def _work(settings: TrainConfig, topology: str, stage: int) -> Workload:
    """The step that settings are chosen for, on a topology that is not here."""
    from swa_jax.plan.plan import planned_start, topology_devices
    from swa_jax.plan.search import workload

    return workload(settings, planned_start(settings), topology_devices(topology, settings.mesh.slices), stage)


def _search(
    settings: TrainConfig,
    compile_one: Callable[[list[str]], dict[str, Any]],
    topology: str,
    stage: int,
    searching: SearchOptions,
    out: Path | None,
    as_json: bool,
) -> None:
    """Settings tried one after another, each compiled with its overrides; the table, and the best as overrides."""
    from swa_jax.plan.search import TRIES, XLA_OPTIONS, SearchFile, Tried, key_of, search, to_json
    from swa_jax.plan.search_text import describe_search

    work = _work(settings, topology, stage)
    results = None if out is None else SearchFile(out, key_of(work, topology))

    def keep(tried: Tried) -> None:
        if results is not None:
            results.add(tried)

    try:
        found = search(
            work,
            lambda tried: compile_one(tried.overrides(settings, stage)),
            tries=searching.tries or TRIES,
            options=XLA_OPTIONS[: searching.options],
            known=results.tried if results else (),
            keep=keep,
            say=_say,
        )
    except KeyboardInterrupt:
        where = f"the results so far are in {out}: the same command goes on from them" if out else "nothing is kept"
        raise ConfigError(f"interrupted; {where}") from None
    report = to_json(found, settings, stage)
    print_report(report, describe_search(found, settings, stage, topology), as_json)
    if results is not None:
        results.finish(report)
        typer.echo(f"written to {out}", err=as_json)
    if found.best is None:
        raise typer.Exit(1)


def compile_apart(
    config: Path, overrides: list[str], topology: str, stage: int, more: Sequence[str] = ()
) -> dict[str, Any]:
    """The plan of `swa-jax compile`, in a process of its own, which the compiler may end, or leave full of memory.

    Args:
      more: further overrides.

    Raises:
      ConfigError: no plan can be made; the sentence says what the process said.
    """
    from swa_jax.base.files import read_json

    with tempfile.TemporaryDirectory(prefix="swa_jax_plan_") as folder:
        out = Path(folder) / "plan.json"
        command = [sys.executable, "-m", "swa_jax.cli", "compile", str(config), *overrides, *more]
        command += ["--topology", topology, "--stage", str(stage), "--out", str(out)]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
        if out.exists():
            return read_json(out)
    if done.returncode < 0:
        raise ConfigError(f"the compiler ended the process with signal {-done.returncode}")
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    raise ConfigError(lines[-1][:500] if lines else f"the process ended with status {done.returncode}")
