"""Mixtures of experts: every token meets the experts that its router chose, wherever they lie, and none is dropped."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from kernels.tolerances import assert_close
from safetensors.numpy import load_file
from tiny_models import EXPERTS, FUSED_EXPERTS, MIXED, PLAIN, SHARED_EXPERTS, SOFTMAX, base_model, logits_of, make

import swa_jax
from swa_jax.base.errors import ConfigError
from swa_jax.checkpoint.families import model_config
from swa_jax.checkpoint.hf_import import import_model
from swa_jax.model.attention import Attention, cast_parameters
from swa_jax.model.config import ModelConfig
from swa_jax.model.decoder import Decoder
from swa_jax.model.experts import MixtureOfExperts
from swa_jax.model.flops import matrix_parameters
from swa_jax.model.layers import activated
from swa_jax.model.lora import LoraConfig, merge_lora, trained_and_frozen, with_lora
from swa_jax.model.pattern import AttentionPattern
from swa_jax.train.objectives import load_balancing_loss

GOLDEN = Path(__file__).parents[1] / "golden"
SPARSE = sorted(file.parent.name for file in GOLDEN.glob("*/golden.safetensors") if "aux_loss" in load_file(file))
VARIANTS = {
    "one expert of many, by probability": dataclasses.replace(
        EXPERTS, num_experts=7, num_experts_per_tok=1, norm_topk_prob=False, hidden_act="gelu_tanh"
    ),
    "fused, clamped, biases": FUSED_EXPERTS,
    "all experts and a shared one, biases": dataclasses.replace(
        EXPERTS, num_experts_per_tok=5, mlp_bias=True, shared_expert_intermediate_size=7
    ),
    "a single expert": dataclasses.replace(EXPERTS, num_experts=1, num_experts_per_tok=1, mlp_bias=True),
    "sigmoids as they are": dataclasses.replace(EXPERTS, router_scores="sigmoid", norm_topk_prob=False),
    "groups, biased choice, shared expert": SHARED_EXPERTS,
}


def mixture(config: ModelConfig, seed: int = 0) -> MixtureOfExperts:
    config = dataclasses.replace(config, mlp_layer_types=())  # a layer knows its own kind alone
    module = MixtureOfExperts(config, jnp.dtype(jnp.float32), nnx.Rngs(seed))
    rng = np.random.default_rng(seed)
    for _, variable in nnx.to_flat_state(nnx.state(module)):  # biases too are drawn
        variable[...] = jnp.asarray(0.2 * rng.standard_normal(variable.shape), jnp.float32)
    return module


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(len(shape)).standard_normal(shape), jnp.float32)


run = nnx.jit(lambda module, *arguments: module(*arguments))


def by_every_expert(module: MixtureOfExperts, x: jax.Array) -> jax.Array:
    """All experts on all tokens, weighted by 0 where they are not chosen; f32."""
    config, weights = module.config, nnx.to_pure_dict(nnx.state(module))
    highest = jax.lax.Precision.HIGHEST

    def apply(x: jax.Array, name: str) -> jax.Array:
        letters = "btd,edf->btef" if x.ndim == 3 else "bted,edf->btef"
        y = jnp.einsum(letters, x, weights[name]["kernel"], precision=highest)
        return y + weights[name].get("bias", 0)

    router = weights["expert_router"]
    logits = jnp.matmul(x, router["kernel"], precision=highest) + router.get("bias", 0)
    probability = jax.nn.sigmoid(logits) if config.router_scores == "sigmoid" else jax.nn.softmax(logits)
    wanted = probability + router.get("choice_bias", 0)
    if config.expert_groups > 1:  # one group after the other, where the mixture takes the best of all
        groups = jnp.split(wanted, config.expert_groups, axis=-1)
        worth = jnp.stack([jnp.sort(group, axis=-1)[..., -2:].sum(-1) for group in groups], axis=-1)
        least = jnp.sort(worth, axis=-1)[..., -config.expert_groups_per_tok, None]
        wanted = jnp.where(jnp.repeat(worth >= least, wanted.shape[-1] // len(groups), axis=-1), wanted, -9.0)
    smallest = jnp.sort(wanted, axis=-1)[..., -config.num_experts_per_tok, None]
    weight = jnp.where(wanted >= smallest, probability, 0)
    if config.norm_topk_prob:
        weight /= weight.sum(-1, keepdims=True)
    weight *= config.expert_multiplier
    if config.fused_experts:
        both = apply(x, "gate_up_proj")
        gate, up = both[..., ::2], both[..., 1::2]
    else:
        gate, up = apply(x, "gate_proj"), apply(x, "up_proj")
    y = apply(activated(gate, up, config), "down_proj")
    routed = jnp.einsum("...ed,...e->...d", y, weight, precision=highest)
    shared = module.shared_expert(x) if config.shared_expert_intermediate_size else 0
    return config.mixture_multiplier * (routed + shared)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_mixture_is_the_weighted_sum_of_its_experts(name):
    module = mixture(VARIANTS[name])
    x = normal(2, 9, PLAIN.hidden_size)
    graph, state = nnx.split(module)

    def differentiate(function):
        def loss(state, x):
            y = function(nnx.merge(graph, state), x)
            return jnp.sum(jnp.sin(y)), y

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(state, x)

    (_, ours), gradients = differentiate(lambda module, x: module(x)[0])
    (_, theirs), expected = differentiate(by_every_expert)
    assert np.abs(theirs).max() > 0.1
    assert_close(ours, theirs, "float32")
    assert_close(gradients, expected, "float32", gradient=True)


def test_the_bias_chooses_experts_but_does_not_weigh_them():
    module = mixture(dataclasses.replace(SHARED_EXPERTS, expert_groups=1, expert_groups_per_tok=1))
    x = normal(1, 7, PLAIN.hidden_size)
    module.expert_router.choice_bias[...] = jnp.array([0.0, 9.0, 0.0, 0.0, 8.0, 0.0])
    first, load = run(module, x)
    np.testing.assert_array_equal(load.chosen, [0, 7, 0, 0, 7, 0])
    module.expert_router.choice_bias[...] *= 2
    np.testing.assert_array_equal(run(module, x)[0], first)


def test_groups_leave_out_a_good_expert_of_a_poor_group():
    module = mixture(dataclasses.replace(SHARED_EXPERTS, expert_groups_per_tok=1))
    module.expert_router.choice_bias[...] = jnp.array([9.0, 0.0, 6.0, 6.0, 5.0, 0.0])
    x = normal(1, 7, PLAIN.hidden_size)
    np.testing.assert_array_equal(run(module, x)[1].chosen, [0, 0, 7, 7, 0, 0])


@pytest.mark.parametrize("gate", ["head", "channel"])
@pytest.mark.parametrize("act", ["sigmoid", "softplus"])
def test_attention_is_gated_by_what_it_reads(gate, act):
    config = dataclasses.replace(SOFTMAX, attention_gate=gate, attention_gate_act=act)
    attention = Attention(config, False, jnp.dtype(jnp.float32), nnx.Rngs(0))
    heads, size = config.num_attention_heads, config.head_dim
    mixed, x = normal(2, 3, heads, size), normal(2, 3, config.hidden_size)
    numbers = (x @ attention.g_proj.kernel[...]).reshape(2, 3, heads, -1)
    assert numbers.shape[-1] == {"head": 1, "channel": size}[gate]
    factor = {"sigmoid": 1 / (1 + jnp.exp(-numbers)), "softplus": jnp.log(1 + jnp.exp(numbers))}[act]
    expected = (mixed * factor).reshape(2, 3, -1) @ attention.o_proj.kernel[...]
    assert_close(attention.output(mixed, x), expected, "float32")


def test_tokens_that_all_choose_one_expert_are_all_computed():
    """There is no capacity that a crowd could exceed."""
    module = mixture(dataclasses.replace(EXPERTS, mlp_bias=True))
    module.expert_router.kernel[...] = 0 * module.expert_router.kernel[...]
    module.expert_router.bias[...] = jnp.array([0.0, 0.0, 9.0, 8.0, 0.0])
    x = normal(3, 11, PLAIN.hidden_size)
    y, load = run(module, x)
    assert_close(y, nnx.jit(by_every_expert)(module, x), "float32")
    np.testing.assert_array_equal(load.chosen, [0, 0, 33, 33, 0])


def test_the_load_leaves_padding_out():
    module = mixture(EXPERTS)
    x = normal(2, 6, PLAIN.hidden_size)
    counted = jnp.array([[True] * 6, [True] * 2 + [False] * 4])
    (y, load), (short, expected) = run(module, x, counted), run(module, x[1:, :2])
    first = run(module, x[:1])[1]
    np.testing.assert_allclose(y[1, :2], short[0], rtol=0, atol=1e-6)
    for got, a, b in zip(load, expected, first, strict=True):
        np.testing.assert_allclose(got, a + b, rtol=1e-6)
    assert float(load.chosen.sum()) == 8 * EXPERTS.num_experts_per_tok
    assert float(load.probability.sum()) == pytest.approx(8)


def test_padding_changes_no_other_token():
    model = base_model(MIXED).with_pattern(make("wFwF"))
    tokens = np.random.default_rng(0).integers(1, MIXED.vocab_size, (2, 14))
    segments = np.array([[1] * 9 + [0] * 5, [0] * 3 + [1] * 11])
    other = np.where(segments == 0, (tokens + 7) % MIXED.vocab_size, tokens)
    features = nnx.jit(lambda model, tokens: model.features(tokens, segment_ids=segments))
    (hidden, routing, _), (changed, again, _) = features(model, tokens), features(model, other)
    hidden, changed = np.asarray(hidden), np.asarray(changed)
    np.testing.assert_array_equal(hidden[segments > 0], changed[segments > 0])
    for a, b in zip(routing.experts, again.experts, strict=True):
        np.testing.assert_array_equal(a, b)
    assert (np.asarray(routing.experts.chosen).sum(1) > 0).tolist() == [i in MIXED.sparse_layers for i in range(4)]


@pytest.mark.parametrize("case", SPARSE)
def test_the_load_balancing_loss_is_hugging_faces(case, tmp_path):
    model = swa_jax.load_model(import_model(GOLDEN / case, tmp_path / "model"))
    golden = load_file(GOLDEN / case / "golden.safetensors")
    segments = np.ones_like(golden["tokens"])
    segments[1, -12:] = 0
    features = nnx.jit(lambda model, tokens: model.features(tokens, segment_ids=segments))
    _, routing, _ = features(model, golden["tokens"])
    layers = len(model.config.sparse_layers)
    ours = load_balancing_loss(routing.experts, layers, jnp.sum(segments))
    np.testing.assert_allclose(ours, golden["aux_loss"][0], rtol=1e-5)


def test_the_router_computes_in_f32_in_a_model_of_any_dtype():
    model = base_model(EXPERTS).with_pattern(make("FFFF"))
    cast = cast_parameters(nnx.state(model), jnp.bfloat16)
    dtypes = {".".join(map(str, path)): v.dtype for path, v in nnx.to_flat_state(cast)}
    assert {str(dtype) for name, dtype in dtypes.items() if "expert_router" in name} == {"float32"}
    assert dtypes["layers.experts.gate_proj.kernel"] == jnp.bfloat16
    module = mixture(EXPERTS)
    x = normal(1, 64, PLAIN.hidden_size).astype(jnp.bfloat16)
    y, load = run(module, x)
    assert (y.dtype, load.probability.dtype) == (jnp.bfloat16, jnp.float32)
    exact = x.astype(jnp.float32)[0] @ module.expert_router.kernel[...]
    np.testing.assert_allclose(load.probability, jax.nn.softmax(exact).sum(0), rtol=1e-5)


def test_operations_of_experts_are_those_that_a_token_meets():
    assert dataclasses.replace(EXPERTS, mlp_layer_types=("sparse",) * 4) == EXPERTS  # one spelling
    attention = 24 * 8 * (4 + 2 + 2) + 4 * 8 * 24
    expert = 3 * 24 * 12
    assert matrix_parameters(EXPERTS) == 4 * (attention + 2 * expert) + 24 * 61
    gate, shared = 24 * 4 * 8, 3 * 24 * 10
    shared_experts = dataclasses.replace(EXPERTS, attention_gate="channel", shared_expert_intermediate_size=10)
    assert matrix_parameters(shared_experts) == 4 * (attention + gate + 2 * expert + shared) + 24 * 61
    dense = 3 * 24 * 40
    assert matrix_parameters(MIXED) == 4 * attention + 2 * 2 * expert + 2 * dense + 24 * 61


def test_lora_adapts_attention_and_its_gate_but_no_expert():
    config = dataclasses.replace(SHARED_EXPERTS, mlp_layer_types=())
    model = base_model(config).with_pattern(make("FFFF"))
    for name in ("up_proj", "gate_proj"):
        with pytest.raises(ConfigError, match=f"names '{name}', which a llama model does not have"):
            with_lora(model, LoraConfig(targets=(name,)), nnx.Rngs(0))
    adapted = with_lora(model, LoraConfig(rank=2, targets=("g_proj",)), nnx.Rngs(0))
    trained, frozen = (dict(nnx.to_flat_state(state)) for state in trained_and_frozen(adapted))
    assert {path[-1] for path in trained} == {"lora_a", "lora_b"}
    assert ("layers", "experts", "expert_router", "kernel") in frozen
    adapted.layers.attention.g_proj.lora_b[...] += 1.0
    tokens = jnp.arange(5)[None]
    with_adapters = logits_of(adapted, tokens)
    assert np.abs(with_adapters - logits_of(model, tokens)).max() > 0.01
    assert_close(logits_of(merge_lora(adapted), tokens), with_adapters, "float32")


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"num_experts_per_tok": 6}, r"num_experts_per_tok must be from 1 to num_experts \(5\), got 6"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok must be from 1"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size must be above 0"),
        ({"mlp_layer_types": ("sparse",) * 3}, "mlp_layer_types has 3 entries for 4 layers"),
        ({"mlp_layer_types": ("sparse", "dens", "sparse", "dense")}, r"mlp_layer_types\[1\] is 'dens'; did you mean"),
        ({"mlp_layer_types": ("dense",) * 4}, "'dense' in every layer: set num_experts to 0"),
        ({"num_experts": 0, "mlp_layer_types": ("sparse", "dense") * 2}, "num_experts must be above 0"),
        ({"shared_expert_intermediate_size": -1}, "shared_expert_intermediate_size must be 0 or more, got -1"),
        ({"expert_groups": 2}, r"expert_groups \(2\) must cut num_experts \(5\) into equal groups of at least 2"),
        ({"num_experts": 6, "expert_groups": 6}, r"expert_groups \(6\) must cut"),
        ({"num_experts": 6, "expert_groups": 3, "expert_groups_per_tok": 4}, "from 1 to expert_groups, got 4"),
        (
            {"num_experts": 6, "expert_groups": 3, "num_experts_per_tok": 3},
            r"expert_groups_per_tok \(1\) of 2 experts each are fewer than num_experts_per_tok \(3\)",
        ),
        ({"expert_multiplier": 0}, "expert_multiplier must be from 1e-06"),
        ({"sink_logits": True, "attention_activation": "sigmoid"}, "sink_logits enter the denominator of a softmax"),
    ],
)
def test_descriptions_of_experts_that_cannot_be_are_refused(fields, sentence):
    with pytest.raises(ConfigError, match=sentence):
        dataclasses.replace(EXPERTS, **fields)


def test_dense_models_of_families_with_experts_have_none():
    hf = json.loads((GOLDEN / "mellum-moe-hybrid" / "config.json").read_text())
    config = model_config(hf | {"mlp_layer_types": ["dense"] * 5})
    assert (config.num_experts, config.mlp_layer_types, config.sparse_layers) == (0, (), ())
    pattern = AttentionPattern.from_recipe("full", config)
    assert nnx.eval_shape(lambda: Decoder(config, pattern, rngs=nnx.Rngs(0))).layers.experts is None
