"""Mixtures of experts in and out: MXFP4, round trips, and memory that does not grow with the number of shards."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import swa_jax
from swa_jax.base.errors import CheckpointError
from swa_jax.checkpoint.families import hf_pattern, model_config
from swa_jax.checkpoint.folder import open_checkpoint
from swa_jax.checkpoint.hf_export import export_model
from swa_jax.checkpoint.hf_import import import_model
from swa_jax.checkpoint.tensor_names import expected_tensors

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
SPARSE = ("qwen3-moe-full", "qwen3-moe-window", "mixtral-window", "gpt-oss-hybrid", "mellum-moe-hybrid")


# ---- round trips ----


@pytest.mark.parametrize("case", SPARSE)
def test_export_gives_back_the_very_tensors(case, tmp_path):
    """From the model in memory too, where experts and layers are stacked."""
    original = load_file(GOLDEN / case / "model.safetensors")
    imported = import_model(GOLDEN / case, tmp_path / "imported")
    saved = swa_jax.checkpoint.folder.save_model(swa_jax.load_model(imported), tmp_path / "saved")
    for name, source in (("first", imported), ("second", saved)):
        exported = export_model(source, tmp_path / name, canary=False)
        again = load_file(exported / "model.safetensors")
        assert {k: (v.shape, v.tobytes()) for k, v in again.items()} == {
            k: (v.shape, v.tobytes()) for k, v in original.items()
        }
        hf, theirs = (json.loads((folder / "config.json").read_text()) for folder in (exported, GOLDEN / case))
        assert (hf["model_type"], hf["architectures"]) == (theirs["model_type"], theirs["architectures"])
        assert (model_config(hf), hf_pattern(hf)) == (model_config(theirs), hf_pattern(theirs))


def test_many_tensors_lie_in_several_shards(tmp_path, monkeypatch):
    case = GOLDEN / "qwen3-moe-full"
    monkeypatch.setattr(swa_jax.checkpoint.folder, "SHARD_BYTES", 100_000)
    imported = import_model(case, tmp_path / "imported")
    original = load_file(case / "model.safetensors")
    shards = sorted((imported / "weights").glob("*.safetensors"))
    assert len(shards) > 3
    opened = open_checkpoint(imported)
    names = sorted(original, key=lambda name: name[::-1])  # from one shard to another and back
    stored = list(opened.read(names))
    assert [name for name, _ in stored] == names
    assert all(array.tobytes() == original[name].tobytes() for name, array in stored)
    shards[2].unlink()
    with pytest.raises(CheckpointError, match=f"{shards[2].name} is missing: the checkpoint is not complete"):
        open_checkpoint(imported)


def test_layers_for_multi_token_prediction_are_left_out(tmp_path):
    """As Hugging Face's class leaves them out."""
    source = shutil.copytree(GOLDEN / "mellum-moe-hybrid", tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    more = {"mtp.layers.0.input_layernorm.weight": np.ones(36, np.float32)}
    save_file(tensors | more, source / "model.safetensors", {"format": "pt"})
    assert set(open_checkpoint(import_model(source, tmp_path / "model")).tensors) == set(tensors)


# ---- MXFP4 ----

SIZES = {
    "model_type": "gpt_oss",
    "vocab_size": 40,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
}
QUANTIZED = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}


def packed_model(folder: Path) -> dict[str, np.ndarray]:
    """A random gpt-oss whose experts are in MXFP4; its tensors as they stand in the file."""
    rng = np.random.default_rng(0)
    tensors = {}
    for name, shape in expected_tensors(model_config(SIZES)).items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = shape
            tensors[f"{name}_blocks"] = rng.integers(0, 256, (experts, outputs, inputs // 32, 16)).astype(np.uint8)
            tensors[f"{name}_scales"] = rng.integers(118, 126, (experts, outputs, inputs // 32)).astype(np.uint8)
        else:
            tensors[name] = (0.3 * rng.normal(size=shape)).astype(ml_dtypes.bfloat16)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SIZES | QUANTIZED))
    save_file(tensors, folder / "model.safetensors")
    return tensors


def e2m1(code: int) -> float:
    """A float of a sign, two bits of exponent with bias 1 and one of mantissa (OCP MX 1.0, section 5.3.3)."""
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    return (-1) ** sign * (mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1))


def test_mxfp4_becomes_bf16_of_the_same_values(tmp_path):
    tensors = packed_model(tmp_path / "source")
    opened = open_checkpoint(import_model(tmp_path / "source", tmp_path / "model"))
    assert "quantization_config" not in opened.hf_config
    stored = dict(opened.read(list(opened.tensors)))
    for name, array in tensors.items():
        if name.endswith("_blocks"):
            whole = name.removesuffix("_blocks")
            scales, got = tensors[f"{whole}_scales"], stored[whole]
            assert got.dtype == ml_dtypes.bfloat16
            for expert, row, column in np.ndindex(got.shape):
                block, place = divmod(row, 32)
                byte = int(array[expert, column, block, place // 2])
                code = byte >> 4 if place % 2 else byte & 15
                assert got[expert, row, column] == e2m1(code) * 2.0 ** (int(scales[expert, column, block]) - 127)
        elif not name.endswith("_scales"):
            assert stored[name].tobytes() == array.tobytes()
    exported = export_model(tmp_path / "model", tmp_path / "exported", canary=False)
    again = open_checkpoint(import_model(exported, tmp_path / "again"))
    for name, array in again.read(list(again.tensors)):
        assert array.tobytes() == stored[name].tobytes()
    logits = swa_jax.load_model(tmp_path / "again")(np.arange(7)[None])
    assert np.isfinite(logits).all()


def test_mxfp4_that_cannot_be_is_refused(tmp_path):
    tensors = packed_model(tmp_path / "source")
    whole = "model.layers.1.mlp.experts.down_proj"

    def refused(sentence: str, config: dict = QUANTIZED, **changes: np.ndarray | None) -> None:
        held = {name: array for name, array in (tensors | changes).items() if array is not None}
        save_file(held, tmp_path / "source" / "model.safetensors")
        (tmp_path / "source" / "config.json").write_text(json.dumps(SIZES | config))
        with pytest.raises(CheckpointError, match=sentence) as caught:
            import_model(tmp_path / "source", tmp_path / "out" / "model")
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "out" / "model").exists()

    refused(f"holds '{whole}_blocks', but the weights lack '{whole}_scales'", **{f"{whole}_scales": None})
    refused(f"the weights lack tensor '{whole}'", **{f"{whole}_scales": None, f"{whole}_blocks": None})
    shape = tensors[f"{whole}_scales"].shape
    refused("has shape .* its blocks ask for", **{f"{whole}_scales": np.zeros((*shape[:2], 9), np.uint8)})
    refused("MXFP4 blocks are bytes", **{f"{whole}_blocks": np.zeros((3, 64, 1, 8), np.uint8)})
    wide = {f"{whole}_blocks": np.zeros((3, 64, 2, 16), np.uint8), f"{whole}_scales": np.zeros((3, 64, 2), np.uint8)}
    refused(f"tensor '{whole}' in model.safetensors has shape .* asks for", **wide)
    nan = tensors[f"{whole}_scales"].copy()
    nan[1, 2] = 255
    refused(f"'{whole}_scales' in model.safetensors holds the scale 255", **{f"{whole}_scales": nan})
    refused("_blocks', which a gpt_oss model", config={})


# ---- memory ----


def sparse_model(folder: Path, config: dict, shard_bytes: int) -> int:
    """Shards of holes with the tensors of a model in bf16, layer after layer; returns the largest tensor's bytes."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    names = expected_tensors(model_config(config))

    def layer(name: str) -> int:
        return int(name.split(".")[2]) if name.startswith("model.layers.") else -1

    shards: list[dict[str, tuple[int, ...]]] = [{}]
    size = 0
    for name in sorted(names, key=layer):
        nbytes = 2 * int(np.prod(names[name]))
        if shards[-1] and size + nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = names[name]
        size += nbytes
    places = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        header, end = {}, 0
        for name, shape in shard.items():
            start, end = end, end + 2 * int(np.prod(shape))
            header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        with (folder / file).open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            out.truncate(8 + len(text) + end)
        places |= dict.fromkeys(shard, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return max(2 * int(np.prod(shape)) for shape in names.values())


# Prints the peak of resident memory while each of the first shards was imported.
MEASURED = """
import sys
from pathlib import Path
from swa_jax.checkpoint import hf_import
from swa_jax.checkpoint.safetensors_files import TensorReader

source, destination, shards = sys.argv[1], sys.argv[2], int(sys.argv[3])
parts, seen = TensorReader.parts, []

def peak():
    status = Path("/proc/self/status").read_text()
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    return int(status.split("VmHWM:")[1].split()[0]) * 1024

def watched(reader, tensor, *rows):
    if tensor.file not in seen:
        if seen:
            print(peak(), flush=True)
        if len(seen) == shards:
            raise SystemExit(0)
        peak()
        seen.append(tensor.file)
    return parts(reader, tensor, *rows)

TensorReader.parts = watched
hf_import.import_model(source, destination)
print(peak())
"""


def peaks(source: Path, destination: Path, shards: int) -> list[int]:
    command = [sys.executable, "-c", MEASURED, str(source), str(destination), str(shards)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ.copy(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return [int(line) for line in done.stdout.split()]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc to measure memory")
def test_an_import_of_many_experts_holds_no_more_than_two_tensors(tmp_path):
    """A model of Qwen3-235B's form, 3 GB of holes; were half of it collected on the way, the peak would show it."""
    config = {
        "model_type": "qwen3_moe", "vocab_size": 8192, "hidden_size": 1024, "intermediate_size": 3072,
        "num_hidden_layers": 14, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128,
        "num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 512, "norm_topk_prob": True,
    }  # fmt: skip
    largest = sparse_model(tmp_path / "source", config, shard_bytes=400 * 2**20)
    total = sum(file.stat().st_size for file in (tmp_path / "source").glob("*.safetensors"))
    by_shard = peaks(tmp_path / "source", tmp_path / "model", shards=100)
    assert len(by_shard) > 6
    assert total > 2.5 * (bound := 2 * largest + 2**30)
    assert max(by_shard) < bound
    assert max(by_shard[1:]) - min(by_shard[1:]) < 200 * 2**20
    assert open_checkpoint(tmp_path / "model").config.num_experts == 64
