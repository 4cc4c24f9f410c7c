"""Intervals of the loss over a text: neighbouring tokens are not independent."""

import numpy as np
import pytest

from swa_jax.evaluate.sweep import block_interval


def test_block_intervals_are_wider_where_neighbours_agree():
    rng = np.random.default_rng(0)
    independent = rng.normal(2, 1, 6400)
    alike = np.repeat(rng.normal(2, 1, 100), 64)
    (mean, low, high), blocks = block_interval(independent)
    assert blocks == 100
    assert low < mean < high < low + 0.07
    wide, _ = block_interval(alike)
    assert wide.high - wide.low > 5 * (high - low)
    assert mean == pytest.approx(independent.mean(), abs=1e-12)
    uneven = np.append(np.zeros(86), np.ones(43))  # blocks of 65 and 64 tokens
    assert block_interval(uneven)[0].mean == pytest.approx(43 / 129, abs=1e-12)
    few, blocks = block_interval(independent[:20])
    assert (blocks, few.interval) == (1, None)
