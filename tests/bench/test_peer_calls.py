"""Other libraries' kernels as `swa-jax bench cycles` counts them: visits by hand, and refusals."""

import collections
import importlib.util

import numpy as np
import pytest
from command_line import fails

from swa_jax.base.errors import ConfigError
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


def flywheel(monkeypatch, plans, blocks=(1024, 512)):
    """FlyWheel's own sizes, and its plans of masked blocks, by their place: so many parts each."""

    class Parts:
        @staticmethod
        def default_block_sizes(*_, **__):
            return BlockSizes(*blocks, block_q_compute=256, block_kv_compute=256)

        @staticmethod
        def window_fragment_plans(**_):
            return {place: (None,) * parts for place, parts in plans.items()}

        @staticmethod
        def default_bwd_block(T):
            return 512

    monkeypatch.setattr(peer_calls.importlib, "import_module", lambda name: Parts)


BlockSizes = collections.namedtuple("BlockSizes", "block_q block_kv block_q_compute block_kv_compute")


@pytest.mark.parametrize("window", [None, 300, 1024, 1536, 2048])
def test_flywheel_visits_the_blocks_that_hold_something_the_longest_code_first(monkeypatch, window):
    """Blocks of 1024 queries and 512 keys in T = 4096; those at one place, from query to key, have one code."""
    places, plain = collections.Counter(), 0
    query, key = np.arange(1024)[:, None], np.arange(512)
    for q in range(0, 4096, 1024):
        for k in range(0, 4096, 512):
            seen = (k + key <= q + query) & (k + key > q + query - (window or 4096))
            plain += seen.all()
            places[k - q] += seen.any() and not seen.all()
    places = {place: count for place, count in places.items() if count}
    flywheel(monkeypatch, {place: index + 1 for index, place in enumerate(places)})
    found = peer_calls.executions("flywheel_forward", T=4096, window=window, H=2, K=1)
    expected = (2 * plain, *(2 * count for count in reversed(places.values())))
    assert found == Executions(expected, rows=8, heads=sum(expected), replays=True)


def test_flywheel_of_packed_rows_has_one_code_for_masked_blocks(monkeypatch):
    flywheel(monkeypatch, {}, blocks=(1024, 1024))
    found = peer_calls.executions("flywheel_forward", T=4096, window=1024, packed=True)
    assert found == Executions((7, 0), rows=4, heads=7, replays=True)  # every block is cut by one of the edges


def test_flywheel_s_backward_pass_takes_the_heads_of_a_group_at_once(monkeypatch):
    flywheel(monkeypatch, {})
    found = peer_calls.executions("flywheel_backward", T=2048, window=None, H=8, K=2)
    assert found == Executions((2 * 4, 2 * 6), rows=8, heads=20)
    with pytest.raises(ConfigError, match="neither windows nor packed rows"):
        peer_calls.FUNCTIONS["flywheel_backward"](T=2048, window=512)


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
