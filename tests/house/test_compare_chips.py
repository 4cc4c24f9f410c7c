"""Timings of real chips beside counted cycles: which of tokamax's are taken, and the table by hand."""

import importlib.machinery
import json

import pytest

from scripts.compare import chips
from scripts.compare.runner import key_of
from swa_jax.base.errors import ConfigError

TILES = {"block_q": 2048, "block_kv": 1024, "block_kv_compute": 512, "use_experimental_scheduler": True}
TILES |= {"q_layout": 1, "k_layout": 2, "v_layout": 1}
BACKWARD = {"block_q_dkv": 512, "block_kv_dkv": 256, "block_kv_dkv_compute": 128, "dq_reduction_steps": None}


def key(heads=32, length=8192, keys=8192, head_dim=128, dropout=0.0, residuals=False) -> str:
    kv = f"bf16[8,{keys},{head_dim}]"
    given = {"q": f"bf16[{heads},{length},{head_dim}]", "k": kv, "v": kv, "mask": {"is_causal": True}}
    return json.dumps(given | {"dropout_rate": dropout, "return_residuals": residuals})


@pytest.fixture
def tokamax(tmp_path, monkeypatch):
    """A library with the timings of three calls that are taken, and of four that are not."""
    folder = tmp_path / "data" / "autotuning" / "tpu7x"
    folder.mkdir(parents=True)
    times = {"evaluation_times_ms": [9.0, 2.0, 1.0]}
    others = [key(heads=64), key(keys=16384), key(head_dim=192), key(dropout=0.1)]
    forward = {
        name: {json.dumps(TILES): times} for name in [key(residuals=True), key(length=32768, keys=32768), *others]
    }
    (folder / f"{chips.TIMINGS['forward']}.json").write_text(json.dumps(forward))
    (folder / f"{chips.TIMINGS['backward']}.json").write_text(json.dumps({key(): {json.dumps(BACKWARD): times}}))
    spec = importlib.machinery.ModuleSpec("tokamax", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(chips.importlib.util, "find_spec", lambda name: spec)


def test_the_calls_that_were_timed_are_counted_with_their_tiles(tokamax):
    first, second, third = chips.timings(chips.LENGTHS)
    assert [one.call.settings["T"] for one in (first, second, third)] == [8192, 8192, 32768]
    assert first.milliseconds == 2.0
    tiles = {"block_q": 2048, "block_kv": 1024, "block_kv_compute": 512, "scheduler": True}
    tiles |= {"q_minor": False, "k_minor": True, "v_minor": False}
    shape = {"T": 8192, "D": 128, "window": None}
    assert first.call == ("tokamax_splash_forward", "v7x", shape | tiles | {"residuals": True})
    tiles = {"block_q": 512, "block_kv": 256, "block_kv_compute": 128, "dq_steps": None}
    assert second.call == ("tokamax_splash_backward", "v7x", shape | tiles)
    assert len(chips.timings((32768,))) == 1


def test_the_table_has_the_time_of_all_heads_and_its_error(tokamax):
    """1.88 GHz: 14,687.5 cycles of each 1024 rows and head are 2 ms of 32 heads of 8192 rows."""
    timed = chips.timings((8192,))
    done = {key_of(*timed[0].call.key): {"cycles": 1.1 * 14687.5, "kernel_cycles": 0.9 * 14687.5}}
    table = chips.of_kernels(timed, done)
    assert "| 8192 | 128 | forward with residuals | 2.000 | 1.800 (-10 %) | 2.200 (+10 %) |" in table
    assert "| 8192 | 128 | backward | 2.000 | - | - |" in table
    assert table.endswith("Error of the program, 1 calls: 10 % in the mean, 10 % at most.")


def test_published_runs_stand_beside_plans_that_are_there():
    assert "| Llama 2 70B, T 4096, 512 chips of v5p | 65.4 | " in chips.of_plans()


def test_tokamax_is_asked_for(monkeypatch):
    monkeypatch.setattr(chips.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install tokamax"):
        chips.timings(chips.LENGTHS)
