"""The zig-zag order: which tokens a device holds, and that all devices have the same work."""

import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import make

from swa_jax.model.flops import visible_keys
from swa_jax.model.sequence_order import in_zigzag, zigzag


def test_a_device_holds_one_early_and_one_late_chunk():
    row = jnp.arange(12)[None]
    assert zigzag(row, 3).reshape(3, 4).tolist() == [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]


@pytest.mark.parametrize(("window", "order_matters"), [(None, True), (1024, False)])
def test_the_busiest_of_four_devices_has_the_mean_work(window, order_matters):
    """A full layer at 32768 tokens: 1.75 times the mean in the row's own order, 1.00 in zig-zag order."""
    seen = visible_keys(np.arange(32768), window or 32768)

    def busiest(keys):
        by_device = np.asarray(keys).reshape(4, -1).mean(axis=1)
        return by_device.max() / by_device.mean()

    assert busiest(zigzag(seen[None], 4)) < 1.05
    assert (busiest(seen) > 1.7) == order_matters


def test_auto_asks_whether_any_layer_sees_the_row():
    windows, mixed = make("ww"), make("wF")
    assert not in_zigzag("auto", [windows], 64, 4)
    assert in_zigzag("zigzag", [windows], 64, 4)
    assert in_zigzag("auto", [mixed], 64, 4)
    assert in_zigzag("auto", [make("ww", full_attention_decode=True)], 64, 4)
    assert not in_zigzag("auto", [mixed], 60, 4)  # chunks that do not come out even
    assert not in_zigzag("contiguous", [mixed], 64, 4)
    assert not in_zigzag("zigzag", [mixed], 64, 1)
