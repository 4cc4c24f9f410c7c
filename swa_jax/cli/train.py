"""The verbs `train`, alone or as one of several processes, and `compile`, which plans a run without its machines."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer
from typer import Argument, Option

from swa_jax.cli.options import check_output
from swa_jax.errors import ConfigError
from swa_jax.settings import load_config


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
    out: Annotated[Path | None, Option(help="Also write the plan to this JSON file.")] = None,
) -> None:
    """Plan a run without a pod: does it fit a TPU slice, what does it send, how long might a step take?"""
    if not topology:
        raise ConfigError("give --topology, a TPU slice such as v5p:4x4x8")
    # libtpu compiles; the host's CPU is the only device that this process needs.
    import jax

    jax.config.update("jax_platforms", "cpu")
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
