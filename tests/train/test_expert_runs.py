"""Mixtures of experts from the command line: import, generate, train, resume; and what is refused."""

import dataclasses
import shutil

import jax
import numpy as np
import pytest
import yaml
from command_line import fails, run
from flax import nnx
from training_runs import interrupted, losses, read_metrics, text_in

from swa_jax.base.errors import ConfigError
from swa_jax.checkpoint.families import hf_config, hf_pattern, model_config
from swa_jax.checkpoint.folder import load_model, save_model
from swa_jax.checkpoint.hf_export import export_model
from swa_jax.evaluate import Example
from swa_jax.model.decoder import Decoder
from swa_jax.model.window import Window
from swa_jax.select import nll_deltas
from swa_jax.select.static import static_scores

SIZES = {
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 3,
    "num_experts_per_tok": 2,
    "num_local_experts": 4,
    "moe_intermediate_size": 16,
    "initializer_range": 0.1,
    "sliding_window": 8,
}
FAMILIES = {
    "qwen3_moe": {"mlp_only_layers": [1], "norm_topk_prob": True},
    "mixtral": {},
    "gpt_oss": {},
    "mellum": {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
}


@pytest.fixture
def source(tmp_path, byte_tokenizer):
    """`source(family)`: a Hugging Face folder of a small random model."""

    def make(family, **changes):
        hf = {"model_type": family, **SIZES, **FAMILIES[family], **changes}
        config, pattern = model_config(hf), hf_pattern(hf)
        model = Decoder(config, pattern, rngs=nnx.Rngs(0))
        saved = save_model(
            model, tmp_path / "saved", hf_config=hf_config(config, pattern), tokenizer_from=byte_tokenizer.parent
        )
        exported = export_model(saved, tmp_path / "source", canary=False)
        (exported / "pattern.json").unlink()  # as it comes from the hub
        shutil.rmtree(saved)
        return exported

    return make


@pytest.fixture
def settings(tmp_path, byte_tokenizer):
    return {
        "output": str(tmp_path / "run"),
        "tokenizer": str(byte_tokenizer),
        "init_from": str(tmp_path / "model"),
        "checkpoint_every": 3,
        "router_aux_loss_coef": 0.01,
        "optimizer": {"learning_rate": 0.005, "warmup_steps": 2},
        "stages": [{"steps": 12, "sequence_length": 32, "batch_size": 4, "data": text_in(tmp_path)}],
    }


def train(tmp_path, settings):
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    return run("train", tmp_path / "run.yaml")


@pytest.mark.parametrize(
    "family",
    [
        pytest.param("qwen3_moe", marks=pytest.mark.long),
        pytest.param("gpt_oss", marks=pytest.mark.slow),
        pytest.param("mixtral", marks=pytest.mark.long),
        pytest.param("mellum", marks=pytest.mark.long),
    ],
)
def test_from_import_to_a_resumed_run(family, source, settings, tmp_path):
    run("import", source(family), tmp_path / "model")
    before = load_model(tmp_path / "model")
    assert (before.config.model_type, before.config.num_experts) == (family, 4)
    options = ("--max-new-tokens", 5)
    prompt = "One of the special magic numbers"
    output = run("generate", tmp_path / "model", prompt, *options)
    assert run("generate", tmp_path / "model", prompt, *options) == output

    train(tmp_path, settings)
    expected = losses(tmp_path / "run")
    assert np.mean(expected[-2:]) < expected[0] - 0.5
    assert all(0.5 < line["load_balancing_loss"] < 4 for line in read_metrics(tmp_path / "run"))
    again = settings | {"output": str(tmp_path / "again")}
    interrupted(8, train, tmp_path, again)
    train(tmp_path, again)
    assert losses(tmp_path / "again") == expected
    first, second = (load_model(tmp_path / name / "model") for name in ("run", "again"))
    for ours, theirs, old in zip(
        *(jax.tree.leaves(nnx.state(model)) for model in (first, second, before)), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)
        assert not np.array_equal(ours, old)  # every parameter has learned
    assert first.config == before.config
    run("generate", tmp_path / "run" / "model", prompt, *options)


def test_what_a_model_cannot_is_said_in_one_sentence(source, settings, tmp_path):
    run("import", source("qwen3_moe"), tmp_path / "model")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    adapt = ("lora.targets=[q_proj,gate_proj]", "lora.rank=2")
    run_file = tmp_path / "run.yaml"
    mesh = fails("train", run_file, "mesh.expert=3")
    assert mesh.startswith("'mesh' (slices 1, data 1, fsdp -1, expert 3, context 1, tensor 1) asks for a multiple of 3")
    assert "router_aux_loss_coef" in fails("train", run_file, "router_aux_los_coef=1")
    shutil.rmtree(tmp_path / "source")
    run("import", source("mixtral"), tmp_path / "other")
    assert "names 'gate_proj', which a mixtral model does not have" in fails(
        "train", run_file, f"init_from={tmp_path}/other", *adapt
    )
    dense = {key: value for key, value in SIZES.items() if "expert" not in key and "moe" not in key}
    shape = {key: value for key, value in dense.items() if key != "sliding_window"}
    (tmp_path / "dense.yaml").write_text(yaml.safe_dump(settings | {"init_from": None, "model": shape}))
    assert "'router_aux_loss_coef' spreads tokens over experts, which this model does not have" in fails(
        "train", tmp_path / "dense.yaml"
    )


def test_selection_in_models_of_dense_and_sparse_layers():
    """What goes through the layers one by one takes layers that are alike; whole passes serve any model."""
    hf = {"model_type": "qwen3_moe", **SIZES, **FAMILIES["qwen3_moe"], "use_sliding_window": True}
    model = Decoder(model_config(hf), hf_pattern(hf), rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    examples = [Example(rng.integers(257, size=n).tolist(), rng.integers(257, size=2).tolist(), []) for n in (20, 17)]
    whole = nll_deltas(model, examples, Window(4, 1, True), toggles_at_once=0)
    reused = nll_deltas(model, examples, Window(4, 1, True))
    np.testing.assert_array_equal(whole.deltas, reused.deltas)
    assert static_scores(model, examples, "dcam", Window(4)).shape == (3, 2)
    with pytest.raises(ConfigError, match="fisher goes through layers that are all alike"):
        static_scores(model, examples, "fisher", Window(4))
    sinks = dataclasses.replace(model.config, sink_logits=True)
    model = Decoder(sinks, model.pattern, rngs=nnx.Rngs(0))
    with pytest.raises(ConfigError, match="the model gives part of it to sink logits"):
        static_scores(model, examples, "dcam", Window(4))
