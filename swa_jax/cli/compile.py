"""The verb `compile`: plans a run without its machines, or searches the settings to run it with."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Argument, Option

from swa_jax.base.errors import ConfigError
from swa_jax.base.settings import load_config
from swa_jax.cli.groups import Options
from swa_jax.cli.options import Json, check_output, in_output, print_json

if TYPE_CHECKING:
    from swa_jax.plan.candidates import RunChanges
    from swa_jax.train.config import TrainConfig

STEP, SEARCH = "What to plan", "Search"


@dataclasses.dataclass
class SearchOptions(Options):
    """Whether to search, and how much of it."""

    search: Annotated[
        bool,
        Option(
            "--search",
            help="Try meshes, remat modes, pieces of a batch and options of XLA; print the best as overrides.",
            rich_help_panel=SEARCH,
        ),
    ] = False
    tries: Annotated[
        int | None, Option(help="Settings to compile, minutes each. Default: 6.", min=1, rich_help_panel=SEARCH)
    ] = None
    options: Annotated[
        int | None,
        Option(
            help="Sets of options of XLA to compile the best settings with. Default: 5, which are all.",
            min=0,
            rich_help_panel=SEARCH,
        ),
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
    topology: Annotated[
        str, Option(help="A TPU slice, such as v5e:16x16, v5p:4x4x8 or v6e:16x16.", rich_help_panel=STEP)
    ] = "",
    step: Annotated[
        Literal["train", "prefill", "decode", "generate"],
        Option(
            help="The step. prefill, decode and both (generate) are in bf16, on mesh.tensor x mesh.fsdp chips.",
            rich_help_panel=STEP,
        ),
    ] = "train",
    stage: Annotated[int, Option(help="Which of the run's stages, from 0.", min=0, rich_help_panel=STEP)] = 0,
    batch_size: Annotated[
        int, Option("--batch-size", help="Prompts of a prefill or decode step.", min=1, rich_help_panel=STEP)
    ] = 8,
    length: Annotated[
        int | None,
        Option(
            "--length", help="Tokens of a prompt. Default: the stage's sequence_length.", min=1, rich_help_panel=STEP
        ),
    ] = None,
    new_tokens: Annotated[
        int, Option(help="Tokens of each answer, for --step generate.", min=2, rich_help_panel=STEP)
    ] = 512,
    *,
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
    if not topology:
        raise ConfigError("give --topology, a TPU slice such as v5p:4x4x8")
    searching.check(step)
    # libtpu compiles; the host's CPU is the only device that this process needs.
    import jax

    jax.config.update("jax_platforms", "cpu")
    from swa_jax.base.files import write_json
    from swa_jax.plan.plan import plan
    from swa_jax.plan.text import describe
    from swa_jax.train.config import TrainConfig

    if searching.search:
        _search(config, overrides or [], topology, stage, searching, out, as_json)
        return
    if out is not None:
        check_output("--out", out)
    settings = load_config(TrainConfig, config, overrides or [])
    if step == "generate":
        report, text = _generate(settings, topology, stage, batch_size, length, new_tokens)
    else:
        report = plan(settings, topology, step=step, stage=stage, batch_size=batch_size, length=length)
        text = describe(report)
    report = {"config": str(config), "overrides": overrides or []} | report
    if as_json:
        print_json(report)
    else:
        typer.echo(text)
    if out is not None:
        write_json(out, report)
        typer.echo(f"written to {out}", err=as_json)
    if not report["serving" if step == "generate" else "memory"]["fits"]:
        raise typer.Exit(1)


def _generate(
    settings: TrainConfig, topology: str, stage: int, batch_size: int, length: int | None, new_tokens: int
) -> tuple[dict[str, Any], str]:
    """The plans of both steps with what they come to, and all of it as text."""
    from swa_jax.plan.plan import check_stage, plan
    from swa_jax.plan.serving import describe_serving, serving
    from swa_jax.plan.text import describe

    check_stage(settings, stage)
    prompt = length or settings.stages[stage].sequence_length
    sizes: dict[str, int] = {"prefill": prompt, "decode": prompt + new_tokens}
    reports = {}
    for step in ("prefill", "decode"):
        reports[step] = plan(settings, topology, step=step, stage=stage, batch_size=batch_size, length=sizes[step])
    found = serving(reports["prefill"], reports["decode"], new_tokens)
    text = "\n\n".join([*map(describe, reports.values()), describe_serving(found, new_tokens)])
    return {"new_tokens": new_tokens, "serving": found} | reports, text


def _search(
    config: Path,
    overrides: list[str],
    topology: str,
    stage: int,
    searching: SearchOptions,
    out: Path | None,
    as_json: bool,
) -> None:
    """Settings tried one after another; the table, and the best as overrides."""
    from swa_jax.plan.search import TRIES, XLA_OPTIONS, SearchFile, Tried, key_of, search, to_json, workload
    from swa_jax.plan.search_text import describe_search
    from swa_jax.train.config import TrainConfig

    settings = load_config(TrainConfig, config, overrides)
    work = workload(settings, topology, stage)
    results = None
    if out is not None:
        check_output("--out", out)
        results = SearchFile(out, key_of(work, topology))

    def compile_one(tried: RunChanges) -> dict[str, Any]:
        return compile_apart(config, [*overrides, *tried.overrides(settings, stage)], topology, stage)

    def keep(tried: Tried) -> None:
        if results is not None:
            results.add(tried)

    def say(line: str) -> None:
        typer.echo(line, err=True)

    try:
        found = search(
            work,
            compile_one,
            tries=searching.tries or TRIES,
            options=XLA_OPTIONS[: searching.options],
            known=results.tried if results else (),
            keep=keep,
            say=say,
        )
    except KeyboardInterrupt:
        where = f"the results so far are in {out}: the same command goes on from them" if out else "nothing is kept"
        raise ConfigError(f"interrupted; {where}") from None
    report = to_json(found, settings, stage)
    if as_json:
        print_json(report)
    else:
        typer.echo(describe_search(found, settings, stage, topology))
    if results is not None:
        results.finish(report)
        typer.echo(f"written to {out}", err=as_json)
    if found.best is None:
        raise typer.Exit(1)


def compile_apart(config: Path, overrides: list[str], topology: str, stage: int) -> dict[str, Any]:
    """The plan of `swa-jax compile` in a process of its own, which the compiler may end, or leave full of memory.

    Raises:
      ConfigError: no plan can be made; the sentence says what the process said.
    """
    from swa_jax.base.files import read_json

    with tempfile.TemporaryDirectory(prefix="swa_jax_plan_") as folder:
        out = Path(folder) / "plan.json"
        command = [sys.executable, "-m", "swa_jax.cli", "compile", str(config), *overrides]
        command += ["--topology", topology, "--stage", str(stage), "--out", str(out)]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
        if out.exists():
            return read_json(out)
    if done.returncode < 0:
        raise ConfigError(f"the compiler ended the process with signal {-done.returncode}")
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    raise ConfigError(lines[-1][:500] if lines else f"the process ended with status {done.returncode}")
