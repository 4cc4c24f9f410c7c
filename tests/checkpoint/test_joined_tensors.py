"""Tensors that a family's checkpoints join: cut at import, joined at export, and adapters that follow them."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import swa_jax
from swa_jax.base.errors import CheckpointError
from swa_jax.checkpoint.hf_export import export_model
from swa_jax.checkpoint.hf_import import import_model
from swa_jax.checkpoint.peft import save_adapter
from swa_jax.model.layer_types import FULL, WINDOW
from swa_jax.model.lora import LoraConfig, merge_lora, with_lora
from swa_jax.model.pattern import AttentionPattern

GOLDEN = Path(__file__).parents[1] / "golden"
QKV, GATE_UP = "model.layers.{}.self_attn.qkv_proj.weight", "model.layers.{}.mlp.gate_up_proj.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return swa_jax.load_model(import_model(GOLDEN / "phi3-full", tmp_path_factory.mktemp("phi3") / "model"))


def test_the_rows_are_queries_keys_and_values(model):
    stored = load_file(GOLDEN / "phi3-full" / "model.safetensors")
    assert stored[QKV.format(2)].shape == (36 + 12 + 12, 36)
    attention, mlp = model.layers.attention, model.layers.mlp
    for name, projections in (
        (QKV, (attention.q_proj, attention.k_proj, attention.v_proj)),
        (GATE_UP, (mlp.gate_proj, mlp.up_proj)),
    ):
        rows = np.concatenate([np.asarray(p.kernel[...][2]).T for p in projections])
        np.testing.assert_array_equal(rows, stored[name.format(2)])


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


@pytest.mark.parametrize(
    ("shape", "sentence"),
    [((59, 36), r"has shape \[59, 36\], config.json asks for \[60, 36\]"), (None, "the weights lack tensor '.*qkv")],
)
def test_joined_tensors_are_named_as_they_are_stored(tmp_path, shape, sentence):
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text((GOLDEN / "phi3-full" / "config.json").read_text())
    tensors = load_file(GOLDEN / "phi3-full" / "model.safetensors")
    del tensors[QKV.format(1)]
    if shape is not None:
        tensors[QKV.format(1)] = np.zeros(shape, np.float32)
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(CheckpointError, match=sentence):
        import_model(source, tmp_path / "checkpoint")


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
        parts = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}.get(
            module, (module,)
        )
        after, before = (
            np.concatenate(
                [
                    np.asarray(getattr(layers.attention if place == "self_attn" else layers.mlp, p).kernel[...][1]).T
                    for p in parts
                ]
            )
            for layers in (merged, model.layers)
        )
        np.testing.assert_allclose(change, after - before, atol=1e-5)
        assert np.abs(change).max() > 0.1
    assert not [name for name in tensors if ".layers.1." in name]


def test_the_experts_of_a_layer_in_one_tensor_are_cut_and_joined(tmp_path):
    source = GOLDEN / "granitemoe-swa-hybrid"
    stored = load_file(source / "model.safetensors")
    checkpoint = import_model(source, tmp_path / "checkpoint")
    experts = swa_jax.load_model(checkpoint).layers.experts
    name = "model.layers.2.block_sparse_moe.experts.{}"
    gate, up = np.split(stored[name.format("gate_up_proj")], 2, axis=1)  # [E, f, d]
    np.testing.assert_array_equal(np.swapaxes(experts.gate_proj.kernel[...][2], 1, 2), gate)
    np.testing.assert_array_equal(np.swapaxes(experts.up_proj.kernel[...][2], 1, 2), up)
    down = stored[name.format("down_proj")]
    np.testing.assert_array_equal(np.swapaxes(experts.down_proj.kernel[...][2], 1, 2), down)
    exported = export_model(checkpoint, tmp_path / "exported", canary=False)
    again = load_file(exported / "model.safetensors")
    assert again.keys() == stored.keys()
    for tensor, values in stored.items():
        np.testing.assert_array_equal(again[tensor], values, tensor)
    save_file({**stored, name.format("down_proj"): down[:4]}, exported / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"down_proj' in model.safetensors has shape \[4, 36, 16\].* \[5, 36, 16\]"
    ):
        import_model(exported, tmp_path / "misshapen")
