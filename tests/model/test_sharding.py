"""Meshes and rules: what fits, what does not, and that every mesh computes what one device does."""

import dataclasses
import os

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from python_process import EIGHT_DEVICES, python
from tiny_models import WIDER, abstract_partition

from swa_jax.base.errors import ConfigError
from swa_jax.model.flops import attention_flops, matrix_parameters, train_flops_per_token, visible_keys
from swa_jax.model.pattern import AttentionPattern
from swa_jax.model.sharding import MeshConfig, ShardingRules, check_batch, check_model, mesh_shape, state_shardings
from swa_jax.train.loop import random_model
from swa_jax.train.optimizer import OptimizerConfig, make_optimizer
from swa_jax.train.step import init_state

QUICK = EIGHT_DEVICES | {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {EIGHT_DEVICES['XLA_FLAGS']}"}
MODEL = dataclasses.replace(WIDER, vocab_size=60, num_hidden_layers=2)


@pytest.mark.parametrize(
    "what",
    [
        "small",
        "norms",
        pytest.param("teacher", marks=pytest.mark.slow),
        *(pytest.param(x, marks=pytest.mark.long) for x in ("attention", "rows", "training", "selection")),
    ],
)
def test_every_mesh_computes_what_one_device_does(what):
    python("-m", "tests.on_mesh", what, **QUICK)


@pytest.mark.long
@pytest.mark.parametrize("name", ["every-kind", "head-hybrid", "every-kind+fa-decode", "swat-every-kind"])
def test_every_mesh_generates_what_one_device_does(name):
    python("-m", "tests.generation_on_mesh", name, **QUICK)


def test_one_axis_takes_the_devices_that_remain():
    assert mesh_shape(MeshConfig(data=2, tensor=2), 16) == (2, 4, 1, 1, 2)
    assert mesh_shape(MeshConfig(data=2, fsdp=4, slices=3), 24) == (6, 4, 1, 1, 1)
    assert mesh_shape(MeshConfig(1, 2, 1, 2, expert=4), 16) == (1, 2, 4, 1, 2)
    with pytest.raises(ConfigError, match="asks for a multiple of 6 devices, but there are 8"):
        mesh_shape(MeshConfig(tensor=6), 8)
    with pytest.raises(ConfigError, match="asks for 4 devices, but there are 8"):
        mesh_shape(MeshConfig(fsdp=4), 8)
    with pytest.raises(ConfigError, match="more than one axis"):
        MeshConfig(data=-1, fsdp=-1)
    with pytest.raises(ConfigError, match=r"'mesh.tensor' must be at least 1"):
        MeshConfig(tensor=0)


def test_rules_refuse_an_axis_that_would_split_a_tensor_twice():
    rules = ShardingRules(embed=("fsdp", "tensor"))
    with pytest.raises(ConfigError, match=r"q_proj: mesh axis 'tensor' would split both 'embed' and 'heads'"):
        rules.spec("q_proj", (None, "embed", "heads"))
    with pytest.raises(ConfigError, match="names mesh axis 'model'"):
        ShardingRules(mlp=("model",))
    assert ShardingRules().spec("x", ("batch", "sequence", None)) == P(("data", "fsdp", "expert"), ("context",), None)


def test_parameters_and_moments_are_split_alike_and_what_cannot_be_is_named():
    pattern = AttentionPattern.from_recipe("switch", MODEL, sliding_window=4)
    model = random_model(MODEL, pattern, 0, None)
    state = init_state(nnx.state(model, nnx.Param), make_optimizer(OptimizerConfig(), 10, MODEL))
    partition = abstract_partition(fsdp=4, tensor=2)
    paths = jax.tree_util.tree_leaves_with_path(state_shardings(state, partition, MODEL))
    specs = {jax.tree_util.keystr(path, simple=True, separator="."): place.spec for path, place in paths}
    wanted = P(None, ("fsdp", "context"), ("tensor",))
    kernels = [spec for name, spec in specs.items() if "q_proj" in name and "kernel" in name]
    assert kernels == [wanted] * 3  # the weights and AdamW's two moments
    assert all(spec == P() for name, spec in specs.items() if "norm" in name or "router" in name)
    with pytest.raises(ConfigError, match=r"embedding, axis 0 \(vocab\), is 60 long and cannot be split in 8"):
        state_shardings(state, abstract_partition(tensor=8), MODEL)


def test_batches_and_heads_that_do_not_divide_are_named():
    with pytest.raises(ConfigError, match=r"'stages.0': batch_size / accumulate = 6 cannot be split in 4"):
        check_batch(abstract_partition(data=2, fsdp=2), 6, 64, "stages.0")
    with pytest.raises(ConfigError, match="sequence_length = 63 cannot be split in 2"):
        check_batch(abstract_partition(context=2), 4, 63, "stages.0")
    check_batch(abstract_partition(context=2), 4, 62, "stages.0")
    with pytest.raises(ConfigError, match="sequence_length = 62 cannot be split in 4"):
        check_batch(abstract_partition(context=2), 4, 62, "stages.0", order="zigzag")
    with pytest.raises(ConfigError, match=r"num_key_value_heads is 2, which 'mesh.tensor' = 4"):
        check_model(MODEL, abstract_partition(tensor=4))


def test_operations_are_counted():
    assert visible_keys(np.arange(6), 3).tolist() == [1, 2, 3, 3, 3, 3]
    assert visible_keys(np.arange(6), 3, 2).tolist() == [1, 2, 3, 4, 5, 5]
    assert visible_keys(np.arange(8), 3, 2, chunked=True).tolist() == [1, 2, 3, 3, 4, 5, 3, 4]
    full = AttentionPattern.from_recipe("full", MODEL)
    half = AttentionPattern.from_recipe("interleave-1-in-2", MODEL, sliding_window=3)
    one_key = 4 * 4 * 8  # head_dim 8, 4 heads
    assert attention_flops(MODEL, full, np.array([9])) == 2 * 10 * one_key
    assert attention_flops(MODEL, half, np.array([9])) == (10 + 3) * one_key
    assert matrix_parameters(MODEL) == 2 * (32 * 8 * 12 + 3 * 32 * 48) + 32 * 60
    assert train_flops_per_token(MODEL, full, 1) == 6 * matrix_parameters(MODEL) + 3 * 2 * one_key
    assert train_flops_per_token(MODEL, full, 1, teacher=full) == 8 * matrix_parameters(MODEL) + 4 * 2 * one_key
