"""Tensors that a family's checkpoints join: cut at import, joined at export, and adapters that follow them."""

import json

import jax
import numpy as np
import pytest
from flax import nnx
from golden_models import GOLDEN
from safetensors.numpy import load_file

import swa_jax
from swa_jax.checkpoint.hf_export import export_model
from swa_jax.checkpoint.hf_import import import_model
from swa_jax.checkpoint.peft import save_adapter
from swa_jax.model.layer_types import FULL, WINDOW
from swa_jax.model.lora import LoraConfig, merge_lora, with_lora
from swa_jax.model.pattern import AttentionPattern

QKV = "model.layers.{}.self_attn.qkv_proj.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return swa_jax.load_model(import_model(GOLDEN / "phi3-full", tmp_path_factory.mktemp("phi3") / "model"))


def test_a_pattern_that_the_family_cannot_say_goes_out_apart(tmp_path, caplog):
    """Phi-3 knows one window for all layers. Ministral computes the same and knows layer types, with tensors apart."""
    pattern = AttentionPattern((FULL, WINDOW, WINDOW, FULL), 8)
    checkpoint = import_model(GOLDEN / "phi3-full", tmp_path / "checkpoint", pattern=pattern)
    exported = export_model(checkpoint, tmp_path / "exported", canary=False)
    assert "model_type changed from phi3 to ministral" in caplog.text
    assert json.loads((exported / "config.json").read_text())["model_type"] == "ministral"
    tensors = load_file(exported / "model.safetensors")
    assert QKV.format(0) not in tensors
    assert tensors["model.layers.0.self_attn.k_proj.weight"].shape == (12, 36)
    again = swa_jax.load_model(import_model(exported, tmp_path / "again"))
    first = swa_jax.load_model(checkpoint)
    assert again.pattern.layer_types == pattern.layer_types
    jax.tree.map(np.testing.assert_array_equal, nnx.state(again), nnx.state(first))


def rows_of(module, layers):
    """The rows of a module of Hugging Face's, in layer 1."""
    parts = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}.get(
        module, (module,)
    )
    owner = layers.mlp if module == "gate_up_proj" else layers.attention
    return np.concatenate([np.asarray(getattr(owner, part).kernel[...])[1].T for part in parts])


@pytest.mark.parametrize("rs_lora", [False, True])
@pytest.mark.parametrize("targets", [("q_proj", "v_proj", "o_proj"), ("up_proj", "k_proj")])
def test_adapters_of_joined_tensors_are_one(model, tmp_path, targets, rs_lora):
    """PEFT adds alpha / r (or alpha / sqrt(r)) * B A to the joined matrix: that must be what `merge_lora` adds."""
    config = LoraConfig(rank=3, alpha=6.0, targets=targets, rs_lora=rs_lora)
    adapted = with_lora(model, config, nnx.Rngs(1))
    for i, name in enumerate(targets):
        part = adapted.layers.mlp if name == "up_proj" else adapted.layers.attention
        projection = getattr(part, name)
        projection.lora_b[...] = jax.random.normal(jax.random.key(i), projection.lora_b.shape)
    folder = save_adapter(adapted, tmp_path / "adapter")
    settings = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    modules = {"q_proj": "qkv_proj", "v_proj": "qkv_proj", "k_proj": "qkv_proj", "up_proj": "gate_up_proj"}
    assert set(settings["target_modules"]) == {modules.get(name, name) for name in targets}
    merged = merge_lora(adapted).layers
    for module in settings["target_modules"]:
        place = "mlp" if module == "gate_up_proj" else "self_attn"
        prefix = f"base_model.model.model.layers.1.{place}.{module}"
        a, b = tensors.pop(f"{prefix}.lora_A.weight"), tensors.pop(f"{prefix}.lora_B.weight")
        rank = settings["rank_pattern"].get(module, settings["r"])
        alpha = settings["alpha_pattern"].get(module, settings["lora_alpha"])
        assert (a.shape[0], b.shape[1]) == (rank, rank)
        change = alpha / (np.sqrt(rank) if rs_lora else rank) * b @ a
        np.testing.assert_allclose(change, rows_of(module, merged) - rows_of(module, model.layers), atol=1e-5)
        assert np.abs(change).max() > 0.1
    assert not [name for name in tensors if ".layers.1." in name]
