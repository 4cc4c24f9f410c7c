"""GGUF files for llama.cpp: read again they are the model and pattern they were made of; what cannot be is refused."""

import numpy as np
import pytest
from command_line import fails, run
from exported_patterns import patterns
from gguf_files import FIXED, write_byte_level, write_gguf, write_sentencepiece
from golden_models import GOLDEN, MODELS, change_json, contents, hf_of, tensors_of, write_folder

from swa_jax.base.errors import ConfigError
from swa_jax.checkpoint.families import hf_pattern, model_config
from swa_jax.checkpoint.folder import open_checkpoint, read_companions
from swa_jax.checkpoint.gguf.architectures import GRAPHS
from swa_jax.checkpoint.gguf.export import NO_SINK
from swa_jax.checkpoint.gguf.export import write_gguf as export_gguf
from swa_jax.checkpoint.gguf.graphs import describe
from swa_jax.checkpoint.gguf.header import read_gguf
from swa_jax.checkpoint.gguf.vocabulary import tokenizer_keys
from swa_jax.checkpoint.hf_import import import_model
from swa_jax.checkpoint.served_cache import Memory
from swa_jax.checkpoint.servers import find_served, served_config
from swa_jax.model.layer_types import WINDOW
from swa_jax.model.pattern import AttentionPattern

NAMES = ("full", "odd", "window")


def golden(model: str) -> dict:
    return hf_of(model) | FIXED.get(model, {})


def cases():
    for model in MODELS:
        hf = golden(model)
        tried = {name: patterns(hf["num_hidden_layers"])[name] for name in NAMES} | {"own": hf_pattern(hf)}
        for name, pattern in tried.items():
            if describe(model_config(hf), pattern) is not None:
                yield pytest.param(model, pattern, id=f"{model}-{name}")


CASES = list(cases())


@pytest.mark.parametrize(("model", "pattern"), CASES)
def test_a_file_is_the_model_and_pattern_it_was_made_of(model, pattern, tmp_path):
    folder = write_folder(tmp_path / "hf", golden(model), tensors_of(model))
    source = open_checkpoint(import_model(folder, tmp_path / "ours"))
    described = describe(source.config, pattern)
    export_gguf(tmp_path / "model.gguf", described, source, {})
    again = open_checkpoint(import_model(tmp_path / "model.gguf", tmp_path / "again"))
    assert (again.pattern.layer_types, again.pattern.sliding_window) == (pattern.layer_types, pattern.sliding_window)
    ours, theirs = contents(source.folder), contents(again.folder)
    for name, array in ours.items():
        # Norms of Gemma are stored with 1 added to them in f32.
        np.testing.assert_allclose(theirs.pop(name), array, rtol=0, atol=3e-7 if "gemma" in model else 0, err_msg=name)
    for name, array in theirs.items():  # what the architecture has besides
        if name == "lm_head.weight":
            np.testing.assert_array_equal(array, ours["model.embed_tokens.weight"])
        else:
            assert (array == (np.float32(NO_SINK) if name.endswith("sinks") else 0)).all(), name


def test_every_architecture_writes_a_file():
    written = {describe(model_config(golden(case.values[0])), case.values[1]).architecture for case in CASES}
    assert {graph.architecture for graph in GRAPHS} == written


@pytest.mark.parametrize(
    ("model", "name", "reason"),
    [
        ("phi3-full", "odd", "its architecture there knows no windows by layer"),
        ("afmoe-hybrid", "own", "no GGUF file of it is written here"),
        ("vaultgemma-hybrid", "own", "llama.cpp has no architecture for it"),
        ("llama-plain", "sink tokens", "num_sink_tokens = 2; --for vllm-plugin runs it"),
        ("gemma3-hybrid", "odd", "it has no class that runs gemma3_text with these windows"),
        ("exaone4-full", "odd", "with these windows"),  # of 64 layers it would
    ],
)
def test_what_no_file_can_say_is_refused(model, name, reason):
    hf = golden(model)
    pattern = hf_pattern(hf) if name == "own" else patterns(hf["num_hidden_layers"])[name]
    with pytest.raises(ConfigError, match=r"^llama\.cpp 2026\.10\.11549 cannot run this pattern") as refused:
        served_config("llama.cpp", hf, pattern)
    assert reason in str(refused.value)


def test_exaone_has_windows_where_it_has_64_layers():
    hf = golden("exaone4-hybrid") | {"num_hidden_layers": 64, "layer_types": None, "sliding_window": 5}
    hf |= {"sliding_window_pattern": 4}
    assert describe(model_config(hf), hf_pattern(hf)).architecture == "exaone4"


def test_biases_that_a_model_lacks_are_zero():
    hf = golden("qwen2-full")
    found = describe(model_config(hf), patterns(hf["num_hidden_layers"])["odd"])
    assert found.architecture == "granite_swa"
    assert "blk.0.attn_output.bias" in found.tensors


# ---- the command ----


def checkpoint_of(tmp_path, tokenizer, **changes):
    """A Llama whose tokenizer llama.cpp has."""
    file = write_gguf(tmp_path / "source.gguf", GOLDEN / "llama-plain", tokenizer=tokenizer, **changes)
    return import_model(file, tmp_path / "ours")


def test_an_export_is_a_file_with_its_tokenizer(tmp_path):
    checkpoint = checkpoint_of(tmp_path, lambda writer: write_byte_level(writer, "qwen2", "{{ messages }}"))
    out = tmp_path / "out"
    text = run("export", checkpoint, out, "--for", "llama.cpp", "--pattern", "layers:0", "--window", 5, "--no-canary")
    assert "runs it as granite_swa, with a window in 3 of 4 layers" in text
    assert f"llama-server --model {out}/model.gguf --parallel 1 --ctx-size" in text
    assert "llama-quantize" in text
    assert "a second time" not in text
    assert {file.name for file in out.iterdir()} == {"model.gguf", "pattern.json"}
    made, source = (read_gguf(file).metadata for file in (out / "model.gguf", tmp_path / "source.gguf"))
    assert made["granite_swa.attention.sliding_window_pattern"].tolist() == [False, True, True, True]
    for key, value in source.items():
        if key.startswith("tokenizer."):  # beyond the tokenizer's own there are embeddings that no token has
            assert list(made[key])[: len(value)] == list(value) if np.ndim(value) else made[key] == value, key


def test_weights_keep_their_precision(tmp_path):
    from gguf.constants import GGMLQuantizationType as Kind

    file = write_gguf(tmp_path / "source.gguf", GOLDEN / "llama-plain", Kind.BF16, tokenizer=write_byte_level)
    source = open_checkpoint(import_model(file, tmp_path / "ours"))
    found = describe(source.config, AttentionPattern.from_full_layers([0], 4, 5))
    export_gguf(tmp_path / "model.gguf", found, source, {})
    kinds = {name: tensor.kind for name, tensor in read_gguf(tmp_path / "model.gguf").tensors.items()}
    assert kinds["blk.0.attn_q.weight"] == kinds["token_embd.weight"] == Kind.BF16
    assert kinds["blk.0.attn_norm.weight"] == kinds["blk.0.attn_sinks.weight"] == Kind.F32


def test_pieces_come_back_in_their_order(tmp_path):
    folder = checkpoint_of(tmp_path, write_sentencepiece)
    keys = tokenizer_keys(read_companions(folder), folder, 300)
    source = read_gguf(tmp_path / "source.gguf").metadata
    count = len(source["tokenizer.ggml.tokens"])
    assert keys["tokenizer.ggml.tokens"][:count] == source["tokenizer.ggml.tokens"]
    assert keys["tokenizer.ggml.model"] == "llama"
    assert keys["tokenizer.ggml.add_space_prefix"]
    # A file has one chat template; Cohere's models have several, with names.
    templates = [{"name": "rag", "template": "no"}, {"name": "default", "template": "{{ messages }}"}]
    change_json(folder / "tokenizer_config.json", chat_template=templates)
    found = tokenizer_keys(read_companions(folder), folder, 300)
    assert found["tokenizer.chat_template"] == "{{ messages }}"


def test_a_tokenizer_that_llama_cpp_lacks_is_refused_before_anything_is_written(tmp_path):
    assert "has no tokenizer.json" in fails(
        "export", import_model(GOLDEN / "llama-plain", tmp_path / "none"), tmp_path / "out", "--for", "llama.cpp"
    )
    text = run("export", "recall", tmp_path / "out", "--for", "llama.cpp", status=2)
    assert "cuts texts in a way that no tokenizer known of llama.cpp does" in text
    assert not (tmp_path / "out").exists()


# ---- memory ----


@pytest.mark.parametrize(("length", "batched", "short"), [(4096, 128, 512), (4000, 512, 768), (300, 64, 512)])
def test_windowed_layers_hold_a_window_and_a_batch(length, batched, short):
    """By hand from `llama_kv_cache_iswa`: min(cells, n_swa + n_ubatch), in blocks of 256."""
    hf = hf_of("llama-plain")
    memory = Memory(model_config(hf), hf, length, "llama.cpp", batched)
    pattern = AttentionPattern.from_full_layers([0], 4, 256)
    whole = -(-length // 256) * 256
    assert memory.share(pattern) == (whole + 3 * min(short, whole)) / (4 * whole)
    assert memory.batched_tokens == batched
    assert Memory(model_config(hf), hf, length, "llama.cpp").batched_tokens >= 32


# ---- keys that another family left ----


def test_no_export_says_two_things_of_windows():
    """llama.cpp's converter, for one, believes `use_sliding_window` in whatever family."""
    for model in MODELS:
        hf = hf_of(model) | {"use_sliding_window": False, "max_window_layers": 99, "sliding_window_pattern": 7}
        for name in ("odd", "window"):
            pattern = patterns(hf["num_hidden_layers"])[name]
            for server in ("transformers", "vllm", "sglang"):
                if (served := find_served(server, hf, pattern)) is None:
                    continue
                assert served.hf.get("use_sliding_window", True), (model, server)
                assert served.hf.get("max_window_layers", 0) <= pattern.layer_types.index(WINDOW), (model, server)
                assert "sliding_window_pattern" not in served.hf, (model, server)
