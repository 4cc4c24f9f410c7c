"""The declaration of the parameters is what the decoder holds, and what everything that knows parameters reads."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from tiny_models import (
    BYTES,
    EXPERTS,
    FUSED_EXPERTS,
    LAYER_KINDS,
    MIXED,
    PARALLEL,
    SANDWICH,
    SHARED_EXPERTS,
    SHARED_KEYS,
    SIGMOID,
    SOFTMAX,
    TWO_SHAPES,
    abstract_partition,
)

from swa_jax.base.errors import ConfigError
from swa_jax.base.settings import load_config
from swa_jax.checkpoint import tensor_names as names
from swa_jax.checkpoint.families import FAMILIES, apply_pattern
from swa_jax.checkpoint.folder import load_model, open_checkpoint, save_model
from swa_jax.model import parameters as declaration
from swa_jax.model.config import ModelConfig, RopeScaling
from swa_jax.model.decoder import Decoder
from swa_jax.model.flops import matrix_parameters
from swa_jax.model.lora import TARGETS, LoraConfig, with_lora
from swa_jax.model.parameters import Parameter, declared, low_rank, parameters
from swa_jax.model.pattern import AttentionPattern
from swa_jax.model.sharding import check_model, state_shardings
from swa_jax.train import optimizer
from swa_jax.train.config import TrainConfig
from swa_jax.train.optimizer import OptimizerConfig, is_matrix, make_optimizer

CONFIGS = Path(__file__).parents[2] / "configs"
LORA = LoraConfig(rank=3, targets=("down_proj", "q_proj", "v_proj"))


def committed():
    """{file: ModelConfig} of every configuration that describes a model."""
    found = {}
    for file in sorted(CONFIGS.rglob("*.yaml")):
        shapes = file.parent.name == "models"
        model = load_config(ModelConfig, file) if shapes else load_config(TrainConfig, file).model
        if model is not None:
            found[file.relative_to(CONFIGS).as_posix()] = model
    return found


MODELS = committed() | {
    "tiny softmax": SOFTMAX,
    "tiny sigmoid": SIGMOID,
    "tiny bytes": BYTES,
    "tiny sandwich": SANDWICH,
    "tiny parallel": PARALLEL,
    "tiny experts": EXPERTS,
    "tiny experts and dense layers": MIXED,
    "tiny fused experts": FUSED_EXPERTS,
    "tiny shared experts": SHARED_EXPERTS,
    "tiny layers of two kinds": LAYER_KINDS,
    "a gate a head": dataclasses.replace(
        SHARED_EXPERTS, attention_gate="head", expert_groups=1, expert_groups_per_tok=1
    ),
    "tiny heads of two shapes": TWO_SHAPES,
    "tiny shared keys": SHARED_KEYS,
    "norms after": dataclasses.replace(SANDWICH, norm_placement="post"),
    "every bias": dataclasses.replace(
        SOFTMAX, attention_out_bias=True, mlp_bias=True, tie_word_embeddings=False, router_bias_init=-2.0
    ),
}


def test_the_committed_models_are_among_those_tested():
    assert len([name for name in MODELS if name.startswith("models/")]) == 6
    assert any(name.startswith("swat/") for name in MODELS)
    assert any(name.startswith("swiattn/") for name in MODELS)


def leaves(config, routed, lora):
    """{path: shape} of a decoder that is drawn but not computed."""

    def draw():
        pattern = AttentionPattern.from_recipe("switch" if routed else "full", config)
        model = Decoder(config, pattern, rngs=nnx.Rngs(0))
        return model if lora is None else with_lora(model, lora, nnx.Rngs(0))

    flat = nnx.to_flat_state(nnx.state(nnx.eval_shape(draw)))
    return {path: variable.shape for path, variable in flat}


@pytest.mark.parametrize("lora", [None, LORA], ids=["plain", "lora"])
@pytest.mark.parametrize("routed", [False, True], ids=["plain", "routed"])
@pytest.mark.parametrize("name", MODELS)
def test_a_decoder_holds_what_is_declared(name, routed, lora):
    config = MODELS[name]
    rows = list(parameters(config, routed))
    if lora is not None:
        names = {row.projection for row in rows}
        lora = dataclasses.replace(lora, targets=tuple(name for name in lora.targets if name in names))
        rows += [f for row in rows if row.projection in lora.targets for f in low_rank(row, lora.rank)]
    names = [(row.hf_name, layer) for row in rows for layer in row.layers or (None,)]
    assert len({row.path for row in rows}) == len(rows)
    assert len({*names}) == len(names)
    assert leaves(config, routed, lora) == {row.path: row.stacked_shape for row in rows}
    assert all(len(row.shape) == len(row.axes) for row in rows)


def test_parameters_are_drawn_as_is_declared():
    config = MODELS["every bias"]
    model = Decoder(config, AttentionPattern.from_recipe("switch", config), rngs=nnx.Rngs(0))
    attention = model.layers.attention
    np.testing.assert_array_equal(attention.router.proj.bias[...], -2)
    np.testing.assert_array_equal(attention.o_proj.bias[...], 0)
    np.testing.assert_array_equal(model.norm.scale[...], 1)
    assert float(model.embedding[...].std()) == pytest.approx(config.initializer_range, rel=0.1)


# ---- a row that is added is known everywhere ----


@pytest.fixture
def gain(monkeypatch):
    """One more matrix, [d, 41], which no module holds; 41 is `intermediate_size` + 1."""
    layer = declaration._mlp

    def with_gain(config):
        draw = nnx.initializers.normal(0.1)
        shape = (config.hidden_size, config.intermediate_size + 1)
        new = Parameter(
            ("attention", "gain_proj", "kernel"),
            shape,
            ("embed", "mlp"),
            draw,
            "self_attn.gain_proj.weight",
            transposed=True,
            matrix=True,
        )
        return [new, *layer(config)]

    monkeypatch.setattr(declaration, "_mlp", with_gain)
    return ("layers", "attention", "gain_proj", "kernel")


def test_a_new_row_has_names_layout_cost_and_group(gain):
    config, shape = dataclasses.replace(SOFTMAX, vocab_size=60), (4, 24, 41)
    tensors = [tensor for tensor in names.tensor_names(config) if tensor.path == gain]
    assert [tensor.name for tensor in tensors] == [f"model.layers.{i}.self_attn.gain_proj.weight" for i in range(4)]
    assert tensors[3] == (tensors[3].name, (41, 24), gain, (3,), True)
    assert names.expected_tensors(config)["model.layers.0.self_attn.gain_proj.weight"] == (41, 24)

    tree = {"layers": {"attention": {"gain_proj": {"kernel": np.zeros(shape)}, "other": np.zeros(shape)}}}
    places = state_shardings((tree, 0), abstract_partition(fsdp=4), config)[0]["layers"]["attention"]
    assert places["gain_proj"]["kernel"].spec == P(None, ("fsdp", "context"), ("tensor",))
    assert places["other"].spec == P()
    with pytest.raises(ConfigError, match=r"gain_proj.kernel, axis 2 \(mlp\), is 41 long and cannot be split"):
        check_model(config, abstract_partition(tensor=2))

    assert is_matrix(tree, config)["layers"]["attention"] == {"gain_proj": {"kernel": True}, "other": False}
    assert LoraConfig(rank=3).factors(config).keys() == {
        ("layers", "attention", name) for name in ("q_proj", "k_proj", "v_proj")
    }


def test_a_new_row_costs(request):
    before = matrix_parameters(SOFTMAX)
    request.getfixturevalue("gain")
    assert matrix_parameters(SOFTMAX) == before + 4 * 24 * 41


def test_muon_orthogonalises_a_new_row(gain):
    """A direction of the update that is orthogonalised has singular values near 1, a plain Adam step has not."""
    muon = make_optimizer(OptimizerConfig(name="muon", schedule="constant", clip_norm=None), 10, SOFTMAX)
    rng = np.random.default_rng(0)
    tree = {"layers": {"attention": {"gain_proj": {"kernel": rng.normal(size=(4, 24, 41)).astype(np.float32)}}}}
    update, _ = muon.update(tree, muon.init(tree), tree)
    values = np.linalg.svd(jax.tree.leaves(update)[0] / -3e-4, compute_uv=False)
    assert values.shape == (4, 24)
    assert np.ptp(values) / values.mean() < 0.7


def test_muon_takes_matrices_alone():
    state = nnx.state(Decoder(SOFTMAX, AttentionPattern.from_recipe("full", 4), rngs=nnx.Rngs(0)))
    tree = {"model": nnx.to_pure_dict(state), "count": np.zeros(())}
    rows = declaration.map_parameters(lambda row, _: row is not None and row.matrix, tree, declared(SOFTMAX))
    axes = jax.tree.leaves(optimizer._muon_axes(tree, SOFTMAX), is_leaf=lambda x: x is None or isinstance(x, tuple))
    assert [one is not None for one in axes] == jax.tree.leaves(rows)
    assert 0 < sum(jax.tree.leaves(rows)) < len(axes)


def test_a_row_of_experts_is_laid_out_and_orthogonalised_but_has_no_adapter(monkeypatch):
    """An axis in front of a projection is one more axis of its row."""
    draw = nnx.initializers.normal(0.1)
    experts = Parameter(("mlp", "experts", "kernel"), (3, 24, 40), (None, "embed", "mlp"), draw, "x", matrix=True)
    layer = declaration._mlp
    monkeypatch.setattr(declaration, "_mlp", lambda config: [*layer(config), experts])
    shape = (4, 3, 24, 40)  # [L, E, in, out]
    tree = {"layers": {"mlp": {"experts": {"kernel": np.zeros(shape, np.float32)}}}}
    config = dataclasses.replace(SOFTMAX, vocab_size=60)
    (place,) = jax.tree.leaves(state_shardings(tree, abstract_partition(fsdp=4, tensor=2), config))
    assert place.spec == P(None, None, ("fsdp", "context"), ("tensor",))
    axes = optimizer._muon_axes(tree, config)["layers"]["mlp"]["experts"]["kernel"]
    assert (axes.reduction_axis, axes.output_axis) == (2, 3)
    assert len(LoraConfig(targets=tuple(TARGETS)).factors(config)) == 7


# ---- names ----


def test_a_family_renames_tensors(monkeypatch):
    """A family says which names differ from those that are declared."""
    renamed = {"layers.post_attention_norm.scale": "model.layers.{layer}.second_norm.weight"}
    other = dataclasses.replace(FAMILIES["llama"], model_type="other", tensor_names=renamed)
    monkeypatch.setitem(FAMILIES, "other", other)
    theirs = names.expected_tensors(dataclasses.replace(SOFTMAX, model_type="other"))
    ours = names.expected_tensors(SOFTMAX)
    assert theirs.keys() - ours.keys() == {f"model.layers.{i}.second_norm.weight" for i in range(4)}
    assert ours.keys() - theirs.keys() == {f"model.layers.{i}.post_attention_layernorm.weight" for i in range(4)}


@pytest.mark.parametrize(("qk_norm", "written_as"), [(False, "other"), (True, "swat")])
def test_a_checkpoint_has_the_names_of_the_family_that_is_written(qk_norm, written_as, monkeypatch, tmp_path):
    """A family that cannot express the model is not written, and then its names are not either."""
    renamed = {"norm.scale": "model.last_norm.weight"}
    other = dataclasses.replace(FAMILIES["llama"], model_type="other", tensor_names=renamed)
    monkeypatch.setitem(FAMILIES, "other", other)
    config = dataclasses.replace(BYTES, model_type="other", qk_norm=qk_norm)
    pattern = AttentionPattern.from_recipe("window", config)
    model = Decoder(config, pattern, rngs=nnx.Rngs(0))
    folder = save_model(model, tmp_path / "model")
    source = open_checkpoint(folder)
    assert source.config.model_type == written_as
    assert ("model.last_norm.weight" in source.tensors) == (written_as == "other")
    again = load_model(folder)
    np.testing.assert_array_equal(again.norm.scale[...], model.norm.scale[...])
    if written_as == "other":  # Mistral knows the windows, but not these names
        hf, notice = apply_pattern(source.hf_config, pattern)
        assert hf["model_type"] == "other"
        assert "no family with windows" in notice


def test_norms_by_placement():
    """The name before the MLP is another one where attention's output is normed too."""

    def norms(placement):
        config = dataclasses.replace(SOFTMAX, norm_placement=placement, qk_norm_over="projection")
        rows = parameters(config)
        sizes = {row.path[-2]: row.shape for row in rows if {*row.path} & {"q_norm", "k_norm"}}
        assert sizes == {"q_norm": (32,), "k_norm": (16,)}
        first = {row.hf_name.split(".")[3]: row.path[1] for row in rows if "layernorm" in row.hf_name}
        return dict(sorted(first.items()))

    assert norms("pre") == {"input_layernorm": "input_norm", "post_attention_layernorm": "post_attention_norm"}
    outputs = {"post_attention_layernorm": "attention_out_norm", "post_feedforward_layernorm": "mlp_out_norm"}
    assert norms("post") == outputs
    assert norms("sandwich") == outputs | {
        "input_layernorm": "input_norm",
        "pre_feedforward_layernorm": "post_attention_norm",
    }
    assert norms("parallel") == {"input_layernorm": "input_norm"}


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: dataclasses.replace(SOFTMAX, hidden_act="gelu"), "'hidden_act' must be one of silu, gelu_tanh, xielu"),
        (lambda: dataclasses.replace(SOFTMAX, position_embedding="RoPE"), "'position_embedding' must be one of rope"),
        (lambda: RopeScaling("su", 4.0), "'rope_type' must be one of linear, llama3, yarn, longrope, .*, got 'su'"),
    ],
)
def test_a_word_that_a_configuration_does_not_know(make, sentence):
    """Not only in files: nothing may be computed as if it were another word."""
    with pytest.raises(ConfigError, match=sentence):
        make()
