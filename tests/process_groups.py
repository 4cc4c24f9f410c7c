"""What tests of several processes share: free ports, how they end, whether one runs."""

import contextlib
import socket
import time
from pathlib import Path


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def ends(processes, seconds=60):
    """[(status, last line of stderr, or "" for a process that succeeded: it said how far it was)]"""
    deadline = time.monotonic() + seconds
    results = []
    for process in processes:
        _, error = process.communicate(timeout=max(1, deadline - time.monotonic()))
        assert "StreamReaderProtocol" not in error, error  # a traceback of a guard
        lines = [line for line in error.strip().splitlines() if not line.startswith("step ")]
        lines = lines if process.returncode else []
        results.append((process.returncode, (lines or [""])[-1]))
    return results


def running(pid):
    """Whether a process exists and is not a zombie."""
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False
