"""Mixtures of experts in and out: many small tensors, and MXFP4."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from golden_models import GOLDEN, bits_of, contents, hf_of, logits, tensors_of, write_folder

import swa_jax
from swa_jax.base.errors import CheckpointError
from swa_jax.checkpoint.families import model_config
from swa_jax.checkpoint.folder import open_checkpoint
from swa_jax.checkpoint.hf_export import export_model
from swa_jax.checkpoint.hf_import import import_model
from swa_jax.checkpoint.tensor_names import expected_tensors


def test_many_tensors_lie_in_several_shards(tmp_path, monkeypatch):
    monkeypatch.setattr(swa_jax.checkpoint.folder, "SHARD_BYTES", 100_000)
    imported = import_model(GOLDEN / "qwen3-moe-full", tmp_path / "imported")
    shards = sorted((imported / "weights").glob("*.safetensors"))
    assert len(shards) > 3
    original, opened = tensors_of("qwen3-moe-full"), open_checkpoint(imported)
    names = sorted(original, key=lambda name: name[::-1])  # from one shard to another and back
    stored = dict(opened.read(names))
    assert list(stored) == names
    assert bits_of(stored) == bits_of(original)
    shards[2].unlink()
    with pytest.raises(CheckpointError, match=f"{shards[2].name} is missing: the checkpoint is not complete"):
        open_checkpoint(imported)


def test_layers_for_multi_token_prediction_are_left_out(tmp_path):
    """As Hugging Face's class leaves them out."""
    tensors = tensors_of("mellum-moe-hybrid")
    more = {"mtp.layers.0.input_layernorm.weight": np.ones(36, np.float32)}
    source = write_folder(tmp_path / "source", hf_of("mellum-moe-hybrid"), tensors | more)
    assert contents(import_model(source, tmp_path / "model")).keys() == tensors.keys()


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
    write_folder(folder, SIZES | QUANTIZED, tensors)
    return tensors


def e2m1(code: int) -> float:
    """A float of a sign, two bits of exponent with bias 1 and one of mantissa (OCP MX 1.0, section 5.3.3)."""
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    return (-1) ** sign * (mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1))


def test_mxfp4_becomes_bf16_of_the_same_values(tmp_path):
    tensors = packed_model(tmp_path / "source")
    imported = import_model(tmp_path / "source", tmp_path / "model")
    assert "quantization_config" not in open_checkpoint(imported).hf_config
    stored = contents(imported)
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
    exported = export_model(imported, tmp_path / "exported", canary=False)
    again = import_model(exported, tmp_path / "again")
    assert bits_of(contents(again)) == bits_of(stored)
    assert np.isfinite(logits(swa_jax.load_model(again), np.arange(7)[None])).all()


def test_mxfp4_that_cannot_be_is_refused(tmp_path):
    tensors = packed_model(tmp_path / "source")
    whole = "model.layers.1.mlp.experts.down_proj"

    def refused(sentence: str, config: dict = QUANTIZED, **changes: np.ndarray | None) -> None:
        write_folder(tmp_path / "source", SIZES | config, tensors | changes)
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
