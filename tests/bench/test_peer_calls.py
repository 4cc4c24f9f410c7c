"""Other libraries' kernels as `swa-jax bench cycles` counts them: visits by hand, and refusals."""

import importlib.util

import numpy as np
import pytest
from command_line import fails

from swa_jax.bench import cycles, peer_calls
from swa_jax.bench.tpu_kernels import Executions


def visits(T: int, window: int | None, block_q: int, block_kv: int) -> int:
    """Blocks in which some query sees some key."""
    query, key = np.arange(T)[:, None], np.arange(T)
    seen = (key <= query) & (key > query - (window or T))
    return int(seen.reshape(T // block_q, block_q, T // block_kv, block_kv).any((1, 3)).sum())


@pytest.mark.parametrize(("window", "blocks"), [(None, (512, 512)), (300, (1024, 512)), (1024, (256, 1024))])
def test_visits_are_the_blocks_that_hold_something(window, blocks):
    block_q, block_kv = blocks
    settings = {"T": 4096, "window": window, "block_q": block_q, "block_kv": block_kv, "H": 2, "K": 1}
    expected = 2 * visits(4096, window, block_q, block_kv)
    forward = peer_calls.executions("jax_splash_forward", **settings)
    backward = peer_calls.executions("jax_splash_backward", **settings)
    assert forward.bodies == backward.bodies == (expected,)
    assert (forward.rows, backward.rows) == (2 * 4096 // block_q, 2 * 4096 // block_kv)


def test_a_kernel_s_steps_are_visits_where_the_data_give_them(monkeypatch):
    class Kernel:
        class fwd_mask_info:
            block_mask = np.array([1, 2, 1, 2, 2, 0], np.int8)

    monkeypatch.setitem(peer_calls.MAKERS, "tokamax_splash", (lambda shape: Kernel, "tokamax"))
    found = peer_calls.executions("tokamax_splash_forward", H=3, T=2048)
    assert found == Executions(bodies=(6, 9), rows=6, heads=6)


def test_a_library_that_is_not_there_is_named(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "tokamax" else find(name))
    said = fails("bench", "cycles", "tokamax_splash_forward")
    assert "tokamax_splash_forward needs tokamax, which is not installed: pip install tokamax" in said


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu (the `tpu` extra)")
def test_settings_are_the_peer_s_own():
    said = fails("bench", "cycles", "jax_splash_forward", "--set", "block_k=3")
    assert "unknown setting of jax_splash_forward 'block_k'; did you mean 'block_kv'?" in said


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu (the `tpu` extra)")
def test_splash_is_compiled_and_counted():
    measured = cycles.measure("jax_splash_forward", "v6e", {"T": 2048, "window": 512, "block_q": 512})
    (kernel,) = (op for op in measured.ops if op.name in measured.kernels)
    assert kernel.source == cycles.COUNTED
    # Two products of 512 * 1024 * 128 a visit, on two units of 256 * 256.
    least = visits(2048, 512, 512, 1024) * 2 * 512 * 1024 * 128 / (2 * 256 * 256)
    assert least < kernel.cycles < 20 * least
