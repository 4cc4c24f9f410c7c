"""The memory of the device at hand, and what cannot fit into it."""

from __future__ import annotations

from pathlib import Path

import jax

from swa_jax.base.errors import ConfigError

FEW = 2**28  # bytes


def free_memory() -> float:
    """Bytes that are free on the first local device, or in this machine where the device says nothing of it."""
    if (stats := jax.local_devices()[0].memory_stats()) and "bytes_limit" in stats:
        return float(stats["bytes_limit"] - stats.get("bytes_in_use", 0))
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(float(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return float("inf")


def has_room(size: float) -> bool:
    """Whether `size` bytes are free; of few it is taken for granted."""
    return size <= FEW or size <= free_memory()


def check_fits(size: float, what: str, remedy: str) -> None:
    """Raises `ConfigError` where `size` bytes for `what` (a plural) are more than are free."""
    if not has_room(size):
        free = free_memory() / 2**30
        raise ConfigError(f"{what} take {size / 2**30:,.1f} GiB, and {free:.1f} GiB are free: {remedy}")
