"""A model by any of its names, and adapters merged onto their base."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from command_line import fails, run
from fake_hub import in_cache
from gguf_files import write_gguf
from golden_models import GOLDEN, change_json, contents, logits
from huggingface_hub import constants
from safetensors.numpy import load_file, save_file

import swa_jax
from swa_jax.base.errors import ConfigError
from swa_jax.checkpoint.hf_import import import_model
from swa_jax.checkpoint.named import bundled, model_folder

ROOT = Path(__file__).parents[2]
ADAPTERS = Path(__file__).with_name("peft_adapters")
CASES = sorted(folder.name for folder in ADAPTERS.iterdir())


@pytest.fixture(autouse=True)
def places(tmp_path, monkeypatch):
    """Caches of our own, and the folder that the adapters' bases are named from."""
    monkeypatch.setenv("SWA_JAX_CACHE", str(tmp_path / "ours"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(ROOT)


def test_every_name_of_a_model_gives_the_same_model(tmp_path):
    golden = GOLDEN / "gemma3-hybrid"
    in_cache(Path(constants.HF_HUB_CACHE), golden, "someone/small")
    (tmp_path / "parts").mkdir()
    write_gguf(tmp_path / "parts" / "a.gguf", golden, split_tensors=20)
    names = [import_model(golden, tmp_path / "checkpoint"), golden, "tests/golden/gemma3-hybrid", "someone/small"]
    tokens = load_file(golden / "golden.safetensors")["tokens"]
    expected = logits(swa_jax.load_model(names[0]), tokens)
    for name in names[1:]:
        np.testing.assert_array_equal(logits(swa_jax.load_model(name), tokens), expected)
    parts = sorted((tmp_path / "parts").glob("*.gguf"))
    assert len(parts) > 2
    for part in parts:
        np.testing.assert_allclose(logits(swa_jax.load_model(part), tokens), expected, atol=1e-5)
    made = sorted(folder.name[:-13] for folder in (tmp_path / "ours" / "models").iterdir())
    # The folder's two names are one content, and so are the parts of a split file.
    assert made == ["a", "gemma3-hybrid", "someone--small"]
    assert model_folder("recall").name.startswith("recall-")
    names = ("recall", "swa_jax/recall", "swa_jax/recall/tokenizer.json")
    assert len({tuple(swa_jax.load_tokenizer(name).encode("a text")) for name in names}) == 1


def test_what_is_imported_is_kept_until_its_content_changes(tmp_path):
    source, said = tmp_path / "model", []
    shutil.copytree(GOLDEN / "llama-plain", source)
    first = model_folder(source, said.append)
    assert said == [f"importing {source} into {first}", said[-1]]
    assert "takes token ids only" in said[-1]
    for file in source.iterdir():
        os.utime(file, (1, 1))  # another time, the same content
    assert model_folder(source, said.append) == first
    shutil.copytree(source, tmp_path / "elsewhere" / "model")
    assert model_folder(tmp_path / "elsewhere" / "model", said.append) == first
    assert len(said) == 2
    weights = load_file(source / "model.safetensors")
    save_file(weights | {"model.norm.weight": 2 * weights["model.norm.weight"]}, source / "model.safetensors")
    changed = model_folder(source, said.append)
    assert changed != first
    assert len(said) == 4
    np.testing.assert_array_equal(contents(changed)["model.norm.weight"], 2 * weights["model.norm.weight"])


@pytest.mark.parametrize("name", ["nowhere", "./no/where", "nothing.gguf", "/absent/model"])
def test_what_is_no_model_is_told_what_is_one(name):
    with pytest.raises(ConfigError, match=rf"^{name} is no model: give a checkpoint folder, .* chains or recall$"):
        model_folder(name)
    with pytest.raises(ConfigError, match=r"^chain is no model; did you mean 'chains'\?$"):
        model_folder("chain")
    weights = bundled("recall") / "model.safetensors"
    with pytest.raises(ConfigError, match=f"{weights} is one file of a model: give its folder, {weights.parent}$"):
        model_folder(weights)
    with pytest.raises(ConfigError, match=r"^dtype must be a floating-point type such as .*, got 'int32'$"):
        swa_jax.load_model("recall", dtype="int32")
    assert "bring it there with 'hf download Qwen/Qwen3-0.6B'" in fails("generate", "Qwen/Qwen3-0.6B", "a")


def test_commands_take_any_name(tmp_path):
    said = run("pattern", "window", "--window", 8, "--model", "recall")
    assert "importing recall into" in said or "key/value cache" in said
    assert "key/value cache" in run("pattern", "window", "--window", 8, "--model", ADAPTERS / "joined")
    run("import", ADAPTERS / "plain", tmp_path / "merged")
    run("export", "tests/golden/qwen3-hybrid", tmp_path / "back", "--no-canary")
    for name in ("merged", "back"):
        assert swa_jax.load_model(tmp_path / name).config == swa_jax.load_model("tests/golden/qwen3-hybrid").config


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("select", "nll", "recall", "--budget", 1),
        ("select", "nll-heads", "recall", "--ratio", 0.75),
        ("select", "kl", "recall", "--ratio", 0.75),
        ("select", "bosch", "recall", "--ratio", 0.75, "--iterations", 1),
        ("compare", "recall", "--method", "random-heads", "--held-out", 2),
        ("evaluate", "needles", "recall", "--pattern", "window"),
    ],
    ids=lambda words: " ".join(map(str, words[:2])),
)
def test_commands_read_a_model_by_its_name_to_the_end(words, tmp_path):
    out = () if words[0] == "evaluate" else ("--out", tmp_path / "out.json", "--force")
    said = run(*words, "--window", 48, "--examples", 2, "--length", 256, *out)
    assert "window" in said if words[0] == "evaluate" else (tmp_path / "out.json").stat().st_size > 0


# ---- adapters: `python -m scripts.goldens adapters` ----


@pytest.mark.parametrize("case", CASES)
def test_adapters_that_peft_wrote_are_merged_as_peft_computes(case):
    stored = np.load(ADAPTERS / case / "logits.npz")
    found = logits(swa_jax.load_model(ADAPTERS / case), stored["tokens"])
    np.testing.assert_allclose(found, stored["logits"], atol=1e-4)
    base = json.loads((ADAPTERS / case / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert np.abs(logits(swa_jax.load_model(base), stored["tokens"]) - found).max() > 0.1


def damaged(tmp_path, settings=None, tensors=None):
    folder = tmp_path / "adapter"
    shutil.copytree(ADAPTERS / "plain", folder)
    change_json(folder / "adapter_config.json", **(settings or {}))
    if tensors is not None:
        file = folder / "adapter_model.safetensors"
        save_file(tensors(load_file(file)), file)
    return folder


QUERY = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("settings", "tensors", "sentence"),
    [
        ({"peft_type": "IA3"}, None, "peft_type is 'IA3'; supported: LORA"),
        ({"use_dora": True}, None, "use_dora is set, which is not supported"),
        ({"a_setting_of_later": {"a": 1}}, None, "a_setting_of_later is set, which is not supported"),
        ({"init_lora_weights": "pissa"}, None, "init_lora_weights is 'pissa', which may change the base's own weights"),
        ({"bias": "all"}, None, "bias is 'all'; supported: 'none'"),
        ({"lora_alpha": "much"}, None, "lora_alpha must be a number, got 'much'"),
        ({"alpha_pattern": [1]}, None, r"adapter_config.json: alpha_pattern must map .*, got \[1\]"),
        ({"alpha_pattern": {"q_proj(": 3}}, None, r"config.json: alpha_pattern 'q_proj\(' is no regular expression: "),
        ({"base_model_name_or_path": None}, None, "has no base_model_name_or_path"),
        ({"base_model_name_or_path": "nowhere"}, None, "the base of .* nowhere is no model"),
        ({"base_model_name_or_path": "tests/golden/llama-plain"}, None, "which do not fit the base's"),
        ({}, lambda found: {}, "holds no adapters"),
        ({}, lambda found: found | {f"{QUERY}.lora_B.weight": np.full((96, 4), np.nan, np.float32)}, "NaN or infinity"),
        ({}, lambda found: found | {f"{QUERY}.lora_B.weight": np.ones((7, 4), np.float32)}, "q_proj has A .* and B"),
        ({}, lambda found: {n: t for n, t in found.items() if n != f"{QUERY}.lora_A.weight"}, r"q_proj \(B\)"),
        ({}, lambda found: found | {f"{QUERY}.lora_magnitude_vector": np.ones(9, np.float32)}, "lora_magnitude_vector"),
        ({}, lambda found: found | {"base_model.model.visual.weight": np.ones((2, 2), np.float32)}, "adapts visual"),
    ],
)
def test_adapters_that_cannot_be_merged_are_one_sentence(settings, tensors, sentence, tmp_path):
    folder = damaged(tmp_path, settings, tensors)
    with pytest.raises(ConfigError, match=sentence):
        model_folder(folder)
    models = tmp_path / "ours" / "models"
    assert not list(models.glob("adapter-*"))


@pytest.mark.parametrize("modules", [("lm_head",), ("model.embed_tokens",), ("model.embed_tokens", "lm_head")])
@pytest.mark.parametrize("tying", [False, True])
def test_one_of_two_tied_matrices_that_was_trained_whole_leaves_the_other(modules, tying, tmp_path):
    """What PEFT 0.21 computed after `modules_to_save`, on qwen3-hybrid, to 2e-5."""
    old = contents(model_folder("tests/golden/qwen3-hybrid"))["model.embed_tokens.weight"]
    rng = np.random.default_rng(0)
    new = {f"{module}.weight": rng.normal(size=old.shape).astype(np.float32) for module in modules}
    wrapped = {f"base_model.model.{name}": matrix for name, matrix in new.items()}
    merged = contents(model_folder(damaged(tmp_path, {"ensure_weight_tying": tying}, lambda found: found | wrapped)))
    np.testing.assert_array_equal(merged["model.embed_tokens.weight"], new.get("model.embed_tokens.weight", old))
    tied = tying and modules == ("model.embed_tokens",)
    assert ("lm_head.weight" in merged) == (not tied)
    if not tied:
        np.testing.assert_array_equal(merged["lm_head.weight"], new.get("lm_head.weight", old))


def test_adapters_of_the_embeddings_come_with_their_matrices(tmp_path):
    """As PEFT 0.21 saves them, and what it computed on qwen3-hybrid, to 2e-5."""
    rng = np.random.default_rng(0)
    old = contents(model_folder("tests/golden/qwen3-hybrid"))["model.embed_tokens.weight"]
    sizes = {
        "lm_head.base_layer.weight": old.shape,
        "lm_head.lora_A.weight": (4, 36),
        "lm_head.lora_B.weight": (131, 4),
    }
    sizes |= {"model.embed_tokens.lora_embedding_A": (4, 131), "model.embed_tokens.lora_embedding_B": (36, 4)}
    new = {name: rng.normal(size=size).astype(np.float32) for name, size in sizes.items()}
    wrapped = {f"base_model.model.{name}": array for name, array in new.items()}
    merged = contents(model_folder(damaged(tmp_path, {}, lambda found: found | wrapped)))
    head, a, b, of_embedding, other = new.values()
    np.testing.assert_allclose(merged["lm_head.weight"], head + 1.5 * b @ a, atol=1e-5)
    np.testing.assert_allclose(merged["model.embed_tokens.weight"], old + 1.5 * (other @ of_embedding).T, atol=1e-5)


@pytest.mark.parametrize("front", ["model.language_model.", "language_model.model."])
def test_adapters_of_a_whole_model_are_merged_onto_its_language_model(front, tmp_path):
    tower = np.ones((2, 2), np.float32)
    whole = {f"base_model.model.model.vision_tower.a.lora_{letter}.weight": tower for letter in "AB"}

    def renamed(found):
        return whole | {name.replace("model.layers.", f"{front}layers.", 1): tensor for name, tensor in found.items()}

    alpha = {"alpha_pattern": {f"^{front}layers.0.self_attn.q_proj": 24}}
    folder, said = damaged(tmp_path, alpha, renamed), []
    merged = contents(model_folder(folder, said.append))
    assert said[-1] == "only the adapters of the language model are merged; left out: vision_tower"
    base, plain = contents(model_folder("tests/golden/qwen3-hybrid")), contents(model_folder(ADAPTERS / "plain"))
    for name, matrix in plain.items():
        growth = 4 if name == "model.layers.0.self_attn.q_proj.weight" else 1  # alpha is 6 elsewhere
        np.testing.assert_allclose(merged[name] - base[name], growth * (matrix - base[name]), atol=1e-6)


def test_adapters_beside_a_config_are_adapters_and_beside_weights_a_model(tmp_path):
    folder, base = damaged(tmp_path), GOLDEN / "qwen3-hybrid"
    merged = contents(model_folder(folder))
    shutil.copy(base / "config.json", folder)
    np.testing.assert_equal(contents(model_folder(folder)), merged)
    shutil.copy(base / "model.safetensors", folder)
    np.testing.assert_equal(contents(model_folder(folder)), contents(model_folder(base)))


def test_a_tokenizer_beside_adapters_is_checked(tmp_path):
    folder = damaged(tmp_path)
    (folder / "tokenizer.json").write_text("{broken")
    with pytest.raises(ConfigError, match=f"{folder}/tokenizer.json .*fetch the file again"):
        model_folder(folder)
