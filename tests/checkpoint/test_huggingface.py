"""Import and export of Hugging Face models: what is read, what is refused and in which words."""

import json
import re
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import tokenizers
from golden_models import GOLDEN, MODELS, bits_of, change_json, contents, files_of, hf_of, tensors_of, write_folder
from safetensors.numpy import load_file, save_file
from tokenizers import models

import swa_jax
from swa_jax.base.errors import ConfigError
from swa_jax.checkpoint import folder as checkpoint_module
from swa_jax.checkpoint import safetensors_files as weights
from swa_jax.checkpoint.hf_export import export_model
from swa_jax.checkpoint.hf_import import import_model
from swa_jax.checkpoint.safetensors_files import write_model
from swa_jax.model.layer_types import FULL, SWITCH, WINDOW
from swa_jax.model.pattern import AttentionPattern

HF, TENSORS = hf_of("qwen2-full"), tensors_of("qwen2-full")
Q_WEIGHT = "model.layers.1.self_attn.q_proj.weight"


def assert_refused(source: Path | str, destination: Path, sentence: str, **options) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        import_model(source, destination, **options)
    assert "\n" not in str(caught.value)
    assert not destination.parent.exists()  # nothing was written, not even a folder to write into


# ---- import: refusals, each before anything is written ----


QKV, EPS = "model.layers.1.self_attn.qkv_proj.weight", "model.layers.2.mlp.act_fn.eps"
REFUSED = {
    "qwen2-full": [
        (
            {"model.layers.1.self_attn.q_proj.weigth": np.zeros(3, np.float32)},
            "model.safetensors holds tensor 'model.layers.1.self_attn.q_proj.weigth', which a qwen2 model .*"
            f"did you mean '{Q_WEIGHT}'",
        ),
        ({"zzz": np.zeros(3, np.float32)}, "'zzz', which a qwen2 model with this config.json does not have$"),
        ({Q_WEIGHT: None}, f"the weights lack tensor '{Q_WEIGHT}'; config.json asks for 50 tensors in 4 layers"),
        ({Q_WEIGHT: None, "model.norm.weight": None}, f"lack tensor '{Q_WEIGHT}' and 1 more"),
        ({"model.embed_tokens.weight": None}, "lack tensor 'model.embed_tokens.weight'"),
        (
            {Q_WEIGHT: np.zeros((36, 37), np.float32)},
            rf"'{Q_WEIGHT}' in model.safetensors has shape \[36, 37\], config.json asks for \[36, 36\]",
        ),
        ({Q_WEIGHT: np.zeros((36, 36), np.float64)}, f"'{Q_WEIGHT}' .* has dtype F64; supported: F32, F16, BF16"),
        ({Q_WEIGHT: np.zeros((36, 36), np.int8)}, "has dtype I8"),
        (
            {"lm_head.weight": np.zeros((131, 36), np.float32)},
            "ties the embeddings .* 'lm_head.weight' differs .* set tie_word_embeddings to false",
        ),
        (
            {"model.layers.0.self_attn.router.proj.weight": np.zeros((1, 36), np.float32)},
            r"lack tensor 'model.layers.\d.self_attn.router.proj.\w+' and 6 more",
        ),
    ],
    "phi3-full": [  # joined tensors are named as they are stored
        ({QKV: np.zeros((59, 36), np.float32)}, r"has shape \[59, 36\], config.json asks for \[60, 36\]"),
        ({QKV: None}, "the weights lack tensor '.*qkv"),
    ],
    "apertus-full": [  # numbers that the decoder knows
        ({EPS: np.asarray(-1e-5, np.float32)}, f"'{EPS}' in model.safetensors is -1e-05; supported: -1e-06, as in all"),
        ({EPS: np.full(1, -1e-6, np.float32)}, r"act_fn.eps' .* has shape \[1\], config.json asks for \[\]"),
        ({EPS: np.asarray(-1, np.int32)}, "act_fn.eps' in model.safetensors has dtype I32"),
        ({EPS: None}, f"the weights lack tensor '{EPS}'"),
    ],
}


@pytest.mark.parametrize(
    ("model", "changes", "sentence"), [(model, *row) for model, rows in REFUSED.items() for row in rows]
)
def test_tensors_that_do_not_fit_are_refused(tmp_path, destination, model, changes, sentence):
    assert_refused(write_folder(tmp_path / "source", hf_of(model), tensors_of(model) | changes), destination, sentence)


def test_configurations_and_patterns_that_do_not_fit_are_refused(source, destination):
    assert_refused(source, destination, "pattern has 2 layers, the model 4", pattern=AttentionPattern((FULL,) * 2))
    assert_refused(
        source, destination, "'widow' is neither a recipe nor a .json file; did you mean 'window'?", pattern="widow"
    )
    change_json(source / "config.json", model_type="mamba")
    assert_refused(source, destination, "model_type 'mamba' is not supported")
    (source / "config.json").write_text("{")
    assert_refused(source, destination, "config.json is not valid JSON")
    (source / "config.json").unlink()
    assert_refused(source, destination, "holds no config.json: it is not a Hugging Face model")
    (source / "model").mkdir()
    (source / "model" / "config.json").write_text("{}")  # as in the folder of a training run
    assert_refused(source, destination, f"; give the model in it: {source}/model")


def test_weights_that_are_no_safetensors_are_refused(source, destination):
    file = source / "model.safetensors"
    whole = file.read_bytes()
    for damaged in (whole[:-1], whole[:100], b"version https://git-lfs.github.com/spec/v1\n", b""):
        file.write_bytes(damaged)
        assert_refused(source, destination, "model.safetensors is not a complete safetensors file.* fetch it again")
    file.rename(source / "consolidated.safetensors")
    assert_refused(source, destination, "holds consolidated.safetensors, but neither model.safetensors or")
    (source / "consolidated.safetensors").rename(source / "pytorch_model.bin")
    assert_refused(source, destination, r"holds pickled weights only \(pytorch_model.bin\), which are never read")
    (source / "pytorch_model.bin").unlink()
    assert_refused(source, destination, "holds no weights: expected model.safetensors")


def test_shards_and_their_index_must_agree(tmp_path, destination):
    source = shutil.copytree(GOLDEN / "qwen3-full", tmp_path / "source")
    index, shard = source / weights.INDEX_FILE, source / "model-00002-of-00003.safetensors"
    places = json.loads(index.read_text())
    shard.rename(source / "elsewhere")
    assert_refused(source, destination, "index.json names the shard model-00002-of-00003.safetensors, which is not in")
    (source / "elsewhere").rename(shard)
    save_file(load_file(shard) | {"model.norm.weight": np.ones(36, np.float32)}, shard)
    assert_refused(source, destination, "tensor model.norm.weight is stored twice")
    kept = {name: array for name, array in load_file(shard).items() if name != "model.norm.weight"}
    lost = sorted(kept)[0]
    save_file({name: array for name, array in kept.items() if name != lost}, shard)
    assert_refused(source, destination, f"places tensor .{re.escape(lost)}. in {shard.name}, which does not hold it")
    index.write_text(json.dumps(places | {"weight_map": {lost: "../model.safetensors"}}))
    assert_refused(source, destination, "a shard must lie beside its index")
    index.write_text("[]")
    assert_refused(source, destination, "index.json must hold a JSON object")
    index.write_text('{"weight_map": []}')
    assert_refused(source, destination, "is not a safetensors index")


def test_a_destination_in_use_is_refused(source, destination):
    destination.mkdir(parents=True)
    (destination / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is there already: name a new folder"):
        import_model(source, destination)
    assert [file.name for file in destination.iterdir()] == ["notes.txt"]
    (destination / "notes.txt").unlink()
    swa_jax.load_model(import_model(source, destination))  # an empty folder will do
    with pytest.raises(ConfigError, match="is already a checkpoint folder of this library"):
        import_model(destination, destination.with_name("other"))


# ---- import: what arrives ----


def test_an_import_keeps_config_pattern_and_tokenizer(source, destination):
    change_json(source / "config.json", a_key_of_its_own={"x": [1, None]})
    words = models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>")
    tokenizers.Tokenizer(words).save(str(source / "tokenizer.json"))
    (source / "merges.txt").write_text("a b")
    assert import_model(source, str(destination), pattern="interleave-1-in-2") == destination
    assert json.loads((destination / "config.json").read_text()) == json.loads((source / "config.json").read_text())
    pattern = AttentionPattern.from_json(destination / "pattern.json")
    assert pattern.full_layers == (1, 3)
    assert swa_jax.load_model(destination).pattern == pattern
    assert sorted(file.name for file in destination.iterdir()) == [
        "config.json",
        "generation_config.json",
        "manifest.json",
        "merges.txt",
        "pattern.json",
        "tokenizer.json",
        "weights",
    ]
    assert [file.name for file in destination.parent.iterdir()] == ["checkpoint"]


def test_what_names_code_that_is_not_copied_is_left_out(source, destination):
    change_json(source / "config.json", auto_map={"AutoModelForCausalLM": "modeling_qwen2.Qwen2ForCausalLM"})
    assert "auto_map" not in json.loads((import_model(source, destination) / "config.json").read_text())


def test_redundant_tensors_are_left_out(source, destination):
    head, buffer = TENSORS["model.embed_tokens.weight"], np.zeros(3, np.float32)
    more = {"lm_head.weight": head, "model.layers.2.self_attn.rotary_emb.inv_freq": buffer}
    import_model(write_folder(source, HF, TENSORS | more), destination)
    assert contents(destination).keys() == TENSORS.keys()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_weights_stay_as_they_are(source, destination, dtype):
    original = {name: array.astype(dtype) for name, array in TENSORS.items()}
    import_model(write_folder(source, HF, original), destination)
    assert bits_of(contents(destination)) == bits_of(original)
    model = swa_jax.load_model(destination)
    assert model.embedding[...].dtype == model.layers.attention.q_proj.kernel[...].dtype == dtype
    kernel = original[Q_WEIGHT].T
    np.testing.assert_array_equal(np.asarray(model.layers.attention.q_proj.kernel[...])[1], kernel)


# ---- export ----


FAST = {"qwen3-full", "cohere2-hybrid", "phi3-window", "apertus-full"}
FAST |= {"qwen3-moe-window", "gpt-oss-hybrid", "granitemoe-swa-hybrid"}


@pytest.mark.parametrize("case", [c if c in FAST else pytest.param(c, marks=pytest.mark.slow) for c in MODELS])
def test_export_gives_back_what_was_imported(tmp_path, case):
    """From the model in memory too, where layers and experts are stacked."""
    checkpoint = import_model(GOLDEN / case, tmp_path / "checkpoint")
    saved = checkpoint_module.save_model(swa_jax.load_model(checkpoint), tmp_path / "saved", hf_config=hf_of(case))
    exported, other = (export_model(c, tmp_path / f"of {c.name}", canary=False) for c in (checkpoint, saved))
    original = bits_of(tensors_of(case))
    assert bits_of(tensors_of(exported)) == bits_of(tensors_of(other)) == original
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (GOLDEN / case, exported))
    for key in ("max_window_layers", "sliding_window_pattern"):
        before.pop(key, None)  # `layer_types` says it in full
    assert {key: after[key] for key in before} == before
    second = export_model(import_model(exported, tmp_path / "checkpoint2"), tmp_path / "exported2", canary=False)
    assert files_of(second) == files_of(exported)


def test_an_export_names_its_class_though_its_source_does_not(tmp_path):
    """As a GGUF file does not: vLLM then takes a model for one of embeddings."""
    folder = shutil.copytree(GOLDEN / "gemma3-hybrid", tmp_path / "hf")
    config = {key: value for key, value in hf_of("gemma3-hybrid").items() if key != "architectures"}
    (folder / "config.json").write_text(json.dumps(config))
    exported = export_model(import_model(folder, tmp_path / "ours"), tmp_path / "exported", canary=False)
    assert json.loads((exported / "config.json").read_text())["architectures"] == ["Gemma3ForCausalLM"]


def test_export_in_shards(tmp_path, monkeypatch):
    checkpoint = import_model(GOLDEN / "qwen3-hybrid", tmp_path / "checkpoint")
    monkeypatch.setattr(swa_jax.checkpoint.hf_export, "SHARD_BYTES", 60_000)
    exported = export_model(checkpoint, tmp_path / "exported", canary=False)
    index = json.loads((exported / "model.safetensors.index.json").read_text())
    shards = sorted(exported.glob("model-*.safetensors"))
    assert len(shards) > 3
    assert {shard.name for shard in shards} == set(index["weight_map"].values())
    assert all(sum(a.nbytes for a in load_file(shard).values()) <= 60_000 for shard in shards)
    original = tensors_of("qwen3-hybrid")
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in original.values())
    assert bits_of(tensors_of(exported)) == bits_of(original)
    swa_jax.load_model(import_model(exported, tmp_path / "again"))


def test_a_pattern_that_the_family_cannot_say_goes_out_apart(tmp_path, caplog):
    """Phi-3 knows one window for all layers. Ministral computes the same and knows layer types, with tensors apart."""
    pattern = AttentionPattern((FULL, WINDOW, WINDOW, FULL), 8)
    checkpoint = import_model(GOLDEN / "phi3-full", tmp_path / "checkpoint", pattern=pattern)
    exported = export_model(checkpoint, tmp_path / "exported", canary=False)
    assert "model_type changed from phi3 to ministral" in caplog.text
    assert json.loads((exported / "config.json").read_text())["model_type"] == "ministral"
    assert bits_of(tensors_of(exported)) == bits_of(contents(checkpoint))  # nothing is joined
    assert checkpoint_module.open_checkpoint(import_model(exported, tmp_path / "again")).pattern == pattern


def test_a_pattern_hugging_face_cannot_express_survives(tmp_path, caplog):
    pattern = AttentionPattern((WINDOW, SWITCH, FULL, WINDOW), 8, num_sink_tokens=2, provenance={"method": "by hand"})
    model = swa_jax.load_model(import_model(GOLDEN / "qwen3-full", tmp_path / "plain"), pattern)
    checkpoint = checkpoint_module.save_model(model, tmp_path / "checkpoint")
    exported = export_model(checkpoint, tmp_path / "exported", canary=False)
    assert "Hugging Face cannot express this pattern (it routes tokens)" in caplog.text
    hf = json.loads((exported / "config.json").read_text())
    assert hf["layer_types"] == [FULL] * 4
    again = swa_jax.load_model(import_model(exported, tmp_path / "again"))
    assert again.pattern == pattern
    assert again.pattern.provenance == pattern.provenance
    kernels = [np.asarray(m.layers.attention.router.proj.kernel[...]) for m in (model, again)]
    np.testing.assert_array_equal(*kernels)


def test_mixed_dtypes_are_exported_aligned(source, tmp_path):
    mixed = {name: a if "norm" in name else a.astype(np.float16) for name, a in TENSORS.items()}
    write_folder(source, HF, mixed)
    exported = export_model(import_model(source, tmp_path / "checkpoint"), tmp_path / "exported", canary=False)
    assert bits_of(tensors_of(exported)) == bits_of(mixed)
    assert swa_jax.load_model(tmp_path / "checkpoint").layers.mlp.up_proj.kernel[...].dtype == np.float32


def test_every_tensor_begins_at_a_multiple_of_its_items(tmp_path):
    arrays = {"odd": np.arange(3, dtype=np.float16), "wide": np.arange(2, dtype=np.float32)}
    tensors = {name: (array.dtype, array.shape) for name, array in arrays.items()}
    write_model(tmp_path, tensors, lambda names: [(name, arrays[name]) for name in names], shard_bytes=10**9)
    data = (tmp_path / "model.safetensors").read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    for name, array in arrays.items():
        assert header[name]["data_offsets"][0] % array.itemsize == 0
    for name, array in load_file(tmp_path / "model.safetensors").items():
        np.testing.assert_array_equal(array, arrays[name])
