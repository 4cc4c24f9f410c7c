"""Python in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
EIGHT_DEVICES = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}


def python(*arguments: object, cwd: Path = ROOT, timeout: float | None = None, **variables: str) -> str:
    """What it printed; `variables` are of its environment. A test fails with what it said where its status is not 0."""
    command, environment = [sys.executable, *map(str, arguments)], os.environ | {"PYTHONPATH": str(ROOT)} | variables
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return done.stdout
