"""Compiled programs are kept between commands, so that the second start of one compiles nothing."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

from swa_jax.base.errors import ConfigError
from swa_jax.base.files import cache_folder, sum_of

MOST_BYTES = 4 << 30  # of programs that are kept; those that lay unused for longest go first
_SETTINGS = {
    "JAX_COMPILATION_CACHE_DIR": "",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}


def keep_programs() -> None:
    """Have JAX keep what it compiles in the user's cache folder, in this process and in those that it starts.

    A user who has named a folder in JAX_COMPILATION_CACHE_DIR keeps that one.
    """
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    try:
        folder = cache_folder(f"programs/{_processor()}")
        _make_room(folder)
    except (ConfigError, OSError):  # a home that cannot be written costs time, and nothing else
        return
    for name, value in _SETTINGS.items():
        os.environ[name] = value or str(folder)
        if "jax" in sys.modules:
            kind = {"0": float, "-1": int}.get(value, str)
            sys.modules["jax"].config.update(name.lower(), kind(os.environ[name]))


def _processor() -> str:
    """What a program for the CPU depends on beside JAX: machines with one home may have different processors."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return sum_of(next(line for line in lines if line.startswith(("flags", "Features"))))[:12]
    except (OSError, StopIteration):
        return sum_of(platform.machine() + platform.processor())[:12]


def _make_room(folder: Path) -> None:
    """Remove what lay unused for longest, where more than `MOST_BYTES` are kept, until half of that is left."""
    kept = [(entry.stat(), entry.path) for entry in os.scandir(folder)]
    size = sum(found.st_size for found, _ in kept)
    if size <= MOST_BYTES:
        return
    for found, path in sorted(kept, key=lambda one: one[0].st_atime):
        Path(path).unlink(missing_ok=True)
        size -= found.st_size
        if size <= MOST_BYTES // 2:
            return
