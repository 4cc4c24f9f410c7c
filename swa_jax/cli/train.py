"""The verb `train`: a run alone or as one of several processes."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from swa_jax.base.errors import ConfigError
from swa_jax.base.settings import load_config, to_dict, to_yaml


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
        bool, Option("--distributed", help="Take these three from the cluster: TPU pod, GKE, Slurm or Open MPI.")
    ] = False,
    timeout: Annotated[
        int, Option(help="Seconds until a process that has not started, or gives no sign of life, is lost.", min=10)
    ] = 45,
    print_config: Annotated[
        bool, Option("--print-config", help="Print the configuration with every key, as YAML, and stop.")
    ] = False,
    dry_run: Annotated[
        bool,
        Option("--dry-run", help="Check configuration, files, tokenizer, pattern and mesh, say what would run, stop."),
    ] = False,
    devices: Annotated[
        int | None, Option(help="With --dry-run: devices of the run. Default: as the mesh says, or those here.", min=1)
    ] = None,
) -> None:
    """Train from scratch, or go on from a checkpoint; run it again to go on after an interruption.

    On several machines, start the same command on each with --processes, --process-id and --coordinator; the workers
    of a TPU pod find each other without.
    """
    if devices is not None and not dry_run:
        raise ConfigError("--devices is for --dry-run: give both, or neither")
    if print_config or dry_run:
        typer.echo(_look(config, overrides or [], dry_run, devices))
        return
    from swa_jax.train.cluster import find_member
    from swa_jax.train.processes import Traceback, guard
    from swa_jax.train.worker import is_worker, worker

    place = find_member(processes, process_id, coordinator, detect=distributed, timeout=timeout)
    if place is not None and not is_worker():
        command = [sys.executable, "-m", "swa_jax.cli", "train", str(config), *(overrides or [])]
        command += ["--processes", str(place.processes), "--process-id", str(place.process)]
        command += ["--coordinator", place.coordinator, "--timeout", str(timeout)]
        try:
            raise typer.Exit(guard(place, command, timeout))
        except Traceback as error:
            typer.echo(str(error), err=True)
            raise typer.Exit(1) from None

    with contextlib.nullcontext() if place is None else worker(place, timeout) as join:
        from swa_jax.plan.choose import settled
        from swa_jax.train.config import TrainConfig
        from swa_jax.train.earlier_run import as_begun
        from swa_jax.train.loop import train as run

        settings = load_config(TrainConfig, config, overrides or [])
        if join is not None:
            join(to_dict(settings))
        first = place is None or place.process == 0
        settings = settled(as_begun(settings), lambda line: typer.echo(line, err=True) if first else None)
        model = run(settings)
        if place is None or place.process == 0:
            typer.echo(model)


def _look(config: Path, overrides: list[str], check: bool, devices: int | None) -> str:
    """The run as YAML, or with `check` what it would do; nothing is trained."""
    from swa_jax.train.config import TrainConfig

    settings = load_config(TrainConfig, config, overrides)
    if not check:
        return to_yaml(settings).rstrip()
    from swa_jax.train.dry_run import describe_run

    return describe_run(settings, devices)
