"""Several training processes on this machine, with its devices or with CPUs that stand for more.

    python -m launch.local CONFIG [a.b=c ...] --processes 2 [--cpu-devices 4 | --gpus 1] [--dry-run]

Each line of their logs begins with the process's number. SIGTERM, Ctrl-C and a terminal that goes away have the run
save and end (status 143); a second one kills it. When one process fails, the others are ended. When they have saved and
ended although nobody told this launcher so, as by a preemption notice, they are started again.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Annotated

import typer
from typer import Argument, Option

from launch.settings import SAVED, DryRun, Overrides, Runner, as_help, run_app
from swa_jax.base.errors import ConfigError
from swa_jax.base.settings import load_config

HOLD = 10.0  # seconds that processes have to end by themselves when one has failed: they know why
GRACE = 20.0  # seconds between SIGTERM and SIGKILL


def commands(
    arguments: Sequence[str], processes: int, cpu_devices: int | None, gpus: int | None, port: int
) -> list[tuple[dict[str, str], list[str]]]:
    """Environment to add and command line, for each process."""
    started = []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = visible.split(",") if visible else [str(i) for i in range(processes * (gpus or 0))]
    if gpus is not None and len(devices) < processes * gpus:
        raise ConfigError(f"CUDA_VISIBLE_DEVICES names {len(devices)} GPUs, {processes} processes take {gpus} each")
    for process in range(processes):
        command = [sys.executable, "-m", "swa_jax.cli", "train", *arguments]
        command += [f"--coordinator=127.0.0.1:{port}", f"--processes={processes}", f"--process-id={process}"]
        added = {}
        if cpu_devices is not None:
            count = f"--xla_force_host_platform_device_count={cpu_devices}"
            added = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {count}".strip()}
        if gpus is not None:
            added = {"CUDA_VISIBLE_DEVICES": ",".join(devices[process * gpus : (process + 1) * gpus])}
        started.append((added, command))
    return started


class ProcessGroup:
    """Processes that end together."""

    def __init__(self) -> None:
        self.signals = 0  # signals that this launcher was sent
        self.processes: list[subprocess.Popen[str]] = []
        self.readers: list[threading.Thread] = []

    def start(self, started: Sequence[tuple[dict[str, str], list[str]]]) -> None:
        for number, (added, command) in enumerate(started):
            process = subprocess.Popen(
                command,
                env=os.environ | {"PYTHONUNBUFFERED": "1"} | added,
                text=True,
                errors="replace",
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C comes through this launcher, once
            )
            self.processes.append(process)
            self.readers.append(threading.Thread(target=_copy, args=(number, process), daemon=True))
            self.readers[-1].start()

    def send(self, number: int) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(number)

    def on_signal(self, *_: object) -> None:
        self.signals += 1
        self.send(signal.SIGTERM if self.signals == 1 else signal.SIGKILL)

    def wait(self) -> int:
        """The status of the first process that failed; else `SAVED` if one has that; else 0."""
        failed: int | None = None
        deadlines: list[tuple[float, int]] = []
        while None in (statuses := [process.poll() for process in self.processes]):
            bad = next((status for status in statuses if status not in (None, 0, SAVED)), None)
            if failed is None and bad is not None:
                failed, now = bad, time.monotonic()
                deadlines = [(now + HOLD, signal.SIGTERM), (now + HOLD + GRACE, signal.SIGKILL)]
            if deadlines and time.monotonic() > deadlines[0][0]:
                self.send(deadlines.pop(0)[1])
            time.sleep(0.05)
        for reader in self.readers:
            reader.join(timeout=5)
        if failed is None:
            failed = next((status for status in statuses if status not in (0, SAVED)), None)
        if failed is None:
            return SAVED if SAVED in statuses else 0
        return failed if failed >= 0 else 128 - failed


def _copy(number: int, process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        sys.stdout.write(f"[{number}] {line.rstrip()}\n")  # in one piece: several threads write
        sys.stdout.flush()


app = typer.Typer(add_completion=False)


@app.command(help=as_help(__doc__))
def run(
    config: Annotated[str, Argument(help="A YAML file of a training run; see configs/.")],
    processes: Annotated[int, Option(help="How many processes train together.", min=1)],
    overrides: Overrides = None,
    cpu_devices: Annotated[int | None, Option(help="CPU devices that each process pretends to have.", min=1)] = None,
    gpus: Annotated[
        int | None, Option(help="GPUs of each process, counted through those that are visible.", min=1)
    ] = None,
    port: Annotated[int | None, Option(help="Where process 0 listens. Default: a free one.")] = None,
    dry_run: DryRun = False,
) -> None:
    if cpu_devices is not None and gpus is not None:
        raise ConfigError("--cpu-devices and --gpus are both given: processes have one or the other")
    arguments = [config, *(overrides or [])]
    runner = Runner(dry_run)
    while True:
        started = commands(arguments, processes, cpu_devices, gpus, port or _free_port())
        if dry_run:
            from swa_jax.train.config import TrainConfig  # JAX, which each process loads by itself

            load_config(TrainConfig, config, overrides or [])
            for added, command in started:
                print(shlex.join(["env", *(f"{key}={value}" for key, value in added.items()), *command]))
            return
        group = ProcessGroup()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
                signal.signal(number, group.on_signal)
        group.start(started)
        status = group.wait()
        if status != SAVED or group.signals:
            raise typer.Exit(status)
        runner.note("the run was told to stop and has saved: it is started again")


def main(arguments: Sequence[str] | None = None) -> int:
    return run_app(app, arguments)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


if __name__ == "__main__":
    sys.exit(main())
