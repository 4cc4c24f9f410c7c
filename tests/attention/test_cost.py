"""What a windowed call costs: time and temporary memory grow with the length, not its square.

Each measurement is a fresh process (`measure.py`), since memory and thread pools remember what ran before.
"""

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


def measure(**options):
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, pathlib.Path(__file__).with_name("measure.py"), json.dumps(options)]
    return json.loads(
        subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    )


@pytest.mark.slow
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_windowed_cost_is_linear_in_the_length(backward):
    short, long = (
        measure(implementation="xla", length=length, window=512, backward=backward)
        for length in (8192, 16384)
    )
    assert long["temp_bytes"] <= 2.3 * short["temp_bytes"]
    assert long["seconds"] <= 2.3 * short["seconds"]


@pytest.mark.slow
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_windowed_is_five_times_faster_than_dense(backward):
    """Dense is the same blockwise code without a window: the plain [T, S] form needs gigabytes and is slower still."""
    dense, windowed = (
        measure(implementation="xla", length=16384, window=window, backward=backward)
        for window in (None, 512)
    )
    assert dense["seconds"] >= 5 * windowed["seconds"]


@pytest.mark.slow
def test_windowed_heads_do_not_pay_for_full_ones():
    """One full KV head of four must cost far less than four."""
    none, one, four = (
        measure(implementation="xla", length=8192, window=256, backward=True, kv_heads=4, full_heads=count)
        for count in (0, 1, 4)
    )
    assert one["seconds"] - none["seconds"] <= 0.4 * (four["seconds"] - none["seconds"])
