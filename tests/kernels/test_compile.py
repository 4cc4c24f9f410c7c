"""The compilers of four generations of TPUs take every kernel. libtpu has them, on any x86-64 Linux host.

Each chip is compiled for in processes of its own (`compile_for.py`, which has the table of calls), since libtpu settles
on one for good.
"""

import importlib.util
import json
import platform
import sys
from pathlib import Path

import pytest
from python_process import python

from .compile_for import CALLS

TOPOLOGIES = ["v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"]
USUAL = "v6e:2x2"
PARTS = 6  # of the table, a process each
SECONDS = 1800  # a part; a small share of it on two free cores
LIBTPU = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",  # there is no metadata server to ask about a TPU
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_LOG_DIR": "disabled",  # its logs can fill a disk
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
}

# Where libtpu cannot be installed these tests skip; where it can, the dev extra has it, and its absence is an error.
pytestmark = [
    pytest.mark.skipif(
        (sys.platform, platform.machine()) != ("linux", "x86_64"),
        reason=f"libtpu exists for Linux on x86-64 only; this is {sys.platform} on {platform.machine()}",
    )
]


def run(script: str, topology: str, *names: str) -> list[dict]:
    """Runs a script for a chip, for all of its calls or those named; returns its reports."""
    assert importlib.util.find_spec("libtpu"), "libtpu is not installed; the dev extra brings it"
    said = python(Path(__file__).with_name(script), topology, *names, timeout=SECONDS, **LIBTPU)
    return [json.loads(line) for line in said.splitlines() if line.startswith("{")]


# A sixth of the calls, one of every kind, for one chip before every change; all of them before a piece of work is done.
@pytest.mark.parametrize(
    ("topology", "part"),
    [
        pytest.param(t, part, marks=pytest.mark.slow if (t, part) == (USUAL, 2) else pytest.mark.long)
        for t in TOPOLOGIES
        for part in range(PARTS)
    ],
)
def test_every_kernel_compiles(topology, part):
    names = list(CALLS)[part::PARTS]
    reports = run("compile_for.py", topology, *names)
    assert {r["name"]: r["kernels"] for r in reports} == {name: CALLS[name].kernels for name in names}
    assert all(r["temporary"] < 0.01 for r in reports if CALLS[r["name"]].in_place)


@pytest.mark.long
def test_backward_needs_little_memory_beside_its_results():
    """Nothing of the size [T, T] or [T, window] is stored, nor a stack of partial gradients."""
    [sizes] = run("memory_for.py", "v6e:2x2")
    assert sizes["kernel"] <= 1.2 * sizes["gradients"]
    assert sizes["attention"] <= 1.2 * sizes["gradients"]
