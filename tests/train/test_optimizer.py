"""Learning rates by step against worked values; clipping, weight decay and Muon reach what they should."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from tiny_models import SOFTMAX, model_of

from swa_jax.train.optimizer import (
    OptimizerConfig,
    by_stage,
    is_matrix,
    learning_rate,
    make_optimizer,
    warn_of_short_runs,
)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"schedule": "constant"}, {0: 1, 50: 1, 100: 1}),
        ({"schedule": "constant", "warmup_steps": 10}, {0: 0, 5: 0.5, 10: 1, 100: 1}),
        ({"schedule": "linear", "warmup_steps": 20}, {10: 0.5, 20: 1, 60: 0.55, 100: 0.1}),
        ({"schedule": "cosine"}, {0: 1, 50: 0.55, 100: 0.1}),  # half way is the middle of 1 and 0.1
        ({"schedule": "cosine", "warmup_steps": 20, "final_fraction": 0}, {20: 1, 60: 0.5, 100: 0}),
        (
            {"schedule": "warmup-stable-decay", "warmup_steps": 10, "decay_steps": 40},
            {5: 0.5, 10: 1, 60: 1, 80: 0.55, 100: 0.1},
        ),
    ],
)
def test_learning_rates(options, expected):
    rate = learning_rate(OptimizerConfig(**options), peak=2.0, total_steps=100)
    for step, share in expected.items():
        assert rate(step) == pytest.approx(2 * share, abs=1e-6), step


def test_a_stage_multiplies_the_rate_from_its_first_step_on():
    whole = learning_rate(OptimizerConfig(schedule="linear"), peak=2.0, total_steps=100)
    rate = by_stage(whole, [(0, 1.0), (40, 0.5), (60, 0.25)])
    for step, factor in {0: 1, 39: 1, 40: 0.5, 59: 0.5, 60: 0.25, 99: 0.25}.items():
        assert rate(step) == pytest.approx(factor * whole(step)), step
    assert by_stage(whole, [(0, 1.0), (40, 1.0)]) is whole
    assert by_stage(whole, []) is whole


@pytest.fixture(scope="module")
def params():
    return nnx.state(model_of("switch"), nnx.Param)


def updates(params, **options):
    """The first update, of gradients that are all 1."""
    optimizer = make_optimizer(OptimizerConfig(schedule="constant", **options), 10, SOFTMAX)
    gradients = jax.tree.map(jnp.ones_like, params)
    return jax.jit(optimizer.update)(gradients, optimizer.init(params), params)[0]


def test_matrices_are_the_projections(params):
    leaves = jax.tree_util.tree_leaves_with_path(is_matrix(params, SOFTMAX))
    names = {jax.tree_util.keystr(path): matrix for path, matrix in leaves}
    matrices = [name for name, matrix in names.items() if matrix]
    assert len(matrices) == 7  # q, k, v, o, gate, up, down
    assert all("kernel" in name and "router" not in name for name in matrices)
    assert any("router" in name for name in names)
    assert any("embed" in name for name in names)


def test_weight_decay_is_for_matrices_alone(params):
    plain, decayed = (updates(params, learning_rate=0.1, weight_decay=decay) for decay in (0, 0.5))
    for one, other, parameter, matrix in zip(
        *(jax.tree.leaves(tree) for tree in (plain, decayed, params, is_matrix(params, SOFTMAX))), strict=True
    ):
        expected = one - 0.1 * 0.5 * parameter if matrix else one
        np.testing.assert_allclose(other, expected, atol=1e-7)


def test_clipping(params):
    """Adam's first step hides the gradient's size; its first moment does not."""

    def moment(clip_norm):
        optimizer = make_optimizer(OptimizerConfig(clip_norm=clip_norm), 10, SOFTMAX)
        gradients = jax.tree.map(jnp.ones_like, params)
        state = optimizer.update(gradients, optimizer.init(params), params)[1]
        return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(optax.tree.get(state, "mu"))])

    norm = sum(leaf.size for leaf in jax.tree.leaves(params)) ** 0.5  # of gradients that are all 1
    np.testing.assert_allclose(moment(None), 1 - OptimizerConfig().b1, rtol=1e-5)
    np.testing.assert_allclose(moment(0.5), moment(None) * 0.5 / norm, rtol=1e-5)


def test_a_run_too_short_for_its_schedule_is_told(caplog):
    config = OptimizerConfig(schedule="warmup-stable-decay", warmup_steps=100, decay_steps=5)
    with caplog.at_level(logging.WARNING):
        for enough in (105, 0):  # 0: nothing is trained
            warn_of_short_runs(config, enough)
        warn_of_short_runs(OptimizerConfig(warmup_steps=100, decay_steps=5), 100)  # a cosine has no decay steps
        assert not caplog.records
        warn_of_short_runs(config, 104)
    assert "100 steps to warm up and 5 to decay, but the run has 104 steps in all" in caplog.text
