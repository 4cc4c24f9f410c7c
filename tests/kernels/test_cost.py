"""What a windowed call costs: time and temporary memory grow with the length, not its square.

Each measurement is a fresh process (`measure.py`), since memory and thread pools remember what ran before.
"""

import json
from pathlib import Path

import pytest
from python_process import python
from timing import least_seconds


def measure(**options):
    return json.loads(python(Path(__file__).with_name("measure.py"), json.dumps(options), JAX_PLATFORMS="cpu"))


@pytest.mark.long
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_windowed_cost_is_linear_in_the_length(backward):
    temp_bytes = {}

    def seconds(length):
        report = measure(implementation="xla", length=length, window=512, backward=backward)
        temp_bytes[length] = report["temp_bytes"]
        return report["seconds"]

    def linear(cost):
        return cost[16384] <= 2.3 * cost[8192]

    least = least_seconds(seconds, (8192, 16384), linear)
    assert linear(temp_bytes), temp_bytes
    assert linear(least), least


@pytest.mark.slow
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_windowed_is_five_times_faster_than_dense(backward):
    """Dense is the same blockwise code without a window: the plain [T, S] form needs gigabytes and is slower still."""

    def seconds(window):
        return measure(implementation="xla", length=16384, window=window, backward=backward)["seconds"]

    def faster(least):
        return least[None] >= 5 * least[512]

    least = least_seconds(seconds, (None, 512), faster)
    assert faster(least), least


@pytest.mark.slow
def test_windowed_heads_do_not_pay_for_full_ones():
    """One full KV head of four must cost far less than four."""

    def seconds(count):
        options = {"length": 8192, "window": 256, "backward": True, "kv_heads": 4, "full_heads": count}
        return measure(implementation="xla", **options)["seconds"]

    def fair(least):
        return least[1] - least[0] <= 0.4 * (least[4] - least[0])

    least = least_seconds(seconds, (0, 1, 4), fair)
    assert fair(least), least
