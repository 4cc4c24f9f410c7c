"""GGUF files of every architecture against the same weights as a Hugging Face folder."""

import dataclasses
import re
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType
from gguf_files import architecture_of, fused, write_gguf
from golden_models import GOLDEN, MODELS, change_json, contents, hf_of, tensors_of, write_folder
from layer_letters import letters_of

from swa_jax.base.errors import CheckpointError, ConfigError
from swa_jax.checkpoint.families import model_config
from swa_jax.checkpoint.folder import open_checkpoint
from swa_jax.checkpoint.gguf.hyperparameters import ARCHITECTURES, Metadata
from swa_jax.checkpoint.hf_import import import_model
from swa_jax.checkpoint.tensor_names import expected_tensors
from swa_jax.model.layers import rope_frequencies

# Goldens that no GGUF file can say: llama.cpp does not have them, or not their windows.
NOT_SAID = {"apertus-full", "cohere2-moe-softmax", "cwm-hybrid", "laguna-channels", "laguna-hybrid", "ministral-hybrid"}
NOT_SAID |= {"mimo-v2-flash-hybrid", "mistral-window", "qwen2-hybrid", "qwen3-hybrid", "vaultgemma-hybrid"}
NOT_SAID |= {"qwen3-moe-window"}
# What in the config.json of the others no file says.
CHANGED = {
    "mixtral-window": {"sliding_window": None},
    "qwen3-moe-full": {"norm_topk_prob": True},
    "smollm3-hybrid": {"layer_types": None, "use_sliding_window": False, "no_rope_layers": None},
    "gpt-oss-hybrid": {"swiglu_limit": 7.0, "swiglu_alpha": 1.702},
    "granite-swa-hybrid": {"layer_rope_theta": [10000.0, 10000.0, 0, 10000.0, 0]},
    "granitemoe-swa-hybrid": {"layer_rope_theta": [10000.0, 10000.0, 0, 10000.0, 0]},
    "ministral3-window": {"sliding_window": None},
    "starcoder2-window": {"sliding_window": None},
}
CASES = [model for model in MODELS if model not in NOT_SAID]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """`folder_of(case)`: a golden's Hugging Face folder, with what GGUF can say."""

    def changed(case: str) -> Path:
        folder = shutil.copytree(GOLDEN / case, tmp_path_factory.mktemp(case) / "hf")
        change_json(folder / "config.json", **CHANGED.get(case, {}))
        return folder

    return changed


def assert_same_model(one: Path, other: Path, atol: float = 0) -> None:
    """The same decoder, pattern and weights, whatever family they are called."""
    ours, theirs = open_checkpoint(one), open_checkpoint(other)
    assert dataclasses.replace(ours.config, model_type=theirs.config.model_type) == theirs.config
    assert ours.pattern == dataclasses.replace(theirs.pattern, provenance=ours.pattern.provenance)
    found, expected = contents(one), contents(other)
    renamed = {name.replace("mlp.gate", "block_sparse_moe.gate"): array for name, array in found.items()}
    found = renamed if renamed.keys() == expected.keys() else found
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=0, atol=atol, err_msg=name)


@pytest.mark.parametrize("case", CASES)
def test_a_file_is_the_model_that_its_folder_is(case, folder_of, tmp_path):
    folder = folder_of(case)
    imported = import_model(write_gguf(tmp_path / "model.gguf", folder), tmp_path / "from-gguf")
    expected = import_model(folder, tmp_path / "from-hf")
    # Norms of Gemma are stored with 1 added to them in f32.
    assert_same_model(imported, expected, atol=3e-7 if "gemma" in case else 0)
    if case in ("llama-bias", "qwen2-full", "qwen3-moe-full"):  # with tensors that llama.cpp can join
        joined = write_gguf(tmp_path / "joined.gguf", folder, edit=fused)
        assert_same_model(import_model(joined, tmp_path / "from-joined"), expected)


def test_every_architecture_has_a_file():
    tested = {architecture_of(hf_of(case)) for case in CASES}
    assert tested == ARCHITECTURES.keys() - {"step35"}  # which test_gguf_export.py has
    text = (GOLDEN.parents[1] / "docs" / "importing.md").read_text()
    listed = text.split("- **Architectures**")[1].split("- **")[0]
    assert {name for name in re.findall("`([^`]+)`", listed) if "." not in name} == tested


# ---- how the weights are stored ----


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A Hugging Face folder whose matrices have rows of 256, which every quantisation can have."""
    folder = tmp_path_factory.mktemp("wide")
    config = {
        "model_type": "llama", "vocab_size": 16, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }  # fmt: skip
    rng = np.random.default_rng(0)
    shapes = expected_tensors(model_config(config))
    tensors = {name: rng.normal(0, 0.1, shape).astype(np.float32) for name, shape in shapes.items()}
    return write_folder(folder, config, tensors)


def known_kinds() -> list[GGMLQuantizationType]:
    def is_known(kind: GGMLQuantizationType) -> bool:
        try:
            gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except NotImplementedError:
            return False
        return True

    return [kind for kind in GGMLQuantizationType if is_known(kind)]


@pytest.mark.parametrize("kind", known_kinds(), ids=lambda kind: kind.name)
def test_every_type_that_can_be_undone_is(kind, wide, tmp_path):
    block, size = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(0).integers(0, 64, (256, 256 // block * size)).astype(np.uint8)  # finite as any float
    file = write_gguf(tmp_path / "m.gguf", wide, edit=lambda all: all | {"blk.0.ffn_down.weight": (raw, kind)})
    found = contents(import_model(file, tmp_path / "model"))["model.layers.0.mlp.down_proj.weight"]
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, gguf.dequantize(raw, kind))


@pytest.mark.parametrize(
    ("kind", "dtype"), [("BF16", "bfloat16"), ("F16", "float16"), ("MXFP4", "bfloat16"), ("Q8_0", "float32")]
)
def test_weights_become_the_narrowest_dtype_that_holds_them(kind, dtype, wide, tmp_path):
    said: list[str] = []
    file = write_gguf(tmp_path / "m.gguf", wide, GGMLQuantizationType[kind])
    opened = open_checkpoint(import_model(file, tmp_path / "model", describe=said.append))
    assert {stored.name for stored, _ in opened.tensors.values()} == {dtype}
    assert opened.hf_config["dtype"] == dtype
    assert f"m.gguf: weights of type {kind} become {dtype}" in said
    import_model(file, tmp_path / "model", describe=said.append)
    assert said[-1] == f"{tmp_path / 'model'} holds this import already"
    array = tensors_of(wide)["model.layers.0.mlp.down_proj.weight"]
    written = gguf.dequantize(gguf.quantize(array, GGMLQuantizationType[kind]), GGMLQuantizationType[kind])
    np.testing.assert_array_equal(
        contents(tmp_path / "model")["model.layers.0.mlp.down_proj.weight"].astype(np.float32), written
    )


def test_a_split_model_is_whole_and_named_by_any_part(folder_of, tmp_path):
    folder = folder_of("qwen3-full")
    write_gguf(tmp_path / "m.gguf", folder, split_tensors=20)
    parts = sorted(tmp_path.glob("*.gguf"))
    assert [part.name for part in parts] == [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    for part in (parts[0], parts[2]):
        assert_same_model(import_model(part, tmp_path / part.stem), import_model(folder, tmp_path / f"hf{part.stem}"))
    shutil.copy(parts[0], parts[1])
    with pytest.raises(
        CheckpointError, match=r"m-00002-of-00003.gguf says that it is part 0 \(from 0\) of 3: it is not"
    ):
        import_model(parts[0], tmp_path / "model")
    parts[1].unlink()
    with pytest.raises(CheckpointError, match=r"m-00002-of-00003.gguf is missing: m-00001-of-00003.gguf is one of 3"):
        import_model(parts[0], tmp_path / "model")
    shutil.move(parts[0], tmp_path / "alone.gguf")
    with pytest.raises(CheckpointError, match=r"alone.gguf is a part of a split model, but is not called so"):
        import_model(tmp_path / "alone.gguf", tmp_path / "model")


# ---- what the metadata says ----


def test_windows_by_a_period_or_a_flag_a_layer(folder_of, tmp_path):
    """Where a file says neither, the architecture's own period holds."""
    source = folder_of("gemma3-hybrid")
    for i, (pattern, letters) in enumerate(
        [(2, "wFwFw"), (0, "wwwww"), (1, "FFFFF"), ([True, False, False, True, False, True], "wFFwF")]
    ):
        file = write_gguf(tmp_path / "m.gguf", source, attention__sliding_window_pattern=pattern)
        found = open_checkpoint(import_model(file, tmp_path / f"{i}")).pattern
        assert letters_of(found) == letters
    file = write_gguf(tmp_path / "m.gguf", source, attention__sliding_window_pattern=[True, False])
    with pytest.raises(CheckpointError, match="sliding_window_pattern must be true or false for each of the 5 layers"):
        import_model(file, tmp_path / "model")


def test_factors_of_frequencies_that_follow_no_rule(wide, tmp_path):
    """Each frequency is divided by its own, and nothing else changes."""
    factors = np.linspace(1, 3, 32).astype(np.float32)
    file = write_gguf(tmp_path / "m.gguf", wide, edit=lambda all: all | {"rope_freqs.weight": factors})
    config = open_checkpoint(import_model(file, tmp_path / "model")).config
    found, scale = rope_frequencies(config.rope_theta, config.rope_scaling, config, 16)
    plain, _ = rope_frequencies(config.rope_theta, None, config, 16)
    np.testing.assert_allclose(found, plain / factors, rtol=1e-6)
    assert scale == 1


def test_the_two_largest_gemmas_scale_by_their_width():
    """query_pre_attn_scalar of Gemma 2 27B is 144, of Gemma 3 27B 168, and the head's width elsewhere."""
    for architecture, layers, width, heads, scalar in (
        ("gemma2", 46, 4608, 32, 144),
        ("gemma3", 62, 5376, 32, 168),
        ("gemma3", 48, 3840, 16, 256),
    ):
        hf = {"head_dim": 256, "hidden_size": width, "num_attention_heads": heads}
        metadata = Metadata.__new__(Metadata)
        metadata.layers = layers
        assert ARCHITECTURES[architecture].more(metadata, hf)["query_pre_attn_scalar"] == scalar


def without(name):
    return lambda tensors: {key: array for key, array in tensors.items() if key != name}


def with_one(name, array):
    return lambda tensors: tensors | {name: array}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"attention__value_length": 32}, "keys and values have heads of different sizes"),
        ({"block_count": 1_000_000}, "llama.block_count is 1000000 in a file of 12 tensors"),
        ({"embedding_length": "wide"}, "llama.embedding_length must be a whole number, got 'wide'"),
        ({"attention__head_count": 3}, "no multiple of llama.attention.head_count"),
        ({"rope__scaling__type": "spiral"}, "scaling.type 'spiral' is not supported; supported: none, linear"),
        ({"rope__dimension_count": 32}, "m.gguf, as a Hugging Face config.json: partial_rotary_factor is not"),
        ({"rope__freq_base": float("nan")}, "llama.rope.freq_base must be a number"),
        ({"feed_forward_length": 512}, "has shape .256, 256., the hyperparameters ask for .512, 256."),
        ({"edit": without("blk.0.ffn_up.weight")}, "lacks tensor 'blk.0.ffn_up.weight', which a llama model"),
        ({"edit": without("token_embd.weight")}, "holds no embedding"),
        ({"edit": with_one("blk.0.more.weight", np.ones((2, 2)))}, "holds tensor 'blk.0.more.weight', which"),
        (
            {"edit": with_one("blk.0.ffn_down.weight", (np.zeros((256, 256), np.int8), GGMLQuantizationType.I8))},
            "'blk.0.ffn_down.weight' in m.gguf is of type I8, which the",
        ),
    ],
)
def test_what_no_model_has(changes, said, wide, tmp_path):
    file = write_gguf(tmp_path / "m.gguf", wide, **changes)
    with pytest.raises((CheckpointError, ConfigError), match=said):
        import_model(file, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_one_number_a_layer_must_be_the_same_in_all(folder_of, tmp_path):
    file = write_gguf(tmp_path / "m.gguf", folder_of("llama-bias"), attention__head_count_kv=[2, 2])
    assert open_checkpoint(import_model(file, tmp_path / "model")).config.num_key_value_heads == 2
    write_gguf(file, folder_of("llama-bias"), attention__head_count_kv=[2, 6])
    with pytest.raises(CheckpointError, match=r"llama.attention.head_count_kv differs between layers"):
        import_model(file, tmp_path / "other")


def test_layers_for_multi_token_prediction_are_left_out(folder_of, tmp_path):
    folder = folder_of("exaone-moe-hybrid")
    extra = {"blk.5.nextn.eh_proj.weight": np.ones((36, 72), np.float32), "blk.5.attn_norm.weight": np.ones(36)}
    file = write_gguf(tmp_path / "m.gguf", folder, edit=lambda all: all | extra, block_count=6, nextn_predict_layers=1)
    assert_same_model(import_model(file, tmp_path / "a"), import_model(folder, tmp_path / "b"))


def with_a_hole(data: bytes) -> bytes:
    """The last tensor is said to begin a row later, and still ends within the file."""
    name, out = b"output_norm.weight", bytearray(data) + bytes(64)
    place = out.index(name) + len(name) + 4 + 8 + 4  # behind its axes, its shape and its type
    offset = int.from_bytes(out[place : place + 8], "little")
    out[place : place + 8] = (offset + 32).to_bytes(8, "little")
    return bytes(out)


def test_files_that_are_no_gguf(wide, tmp_path):
    good = write_gguf(tmp_path / "good.gguf", wide).read_bytes()
    for data, said in (
        (b"", r"bad.gguf is empty: fetch it again"),
        (b"GGU", r"is damaged or cut short \(its header asks for 4 bytes at byte 0, of 3 bytes in all\)"),
        (b"version https://git-lfs.github.com/spec/v1", "is no GGUF file: it begins with b'vers'; a git-lfs pointer"),
        (b"lmgg" + good[4:], "is of a format before GGUF"),
        (good[:4] + b"\x01" + good[5:], "is of GGUF version 1; supported: GGUF versions 2 and 3"),
        (good[:4] + b"\x00\x00\x00\x03" + good[8:], "is for processors with the highest byte first"),
        (good[:-100], "is damaged or cut short"),
        (with_a_hole(good), r"'output_norm.weight' begins at (\d+) and not at \d+, where the one before it ends"),
        (good.replace(b"llama", b"lemma"), "architecture 'lemma' is not supported; supported: afmoe, "),
    ):
        (tmp_path / "bad.gguf").write_bytes(data)
        with pytest.raises(ConfigError, match=said):
            import_model(tmp_path / "bad.gguf", tmp_path / "model")
    with pytest.raises(CheckpointError, match=r"none.gguf is no file: give a GGUF file"):
        import_model(tmp_path / "none.gguf", tmp_path / "model")
    with pytest.raises(CheckpointError, match=r"holds no config.json.*; give the GGUF file itself: .*bad.gguf"):
        import_model(tmp_path, tmp_path / "model")
