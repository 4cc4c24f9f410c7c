"""Models whose layers are not all alike: what is stacked, who reads whose keys, and what training changes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_models import BYTES, MIXED, SHARED_KEYS, SOFTMAX, TWO_SHAPES, base_model, logits_of, make

from swa_jax.base.errors import ConfigError
from swa_jax.evaluate.examples import Example
from swa_jax.model.cache import cache_layouts, kept_whole
from swa_jax.model.decoder import Decoder
from swa_jax.model.flops import attention_flops, work_by_position
from swa_jax.model.layer_stacks import head_groups, layer_stacks
from swa_jax.model.lora import LoraConfig, merge_lora, with_lora
from swa_jax.model.window import Window
from swa_jax.select.nll import nll_deltas

TOKENS = jnp.asarray(np.random.default_rng(0).integers(61, size=(2, 21)), jnp.int32)
LONGER = dataclasses.replace(
    SHARED_KEYS,
    num_hidden_layers=7,
    rope_layers=("local", "local", "global", "local", "global", "local", "global"),
    num_kv_shared_layers=4,
)


def test_stacks_and_groups():
    assert [stack.name for stack in layer_stacks(SOFTMAX)] == [""]
    assert [(stack.name, stack.layers) for stack in layer_stacks(MIXED)] == [("dense", (0, 3)), ("sparse", (1, 2))]
    assert {stack.name: stack.layers for stack in layer_stacks(LONGER)} == {
        "local": (0, 1),
        "global": (2,),
        "local_shared": (3, 5),
        "global_shared": (4, 6),
    }
    assert [tuple(group) for group in head_groups(TWO_SHAPES)] == [((0, 2), 4, 2, 8), ((1, 3), 4, 1, 12)]
    for config in (MIXED, LONGER, TWO_SHAPES):
        for stack in layer_stacks(config):
            assert [alone.name for alone in layer_stacks(stack.config)] == [""]
            assert stack.config.num_hidden_layers == len(stack.layers)


def test_a_shared_cache_holds_what_all_of_its_readers_need():
    assert LONGER.kv_sources == (0, 1, 2, 1, 2, 1, 2)
    rows = kept_whole(LONGER, make("wwFwFFF"))
    assert rows[:, 0].tolist() == [False, True, True, True, True, True, True]
    heads = kept_whole(LONGER, make("whwhwhw", ((), (1,), (), (1,), (), (1,), ())))
    assert heads.tolist() == [[False, False], *[[False, kind] for kind in (True, False) * 3]]
    heads = kept_whole(LONGER, make("whwhwhw", ((), (1,), (), (0,), (), (1,), ())))
    assert heads[[1, 3, 5]].all()
    assert not heads[[0, 2, 4, 6]].any()
    local, full = cache_layouts(LONGER, make("wwFwFwF"), 64)
    assert (local.whole_rows, local.ring_rows, full.whole_rows, full.ring_rows) == (0, 4, 2, 0)
    assert (local.source, full.source) == (1, 2)
    assert (local.ring_slots[3] == local.ring_slots[1]).all()


@functools.partial(jax.jit, static_argnums=1)
@jax.grad
def gradient_of(state, graph):
    hidden, *_ = nnx.merge(graph, state).features(TOKENS)
    return jnp.sum(jnp.square(hidden[:, 3:]) * jnp.arange(hidden.shape[-1]))


def gradient(graph, state):
    return {".".join(map(str, path)): np.asarray(x[...]) for path, x in nnx.to_flat_state(gradient_of(state, graph))}


def test_gradients_reach_keys_through_the_layers_that_read_them():
    model = base_model(SHARED_KEYS).with_pattern(make("wFwF"))
    graph, state = nnx.split(model)
    plain = gradient(graph, state)
    for name, value in plain.items():
        assert (np.abs(value).max() > 0) != name.endswith("layer_scalar"), name  # which training leaves as it is
    # Without what its readers do with them, the first layer's keys have another gradient.
    silent = {
        path: x.replace(x[...] * 0) if {"local_shared", "o_proj"} <= {*path} else x
        for path, x in nnx.to_flat_state(state)
    }
    alone = gradient(graph, nnx.from_flat_state(silent))
    name = "layers.local.attention.k_proj.kernel"
    assert np.abs(alone[name] - plain[name]).max() > 1e-2 * np.abs(plain[name]).max()


def test_adapters_of_layers_that_differ():
    lora = LoraConfig(rank=2, targets=("q_proj", "k_proj", "v_proj", "down_proj"), dropout=0)
    model = with_lora(base_model(SHARED_KEYS).with_pattern(make("wFwF")), lora, nnx.Rngs(0))
    state = nnx.state(model, nnx.LoRAParam)
    names = {".".join(map(str, path)) for path, _ in nnx.to_flat_state(state)}
    assert "layers.local_shared.attention.q_proj.lora_a" in names
    assert not [name for name in names if "shared.attention.k_proj" in name]
    rng = np.random.default_rng(1)
    nnx.update(model, jax.tree.map(lambda x: x + 0.1 * rng.standard_normal(x.shape, np.float32), state))
    np.testing.assert_allclose(logits_of(merge_lora(model), TOKENS), logits_of(model, TOKENS), rtol=1e-4, atol=1e-4)
    assert lora.num_parameters(model.config) == sum(x.size for x in jax.tree.leaves(state))


def test_work_counts_the_heads_of_each_layer():
    at = np.array([19])
    expected = 4 * 4 * (6 * 8 + 20 * 12 + 6 * 8 + 20 * 12)  # heads, then keys seen and channels by layer
    assert attention_flops(TWO_SHAPES, make("wFwF"), at).tolist() == [expected]
    (row,) = work_by_position(TWO_SHAPES, make("wFwF"), [20])
    assert row.kv_tokens_read == pytest.approx((6 * 2 * 8 + 20 * 12) / (2 * 8 + 12))


def test_layers_that_differ_are_selected_by_whole_passes():
    config = dataclasses.replace(SHARED_KEYS, vocab_size=BYTES.vocab_size, vocab_size_per_layer_input=257)
    model = Decoder(config, make("FFFF", sliding_window=None), rngs=nnx.Rngs(0))
    rng = np.random.default_rng(1)
    examples = [Example(rng.integers(257, size=20).tolist(), rng.integers(257, size=2).tolist(), []) for _ in range(2)]
    found = nll_deltas(model, examples, Window(4, full_decode=True))
    assert found.deltas.shape == (2, 4)
    assert (np.abs(found.deltas).max(0) > 1e-5).all()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"num_kv_shared_layers": 5}, r"num_kv_shared_layers must be from 0 to num_hidden_layers \(4\), got 5"),
        ({"num_kv_shared_layers": 3}, "none of the other layers has the rotary embedding 'global'"),
        ({"rope_layers": ("local", "none", "local", "none")}, "needs layers whose rotary embeddings are"),
        ({"num_global_key_value_heads": 3}, r"must be a multiple of num_global_key_value_heads \(3\)"),
        ({"vocab_size_per_layer_input": 0}, "vocab_size_per_layer_input must be above 0 where layers have inputs"),
    ],
)
def test_what_does_not_fit(changes, sentence):
    with pytest.raises(ConfigError, match=sentence):
        dataclasses.replace(SHARED_KEYS, **changes)


def test_single_heads_need_as_many_in_every_layer():
    assert SHARED_KEYS.common_kv_heads == SHARED_KEYS.most_kv_heads == TWO_SHAPES.most_kv_heads == 2
    with pytest.raises(ConfigError, match="layers of this model have 1 or 2 KV heads: single heads are chosen where"):
        _ = TWO_SHAPES.common_kv_heads
