"""Single calls that are simulated for plans: kept on disk by content, and asked without segment ids where need be."""

import pytest

from swa_jax.base.errors import ConfigError
from swa_jax.bench import simulated_calls
from swa_jax.bench.cycles import COUNTED, SIMULATED, CycleCount, Op
from swa_jax.bench.simulated_calls import simulated_row

SIZES = {"H": 2, "K": 1, "D": 96, "window": 256, "num_sink_tokens": 0}


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """The settings of every call that is measured, whose steps are counted where it has segment ids."""
    calls = []

    def measure(function, chip, settings):
        calls.append(settings)
        source = COUNTED if settings.get("packed") and function == "window_backward" else SIMULATED
        return CycleCount(
            function, chip, settings, 2 * settings["T"], (Op(function, 48_000, source),), 0, (), (function,)
        )

    monkeypatch.setattr(simulated_calls, "measure", measure)
    monkeypatch.setenv("SWA_JAX_CACHE", str(tmp_path))
    return calls


def test_a_call_is_simulated_once_for_each_state_of_the_code(measured, monkeypatch):
    said = []
    row = simulated_row("window_forward", "v5e", SIZES, said.append)
    call = {"chip": "v5e", "function": "window_forward", "head_dim": 96, "window": 256, "packed": True, "group": 2}
    assert row.items() >= (call | {"length": 8192, "cycles": 3000.0}).items()
    assert simulated_row("window_forward", "v5e", SIZES, said.append) == row
    assert len(measured) == len(said) == 1
    assert "simulating window_forward, which the table of cycles lacks: a minute or two, once" in said[0]
    simulated_row("window_forward", "v5e", SIZES | {"window": 4096})
    assert measured[1]["T"] == 16384
    monkeypatch.setattr(simulated_calls, "_code", lambda: "other code")
    simulated_row("window_forward", "v5e", SIZES)
    assert len(measured) == 3


def test_what_has_no_figure_with_segment_ids_is_asked_without(measured):
    assert simulated_row("window_backward", "v5e", SIZES)["packed"] is False
    assert [settings.get("packed", False) for settings in measured] == [True, False]
    assert simulated_row("sigmoid_backward", "v5e", SIZES)["packed"] is False
    assert "packed" not in measured[2]


def test_a_call_without_a_figure_is_said_and_kept_but_no_failure(measured, monkeypatch):
    def nothing(function, chip, settings):
        op = Op(function, None, "the data decide its visits")
        return CycleCount(function, chip, settings, 16384, (op,), 0, (), (function,))

    def failure(function, chip, settings):
        raise ConfigError("too much for the chip's VMEM")

    said = []
    monkeypatch.setattr(simulated_calls, "measure", failure)
    assert simulated_row("full_forward", "v5e", SIZES, said.append) is None
    monkeypatch.setattr(simulated_calls, "measure", nothing)
    assert simulated_row("full_forward", "v5e", SIZES, said.append) is None
    assert simulated_row("full_forward", "v5e", SIZES, said.append) is None
    assert [line.endswith("its time is assumed") for line in said] == [False, True, False, True]
