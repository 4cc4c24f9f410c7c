"""What a run says while it trains: a line of JSON a step, TensorBoard, Weights & Biases, profiler traces.

Metrics stay on the device until the next step has been started, so that logging does not hold the devices up.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import secrets
import signal
import threading
import time
from pathlib import Path
from typing import Any

import jax

from swa_jax.base.errors import CheckpointError, import_optional, not_installed
from swa_jax.base.files import write_bytes
from swa_jax.train.config import LogConfig
from swa_jax.train.worker import check_lease

logger = logging.getLogger(__name__)


class RunLog:
    """A context manager; `write` returns the lines that are now known. Process 0 writes files, all know the lines."""

    def __init__(self, run: Path, config: LogConfig, *, resume_at: int, peak_flops: float | None, settings: dict):
        self.run, self.config, self.peak_flops = run, config, peak_flops
        self.file = self.tensorboard = self.wandb = None
        self.pending: tuple[int, dict[str, jax.Array], int, float] | None = None
        self.clock = time.perf_counter()
        self.trace_until: int | None = None
        self.trace_asked = False
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGUSR1, self._ask_for_trace)
        if jax.process_index() != 0:
            return
        kept = resume_at or -1  # a run that begins anew also validates anew before its first step
        if config.tensorboard:
            self.tensorboard = _package("tensorboard").SummaryWriter(str(run / "tensorboard"), purge_step=kept + 1)
        if config.wandb_project is not None:
            self.wandb = _package("wandb_project").init(
                project=config.wandb_project,
                dir=str(run),
                name=run.name,
                id=_wandb_id(run / "wandb.id"),
                resume="allow",
                config=settings,
            )
        keep_lines(run / "metrics.jsonl", kept)
        self.file = open(run / "metrics.jsonl", "ab", buffering=0)  # noqa: SIM115

    def write(self, step: int, metrics: dict[str, jax.Array], tokens: int, flops: float) -> list[dict[str, Any]]:
        """Hand over the metrics of a step that has been started; `tokens` and `flops` are the whole step's."""
        lines = self.flush()
        self.pending = (step, metrics, tokens, flops)
        return lines

    def flush(self) -> list[dict[str, Any]]:
        """Wait for the step that is pending, if any."""
        if self.pending is None:
            return []
        (step, metrics, tokens, flops), self.pending = self.pending, None
        line = {"step": step} | {name: _plain(value) for name, value in metrics.items()}
        now = time.perf_counter()
        seconds, self.clock = now - self.clock, now
        line["tokens_per_second"] = round(tokens / seconds, 1)
        if self.peak_flops is not None:
            line["mfu"] = round(flops / seconds / self.peak_flops, 4)
        self._store(line)
        return [line]

    def add(self, step: int, values: dict[str, float]) -> None:
        """A line beside those of the steps, such as a validation's."""
        self._store({"step": step} | values)
        self.clock = time.perf_counter()

    def sync(self) -> None:
        """Make what was written survive a crash of the machine."""
        if self.file is not None:
            os.fsync(self.file.fileno())

    def _store(self, line: dict[str, Any]) -> None:
        if self.file is None:
            return
        step = line["step"]
        if step % self.config.every == 0 or "loss" not in line:
            self._append((json.dumps(line) + "\n").encode())
            if self.tensorboard is not None:
                for name, value in _scalars(line).items():
                    self.tensorboard.add_scalar(name, value, step)
            if self.wandb is not None:
                self.wandb.log(_scalars(line), step=step)

    def _append(self, text: bytes) -> None:
        assert self.file is not None
        check_lease()
        try:
            written = self.file.write(text)
            if written != len(text):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise CheckpointError(
                f"{self.run / 'metrics.jsonl'} could not be written: {error.strerror}; the last checkpoint is "
                "untouched: make room and start the same command again"
            ) from error

    # ---- profiler ----

    def trace(self, step: int) -> None:
        """Start or stop a trace before `step`, as the configuration asks of process 0, or SIGUSR1 of any."""
        if self.trace_until is not None and step >= self.trace_until:
            jax.profiler.stop_trace()
            self.trace_until = None
        due = jax.process_index() == 0 and step == self.config.profile_from
        if self.trace_until is None and (self.trace_asked or due):
            self.trace_asked = False
            jax.profiler.start_trace(str(self.run / "profile"))
            self.trace_until = step + self.config.profile_steps

    def _ask_for_trace(self, *_: Any) -> None:
        self.trace_asked = True

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if self.trace_until is not None:
            jax.profiler.stop_trace()
        for sink in (self.file, self.tensorboard):
            if sink is not None:
                sink.close()
        if self.wandb is not None:
            self.wandb.finish(exit_code=0 if kind is None else 1)


_PACKAGES = {"tensorboard": "tensorboardX", "wandb_project": "wandb"}  # by the key that needs it


def _package(key: str) -> Any:
    need = not_installed(f"'log.{key}' needs the package {_PACKAGES[key]}", extra="logging")
    return import_optional(_PACKAGES[key], need)


def _wandb_id(file: Path) -> str:
    """The run's name there, which no run in another folder has; kept, so that a run that goes on is the same one."""
    if not file.exists():
        write_bytes(file, secrets.token_hex(8).encode())
    return file.read_text()


def check_packages(config: LogConfig) -> None:
    """Raise `ConfigError` where a package is not installed that this process logs with."""
    for key in _PACKAGES:
        if getattr(config, key) and jax.process_index() == 0:
            _package(key)


def draw_losses(run: Path) -> None:
    """Draw `loss.png` in a run's folder, from its `metrics.jsonl`."""
    from swa_jax.report.line_charts import loss_curve

    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_bytes().splitlines()]
    if any("loss" in line for line in lines):
        loss_curve(lines, run / "loss.png")


def keep_lines(file: Path, steps: int) -> None:
    """Drop the lines of steps after `steps`, which are about to be run again, and a last line that was cut short.

    A damaged line is dropped too, with a warning that says which one; the good lines after it stay.
    """
    if not file.exists():
        return
    good = []
    *lines, _ = file.read_bytes().split(b"\n")
    for number, text in enumerate(lines, 1):
        step = _step_of(text)
        if step is None:
            logger.warning("%s, line %d is damaged: it is not a line of metrics and is left out", file, number)
        elif step <= steps:
            good.append(text + b"\n")
    write_bytes(file, b"".join(good))


def _step_of(line: bytes) -> int | None:
    """The step that a line of `metrics.jsonl` is of; None for a line that is damaged."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, TypeError, KeyError):
        return None
    return step if isinstance(step, int) else None


def _scalars(line: dict[str, Any]) -> dict[str, float]:
    """The numbers of a line; a list by layer becomes one number a layer."""
    flat: dict[str, float] = {}
    for name, value in line.items():
        if isinstance(value, list):
            flat |= {f"{name}/{i}": item for i, item in enumerate(value)}
        elif name != "step":
            flat[name] = value
    return flat


def _plain(value: jax.Array) -> float | list[float]:
    return value.item() if value.ndim == 0 else value.tolist()
