"""Language models in folders that hold more, or that name their tensors otherwise."""

import json
from pathlib import Path

import numpy as np
import pytest
from golden_models import GOLDEN, bits_of, contents, hf_of, tensors_of, write_folder

from swa_jax.base.errors import CheckpointError, ConfigError
from swa_jax.checkpoint.families import model_config
from swa_jax.checkpoint.families.text_part import text_config
from swa_jax.checkpoint.folder import open_checkpoint
from swa_jax.checkpoint.hf_export import export_model
from swa_jax.checkpoint.hf_import import import_model
from swa_jax.checkpoint.safetensors_files import read_headers

HEAD = "lm_head.weight"
SPELLINGS = {  # of the names in front, and of the head
    "as transformers writes it": ("language_model.model.", "language_model.lm_head.weight", ""),
    "as it names the modules": ("model.language_model.", HEAD, "model."),
}


def same_checkpoint(one: Path, other: Path) -> bool:
    first, second = open_checkpoint(one), open_checkpoint(other)
    alike = (first.config, first.pattern) == (second.config, second.pattern)
    return alike and bits_of(contents(one)) == bits_of(contents(other))


def whole_model(path: Path, kind: str, model: str, spelling: str) -> Path:
    """A golden as the language model of a model for images, with a vision tower and a projector beside it."""
    front, head, of_others = SPELLINGS[spelling]
    other = np.ones((3, 2), np.float32)
    tensors = {
        (head if name == HEAD else front + name.removeprefix("model.")): tensor
        for name, tensor in tensors_of(model).items()
    } | {f"{of_others}{name}.weight": other for name in ("vision_tower.a", "vision_tower.b", "multi_modal_projector.c")}
    inner = hf_of(model)
    said = {"dtype": inner.pop("dtype"), "eos_token_id": [1, 106], "tie_word_embeddings": True}
    del inner["architectures"]
    return write_folder(path, {"model_type": kind, "text_config": inner, "vision_config": {}, **said}, tensors)


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize(("kind", "model"), [("gemma3", "gemma3-hybrid"), ("mistral3", "mistral-full")])
def test_the_language_model_of_a_model_for_images(tmp_path, kind, model, spelling):
    notes: list[str] = []
    source = whole_model(tmp_path / "whole", kind, model, spelling)
    imported = import_model(source, tmp_path / "imported", describe=notes.append)
    assert [note for note in notes if "left out" in note] == [
        f"only the language model of this {kind} model is imported; left out: multi_modal_projector (1 tensors), "
        "vision_tower (2 tensors)"
    ]
    alone = import_model(GOLDEN / model, tmp_path / "alone")
    assert same_checkpoint(imported, alone)
    # What is exported is the language model alone, with what was said once for the whole.
    exported = export_model(imported, tmp_path / "exported", canary=False)
    assert set(read_headers(exported)) == set(read_headers(GOLDEN / model))
    hf = json.loads((exported / "config.json").read_text())
    assert (hf["model_type"], hf["architectures"]) == (hf_of(model)["model_type"], hf_of(model)["architectures"])
    assert (hf["eos_token_id"], hf["dtype"], "vision_config" in hf) == ([1, 106], "float32", False)


def test_the_language_model_of_a_hybrid_for_images(tmp_path):
    model = "linear/qwen3-5-four"
    imported = import_model(
        whole_model(tmp_path / "whole", "qwen3_5", model, "as it names the modules"), tmp_path / "imported"
    )
    assert same_checkpoint(imported, import_model(GOLDEN / model, tmp_path / "alone"))


def test_gemma_3_4b_says_little_of_its_language_model():
    """Its text_config as released; the rest is the defaults of transformers' class."""
    inner = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    config = model_config(text_config({"model_type": "gemma3", "text_config": inner}))
    sizes = config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.vocab_size
    assert (*sizes, config.max_position_embeddings) == (8, 4, 256, 262208, 131072)
    assert (config.rope_theta, config.local_rope_theta, config.rope_scaling.factor) == (1e6, 1e4, 8.0)


@pytest.mark.parametrize(
    ("hf", "sentence"),
    [
        ({"model_type": "gemma3"}, "text_config must be a mapping in a gemma3 model, got 'None'"),
        (
            {"model_type": "mistral3", "text_config": {"model_type": "mistral4"}},
            "text_config.model_type 'mistral4' is not supported; supported: afmoe",
        ),
        ({"model_type": "mistral3", "text_config": {"model_type": []}}, r"text_config.model_type '\[\]' is not"),
    ],
)
def test_what_a_model_for_images_must_say(hf, sentence):
    with pytest.raises(ConfigError, match=sentence):
        text_config(hf)
    assert text_config({"model_type": "llama", "text_config": {}}) is None


@pytest.mark.parametrize("model", ["qwen3-hybrid", "qwen3-full", "phi3-full"])
def test_names_without_the_module_in_front(tmp_path, model):
    """As Qwen3-Embedding is stored: without an output matrix, also where the embeddings are not tied."""
    tensors = {name.removeprefix("model."): t for name, t in tensors_of(model).items() if name != HEAD}
    notes: list[str] = []
    source = write_folder(tmp_path / "base", hf_of(model), tensors)
    imported = import_model(source, tmp_path / "imported", describe=notes.append)
    said = "the weights have no output matrix (lm_head.weight): they are of a model that gives hidden states"
    noted = [note.split(";")[0] for note in notes if "output matrix" in note]
    assert noted == ([] if hf_of(model)["tie_word_embeddings"] else [said])
    tied_hf = hf_of(model) | {"tie_word_embeddings": True}
    alone = write_folder(tmp_path / "alone", tied_hf, tensors_of(model) | {HEAD: None})
    assert same_checkpoint(imported, import_model(alone, tmp_path / "other"))
    assert import_model(source, tmp_path / "imported") == tmp_path / "imported"  # known as done already


def test_what_is_missing_is_named_as_elsewhere(tmp_path):
    whole = {"model_type": "gemma3", "text_config": hf_of("gemma3-hybrid")}
    tensors = {name.removeprefix("model."): t for name, t in tensors_of("qwen3-hybrid").items()}
    for hf, held, sentence in (
        (whole, {"vision_tower.a": np.ones(3, np.float32)}, r"no tensor language_model\.model\.embed_tokens\.weight"),
        (hf_of("qwen3-hybrid"), tensors | {"layers.3.mlp.up_proj.weight": None}, "lack tensor 'model.layers.3.mlp.up"),
    ):
        with pytest.raises(CheckpointError, match=sentence):
            import_model(write_folder(tmp_path / "source", hf, held), tmp_path / "imported")
