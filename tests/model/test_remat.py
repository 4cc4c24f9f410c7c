"""Rematerialisation: equal gradients, and how often a real layer's kernels run."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from kernels.tolerances import assert_close
from tiny_models import model_of

from swa_jax.bench.compile_for_chip import kernel_name, pallas_calls
from swa_jax.model.remat import TrainingPass

MODES = ("layer", "attention", "projections", "offload")


def gradient(name, remat, tokens, unroll=False):
    """The loss' gradient as a function of the weights."""
    graph, weights = nnx.split(model_of(name))

    def loss(weights):
        hidden, *_ = nnx.merge(graph, weights).features(
            tokens, segment_ids=jnp.ones_like(tokens), training=TrainingPass(remat, unroll)
        )
        return (hidden**2).mean()

    return jax.grad(loss), weights


def tokens_of(length):
    return jnp.asarray(np.random.default_rng(0).integers(61, size=(2, length)))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["window", pytest.param("every-kind", marks=pytest.mark.long)])
def test_no_mode_changes_a_gradient(name, mode):
    tokens = tokens_of(16)
    plain, saved = (jax.jit(run)(weights) for run, weights in (gradient(name, m, tokens) for m in ("none", mode)))
    assert_close(saved, plain, "float32", gradient=True)
    assert max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(plain)) > 1e-3


def test_projections_are_kept_but_that_onto_the_stream_and_the_swap_of_channels():
    """RoPE swaps channels by a product with a matrix [D, D]."""
    products, swaps = {}, {}
    for mode in ("none", "projections"):
        run, weights = gradient("window", mode, tokens_of(16))
        lines = [x for x in jax.jit(run).lower(weights).as_text().splitlines() if "stablehlo.dot_general" in x]
        swaps[mode] = sum("tensor<8x8xf32>)" in line for line in lines)
        products[mode] = len(lines) - swaps[mode]
    assert products["projections"] == products["none"] + 1  # of a loop over all layers
    assert swaps["projections"] > swaps["none"] > 0


def test_layers_are_written_out_if_asked_for():
    products = {}
    for unroll in (False, True):
        run, weights = gradient("window", "attention", tokens_of(16), unroll)
        products[unroll] = jax.jit(run).lower(weights).as_text().count("stablehlo.dot_general")
    assert products[True] > 3 * products[False], products  # of four layers


@pytest.mark.parametrize(
    "name", ["window", *(pytest.param(x, marks=pytest.mark.slow) for x in ("every-kind", "shared-keys"))]
)
def test_layers_that_are_written_out_have_the_gradient_of_the_loop(name):
    results = []
    for unroll in (False, True):
        run, weights = gradient(name, "attention", tokens_of(16), unroll)
        results.append(jax.jit(run)(weights))
    assert_close(*results, "float32", gradient=True)


def test_a_layer_that_is_written_out_has_no_branch_of_another_kind():
    branches = {}
    for unroll in (False, True):
        run, weights = gradient("every-kind", "none", tokens_of(16), unroll)
        branches[unroll] = str(jax.make_jaxpr(run)(weights)).count("branches=")
    assert branches[False] > 0 == branches[True], branches


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="older JAX leaves it to XLA to drop what nobody reads")
@pytest.mark.parametrize("name", ["window", "full", "switch", "every-kind", "swat"])
def test_attention_runs_forward_once_but_where_layers_are_asked_for(name):
    """On a TPU, traced here: the kernels of a step."""
    device = AbstractDevice(device_kind="TPU v6 lite", num_cores=1, platform="tpu")
    counts = {}
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), (AxisType.Auto,), abstract_device=device)):
        for mode in ("none", *MODES):
            run, weights = gradient(name, mode, tokens_of(256))
            counts[mode] = collections.Counter(
                kernel_name(eqn) for eqn in pallas_calls(jax.make_jaxpr(run)(weights).jaxpr)
            )
    forward = {kernel for kernel in counts["none"] if "forward" in kernel}
    assert forward
    for kernel, count in counts["none"].items():
        for mode in ("attention", "projections", "offload"):
            assert counts[mode][kernel] == count, (mode, kernel)
        assert counts["layer"][kernel] == count * (2 if kernel in forward else 1), kernel
