"""Which of how many processes this one is: as the arguments say, or as the cluster that it runs in does."""

from __future__ import annotations

import dataclasses
import glob
import os
from typing import Any

from swa_jax.base.errors import ConfigError

_TPUS = ("/dev/accel*", "/dev/vfio/[0-9]*")


@dataclasses.dataclass(frozen=True)
class Member:
    """Which of how many processes this one is, and where process 0 listens."""

    process: int
    processes: int
    coordinator: str  # host:port

    def __post_init__(self) -> None:
        if not 0 <= self.process < self.processes:
            raise ConfigError(
                f"--process-id {self.process} is not one of {self.processes} processes: it must be from 0 to "
                f"{self.processes - 1}"
            )
        host, _, port = self.coordinator.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
            raise ConfigError(f"--coordinator is '{self.coordinator}': it must be HOST:PORT of process 0")

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.coordinator.rpartition(":")
        return host.strip("[]"), int(port)

    def __str__(self) -> str:
        return f"process {self.process} of {self.processes}"


def find_member(
    processes: int | None, process: int | None, coordinator: str | None, *, detect: bool, timeout: int
) -> Member | None:
    """Which process this one is, as the arguments say or as the cluster does; None if it trains alone.

    With `detect`, JAX's detection (TPU pods on Compute Engine and GKE, Slurm, Open MPI) fills in what is not given.
    Without it and without arguments, only a TPU VM is asked, and only about the workers of its own slices: they cannot
    use their chips one by one, so there is no question of what is wanted.

    Raises `ConfigError` where some arguments are given and others lack, or where nothing is detected.
    """
    given = {"--processes": processes, "--process-id": process, "--coordinator": coordinator}
    missing = [name for name, value in given.items() if value is None]
    found: tuple[Any, Any, Any] | None = processes, process, coordinator
    if missing and detect:
        found = _detect(processes, process, coordinator, timeout)
    elif len(missing) == len(given):
        found = _tpu_pod(timeout)
    elif missing:
        raise ConfigError(
            f"{', '.join(name for name in given if name not in missing)} without {' and '.join(missing)}: give all "
            "three, or --distributed to have them detected"
        )
    if found is None:
        return None
    count, number, address = found
    member = Member(number, count, address)
    return None if count == 1 else member


def _detect(processes: int | None, process: int | None, coordinator: str | None, timeout: int) -> tuple[int, int, str]:
    from jax._src.clusters import ClusterEnv

    try:
        coordinator, processes, process, devices = ClusterEnv.auto_detect_unset_distributed_params(
            coordinator, processes, process, None, None, timeout
        )
    except (OSError, RuntimeError) as error:  # a metadata server or a name that does not answer
        raise ConfigError(f"--distributed: the cluster could not be read: {error}") from None
    if coordinator is None or processes is None or process is None:
        raise ConfigError(
            "--distributed found no cluster (a TPU pod, GKE, Slurm, Open MPI): give --coordinator HOST:PORT, "
            "--processes and --process-id"
        )
    if devices is not None:  # Slurm gives each task of a machine its own GPU
        os.environ.setdefault("JAX_LOCAL_DEVICE_IDS", ",".join(map(str, devices)))
    return processes, process, coordinator


def _tpu_pod(timeout: int) -> tuple[int, int, str] | None:
    """(processes, number of this one, coordinator) on a TPU VM that is one of several workers; None elsewhere.

    Raises `ConfigError` where there are others, but the machine of the first is not known by its name in time.
    """
    platforms = os.environ.get("JAX_PLATFORMS", "tpu")
    if "tpu" not in platforms or not any(map(glob.glob, _TPUS)):
        return None
    from jax._src.clusters.cloud_tpu_cluster import GceTpuCluster, GkeTpuCluster

    try:
        kind = next(kind for kind in (GkeTpuCluster, GceTpuCluster) if kind.is_env_present())
        count, number = kind.get_process_count(), kind.get_process_id()
    except (OSError, RuntimeError, ValueError, StopIteration):  # TPUs, but not a pod of Google Cloud
        return None
    if count == 1:
        return None
    try:
        return count, number, kind.get_coordinator_address(timeout, None)
    except (OSError, RuntimeError) as error:
        raise ConfigError(
            f"this is process {number} of {count} of a TPU pod, but process 0 was not found within {timeout} s "
            f"({error}): start all of them, or give them a longer --timeout"
        ) from None
