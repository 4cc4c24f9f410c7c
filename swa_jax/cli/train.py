"""The verb `train`: a run alone or as one of several processes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from swa_jax.errors import ConfigError
from swa_jax.settings import load_config, to_yaml

TOGETHER, LOOK = "Several processes", "Before the first step"


def train(
    config: Annotated[Path, Argument(help="A YAML file; see configs/.")],
    overrides: Annotated[
        list[str] | None, Argument(metavar="[a.b=c]...", help="Settings that replace those of the file.")
    ] = None,
    processes: Annotated[
        int | None,
        Option(help="How many processes train together.", min=1, envvar="JAX_NUM_PROCESSES", rich_help_panel=TOGETHER),
    ] = None,
    process_id: Annotated[
        int | None,
        Option(help="Which of them this is, from 0.", min=0, envvar="JAX_PROCESS_ID", rich_help_panel=TOGETHER),
    ] = None,
    coordinator: Annotated[
        str | None,
        Option(help="HOST:PORT where process 0 listens.", envvar="JAX_COORDINATOR_ADDRESS", rich_help_panel=TOGETHER),
    ] = None,
    distributed: Annotated[
        bool,
        Option(
            "--distributed",
            help="Have the cluster say those three: TPU pod, GKE, Slurm, Open MPI.",
            rich_help_panel=TOGETHER,
        ),
    ] = False,
    timeout: Annotated[
        int,
        Option(
            help="Seconds for all processes to come, and without a sign of life after which one is lost.",
            min=10,
            rich_help_panel=TOGETHER,
        ),
    ] = 45,
    print_config: Annotated[
        bool,
        Option(
            "--print-config", help="Print the configuration with every key, as YAML, and stop.", rich_help_panel=LOOK
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        Option(
            "--dry-run",
            help="Look at configuration, files, tokenizer, pattern and mesh, say what would run, and stop.",
            rich_help_panel=LOOK,
        ),
    ] = False,
    devices: Annotated[
        int | None,
        Option(
            help="With --dry-run: how many devices the run will have. Default: as the mesh says, or those here.",
            min=1,
            show_default=False,
            rich_help_panel=LOOK,
        ),
    ] = None,
) -> None:
    """Train from scratch, or go on from a checkpoint; run it again to go on after an interruption.

    On several machines, start the same command on each with --processes, --process-id and --coordinator; the workers
    of a TPU pod find each other without.
    """
    if devices is not None and not dry_run:
        raise ConfigError("--devices is of --dry-run: give both, or neither")
    if print_config or dry_run:
        from swa_jax.train.config import TrainConfig

        settings = load_config(TrainConfig, config, overrides or [])
        if dry_run:
            from swa_jax.train.dry_run import describe_run

            typer.echo(describe_run(settings, devices))
        else:
            typer.echo(to_yaml(settings), nl=False)
        return
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
        from swa_jax.train.config import TrainConfig
        from swa_jax.train.loop import train as run

        typer.echo(run(load_config(TrainConfig, config, overrides or [])))
        return
    with worker(place, timeout) as join:
        from swa_jax.settings import to_dict
        from swa_jax.train.config import TrainConfig
        from swa_jax.train.loop import train as run

        loaded = load_config(TrainConfig, config, overrides or [])
        join(to_dict(loaded))
        model = run(loaded)
        if place.process == 0:
            typer.echo(model)
