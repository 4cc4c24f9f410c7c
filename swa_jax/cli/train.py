"""The verbs `train`, alone or as one of several processes, and `compile`, which plans a run without its machines."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Argument, Option

from swa_jax.cli.options import check_output
from swa_jax.errors import ConfigError
from swa_jax.settings import load_config

if TYPE_CHECKING:
    from swa_jax.plan.candidates import Settings


def train(
    config: Annotated[Path, Argument(help="A YAML file; see configs/.")],
    overrides: Annotated[
        list[str] | None, Argument(metavar="[a.b=c]...", help="Settings that replace those of the file.")
    ] = None,
    processes: Annotated[
        int | None, Option(help="How many processes train together.", min=1, envvar="JAX_NUM_PROCESSES")
    ] = None,
    process_id: Annotated[
        int | None, Option(help="Which of them this is, from 0.", min=0, envvar="JAX_PROCESS_ID")
    ] = None,
    coordinator: Annotated[
        str | None, Option(help="HOST:PORT where process 0 listens.", envvar="JAX_COORDINATOR_ADDRESS")
    ] = None,
    distributed: Annotated[
        bool,
        Option("--distributed", help="Have the cluster say those three: TPU pod, GKE, Slurm, Open MPI."),
    ] = False,
    timeout: Annotated[
        int,
        Option(
            help="Seconds for all processes to come, and without a sign of life after which one is lost.",
            min=10,
        ),
    ] = 45,
) -> None:
    """Train from scratch, or go on from a checkpoint; run it again to go on after an interruption.

    On several machines, start the same command on each with --processes, --process-id and --coordinator; the workers
    of a TPU pod find each other without.
    """
    from swa_jax.train.cluster import find_place
    from swa_jax.train.processes import Traceback, guard
    from swa_jax.train.worker import is_worker, worker

    place = find_place(processes, process_id, coordinator, detect=distributed, timeout=timeout)
    if place is not None and not is_worker():
        command = [sys.executable, "-m", "swa_jax.cli", "train", str(config), *(overrides or [])]
        command += ["--processes", str(place.processes), "--process-id", str(place.process)]
        command += ["--coordinator", place.coordinator, "--timeout", str(timeout)]
        try:
            raise typer.Exit(guard(place, command, timeout))
        except Traceback as error:
            typer.echo(str(error), err=True)
            raise typer.Exit(1) from None

    if place is None:
        from swa_jax.train.loop import TrainConfig
        from swa_jax.train.loop import train as run

        typer.echo(run(load_config(TrainConfig, config, overrides or [])))
        return
    with worker(place, timeout) as join:
        from swa_jax.settings import to_dict
        from swa_jax.train.loop import TrainConfig
        from swa_jax.train.loop import train as run

        loaded = load_config(TrainConfig, config, overrides or [])
        join(to_dict(loaded))
        model = run(loaded)
        if place.process == 0:
            typer.echo(model)


def compile_(
    config: Annotated[Path, Argument(help="A YAML file of a training run; see configs/.")],
    overrides: Annotated[
        list[str] | None, Argument(metavar="[a.b=c]...", help="Settings that replace those of the file.")
    ] = None,
    topology: Annotated[str, Option(help="A TPU slice, such as v5e:16x16, v5p:4x4x8 or v6e:16x16.")] = "",
    step: Annotated[
        Literal["train", "prefill", "decode"],
        Option(help="What to plan. prefill and decode are of one chip, in bf16."),
    ] = "train",
    stage: Annotated[int, Option(help="Which of the run's stages, from 0.", min=0)] = 0,
    batch_size: Annotated[
        int, Option("--batch-size", help="Prompts of a prefill or decode step.", min=1)
    ] = 8,
    length: Annotated[
        int | None,
        Option(
            "--length",
            help="Tokens of a prompt. Default: the stage's sequence_length.",
            min=1,
            show_default=False,
        ),
    ] = None,
    search: Annotated[
        bool,
        Option(
            "--search",
            help="Try meshes, remat modes, pieces of a batch and options of XLA; the best are printed as overrides.",
        ),
    ] = False,
    tries: Annotated[
        int | None,
        Option(
            help="With --search: settings to compile, which takes minutes each. Default: 6.",
            min=1,
            show_default=False,
        ),
    ] = None,
    options: Annotated[
        int | None,
        Option(
            help="With --search: sets of options of XLA to compile the best settings with. Default: 5, which are all.",
            min=0,
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        Option(
            help="Also write the plan to this JSON file. With --search it gets every result as it comes; the same "
            "command goes on after an interruption."
        ),
    ] = None,
) -> None:
    """Plan a run without a pod: does it fit a TPU slice, what does it send, how long might a step take?"""
    if not topology:
        raise ConfigError("give --topology, a TPU slice such as v5p:4x4x8")
    # libtpu compiles; the host's CPU is the only device that this process needs.
    import jax

    jax.config.update("jax_platforms", "cpu")
    for name, given in (("--tries", tries), ("--options", options)):
        if given is not None and not search:
            raise ConfigError(f"{name} counts what --search compiles: give both, or neither")
    if search:
        if step != "train":
            raise ConfigError(f"--search is for training steps, and not for --step {step}")
        _search(config, overrides or [], topology, stage, tries, options, out)
        return
    from swa_jax.files import write_json
    from swa_jax.plan.plan import plan
    from swa_jax.plan.text import describe
    from swa_jax.train.config import TrainConfig

    if out is not None:
        check_output("--out", out)
    settings = load_config(TrainConfig, config, overrides or [])
    report = plan(settings, topology, step=step, stage=stage, batch_size=batch_size, length=length)
    report = {"config": str(config), "overrides": overrides or []} | report
    typer.echo(describe(report))
    if out is not None:
        write_json(out, report)
        typer.echo(f"written to {out}")
    if not report["memory"]["fits"]:
        raise typer.Exit(1)


def _search(
    config: Path,
    overrides: list[str],
    topology: str,
    stage: int,
    tries: int | None,
    options: int | None,
    out: Path | None,
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

    def compile_one(tried: Settings) -> dict[str, Any]:
        return compile_apart(config, [*overrides, *tried.overrides(settings, stage)], topology, stage)

    def keep(tried: Tried) -> None:
        if results is not None:
            results.add(tried)

    def say(line: str) -> None:
        typer.echo(line, err=True)

    try:
        found = search(
            work, compile_one, tries=tries or TRIES, options=XLA_OPTIONS[:options],
            known=results.tried if results else (), keep=keep, say=say,
        )  # fmt: skip
    except KeyboardInterrupt:
        where = (
            f"the results so far are in {out}: the same command goes on from them"
            if out
            else "nothing is kept"
        )
        raise ConfigError(f"interrupted; {where}") from None
    typer.echo(describe_search(found, settings, stage, topology))
    if results is not None:
        results.finish(to_json(found, settings, stage))
        typer.echo(f"written to {out}")
    if found.best is None:
        raise typer.Exit(1)


def compile_apart(config: Path, overrides: list[str], topology: str, stage: int) -> dict[str, Any]:
    """The plan of `swa-jax compile` in a process of its own, which the compiler may end, or leave full of memory.

    Raises:
      ConfigError: no plan can be made; the sentence says what the process said.
    """
    from swa_jax.files import read_json

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
