"""Block-FP8 checkpoints: what import makes of them, and what it refuses."""

import json
import tracemalloc
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from golden_models import GOLDEN, hf_of, tensors_of

import swa_jax
from swa_jax.base.errors import CheckpointError, ConfigError
from swa_jax.checkpoint import safetensors_files
from swa_jax.checkpoint.families import model_config
from swa_jax.checkpoint.folder import open_checkpoint
from swa_jax.checkpoint.hf_export import export_model
from swa_jax.checkpoint.hf_import import import_model
from swa_jax.checkpoint.tensor_names import expected_tensors

BLOCKS = (16, 8)  # no multiple of the goldens' sizes
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
SETTINGS = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(BLOCKS), "activation_scheme": "dynamic"}


def quantise(weight: np.ndarray, blocks: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """FP8 numbers and their scales, block by block."""
    scales = np.empty([-(-size // block) for size, block in zip(weight.shape, blocks, strict=True)], np.float32)
    numbers = np.empty(weight.shape, FP8)
    for i, j in np.ndindex(scales.shape):
        here = np.s_[i * blocks[0] : (i + 1) * blocks[0], j * blocks[1] : (j + 1) * blocks[1]]
        scales[i, j] = np.abs(weight[here]).max() / 448
        numbers[here] = (weight[here] / scales[i, j]).astype(FP8)
    return numbers, scales


def products(numbers: np.ndarray, scales: np.ndarray, blocks: tuple[int, int]) -> np.ndarray:
    """The weights that FP8 numbers and scales stand for, in f64, by whole matrices."""
    wide = np.kron(scales.astype(np.float64), np.ones(blocks))[: numbers.shape[0], : numbers.shape[1]]
    return numbers.astype(np.float64) * wide


def write_safetensors(file: Path, tensors: dict[str, np.ndarray]) -> None:
    """A safetensors file by hand: the library's own writer does not know FP8."""
    codes = {dtype: code for code, dtype in safetensors_files.DTYPES.items()} | {FP8: "F8_E4M3"}
    header, data = {}, b""
    for name, array in tensors.items():
        start, data = len(data), data + array.tobytes()
        header[name] = {"dtype": codes[array.dtype], "shape": array.shape, "data_offsets": [start, len(data)]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.fixture
def source(tmp_path):
    """`source(case, changes)`: a golden model with its projections in FP8; scales lie in the second of two shards."""

    def write(case: str = "qwen3-hybrid", changes: dict | None = None, **config) -> Path:
        folder = tmp_path / "fp8"
        folder.mkdir()
        settings = {"quantization_config": SETTINGS, "dtype": "bfloat16"} | config
        (folder / "config.json").write_text(json.dumps(hf_of(case) | settings))
        tensors, scales = {}, {}
        for name, array in tensors_of(case).items():
            if "proj" in name:
                tensors[name], scales[f"{name}_scale_inv"] = quantise(array, BLOCKS)
            else:
                tensors[name] = array.astype(ml_dtypes.bfloat16)
        tensors |= changes or {}
        write_safetensors(folder / "model-1.safetensors", {n: a for n, a in tensors.items() if a is not None})
        scales = {name: array for name, array in scales.items() if name not in tensors}
        write_safetensors(folder / "model-2.safetensors", scales)
        places = {name: "model-1.safetensors" for name, array in tensors.items() if array is not None}
        places |= dict.fromkeys(scales, "model-2.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
        return folder

    return write


@pytest.mark.parametrize("case", ["qwen3-hybrid", "phi3-window", "qwen3-moe-window"])
def test_blocks_are_multiplied_by_their_scales(source, tmp_path, case):
    """Also those of experts, and where the family joins tensors: blocks are those of the joined one."""
    folder = source(case)
    original = tensors_of(case)
    exported = export_model(import_model(folder, tmp_path / "checkpoint"), tmp_path / "exported", canary=False)
    hf = json.loads((exported / "config.json").read_text())
    assert "quantization_config" not in hf
    found = tensors_of(exported)
    assert found.keys() == original.keys()
    for name, array in found.items():
        assert array.dtype == ml_dtypes.bfloat16, name
        expected = original[name].astype(ml_dtypes.bfloat16)
        if "proj" in name:
            expected = products(*quantise(original[name], BLOCKS), BLOCKS).astype(np.float32).astype(expected.dtype)
            assert np.abs(expected.astype(np.float32) - original[name]).max() < 0.1 * np.abs(original[name]).max()
        np.testing.assert_array_equal(array.view(np.uint16), expected.view(np.uint16), err_msg=name)
    again = export_model(import_model(exported, tmp_path / "checkpoint2"), tmp_path / "exported2", canary=False)
    assert (again / "model.safetensors").read_bytes() == (exported / "model.safetensors").read_bytes()
    assert swa_jax.load_model(tmp_path / "checkpoint").pattern == swa_jax.load_model(tmp_path / "checkpoint2").pattern


def test_weights_take_the_dtype_of_config_json(source, tmp_path):
    folder = source(dtype="float32")
    opened = open_checkpoint(import_model(folder, tmp_path / "checkpoint"))
    dtypes = {("proj" in name, dtype) for name, (dtype, _) in opened.tensors.items()}
    assert dtypes == {(True, np.dtype(np.float32)), (False, np.dtype(ml_dtypes.bfloat16))}


Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {f"{Q}_scale_inv": None},
            f"tensor '{Q}' in model-1.safetensors has dtype F8_E4M3, but no scale '{Q}_scale_inv'",
        ),
        (
            {f"{Q}_scale_inv": np.ones((6, 4), np.float32)},
            r"has shape \[6, 4\]; a tensor of shape \[96, 36\] in blocks of \[16, 8\] needs \[6, 5\]",
        ),
        ({Q: np.zeros((96, 36), np.float32)}, "_scale_inv' in model-2.safetensors belongs to no tensor of dtype F8"),
        ({"model.norm.weight": np.zeros(36, FP8)}, "'model.norm.weight' .* but no scale"),
        ({Q: np.zeros((96, 35), FP8)}, r"has shape \[96, 35\], config.json asks for \[96, 36\]"),
    ],
)
def test_damaged_checkpoints_are_refused(source, tmp_path, changes, sentence):
    folder = source("qwen3-hybrid", changes)
    with pytest.raises(CheckpointError, match=sentence):
        import_model(folder, tmp_path / "out" / "checkpoint")
    assert not (tmp_path / "out").exists() or not any((tmp_path / "out").iterdir())


def test_weights_that_modelopt_quantised_are_refused(source, tmp_path):
    """Their config.json may say nothing of it; a file beside it does."""
    folder = source(quantization_config=None)
    (folder / "hf_quant_config.json").write_text("{}")
    with pytest.raises(
        ConfigError, match=r"hf_quant_config.json: quant_method 'modelopt' is not supported; supported: fp8"
    ):
        import_model(folder, tmp_path / "checkpoint")


@pytest.mark.slow
def test_an_import_holds_one_tensor_at_a_time(tmp_path, monkeypatch):
    """Peak Python memory (numpy's arrays included) stays near the largest tensor as written, whatever the depth."""
    folder = tmp_path / "deep"
    folder.mkdir()
    config = {"model_type": "llama", "vocab_size": 64, "hidden_size": 256, "intermediate_size": 2048}
    config |= {"num_hidden_layers": 10, "num_attention_heads": 4}
    shapes = expected_tensors(model_config(config))
    tensors = {name: np.ones(shape, ml_dtypes.bfloat16) for name, shape in shapes.items()}
    for name in [name for name in shapes if "proj" in name]:
        tensors[name], tensors[f"{name}_scale_inv"] = quantise(np.ones(shapes[name], np.float32), BLOCKS)
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": SETTINGS}))
    write_safetensors(folder / "model.safetensors", tensors)
    largest = 2 * 256 * 2048
    assert (folder / "model.safetensors").stat().st_size > 15 * largest
    monkeypatch.setattr(safetensors_files, "PART_BYTES", largest)
    import_model(GOLDEN / "qwen2-full", tmp_path / "warm-up")
    tracemalloc.start()
    try:
        import_model(folder, tmp_path / "checkpoint")
        importing = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        before, opened = tracemalloc.get_traced_memory()[0], open_checkpoint(tmp_path / "checkpoint")
        for _ in opened.read(list(opened.tensors)):
            pass
        reading = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert max(importing, reading) < 6 * largest, f"{importing / 2**20:.1f} MB, {reading / 2**20:.1f} MB"
