"""Numbers that a checkpoint holds and the decoder knows: checked at import, written at export (Apertus)."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from swa_jax.base.errors import CheckpointError
from swa_jax.checkpoint.folder import open_checkpoint
from swa_jax.checkpoint.hf_export import export_model
from swa_jax.checkpoint.hf_import import import_model

GOLDEN = Path(__file__).parents[1] / "golden" / "apertus-full"
EPS = "model.layers.2.mlp.act_fn.eps"


def folder_of(path: Path, dtype=np.float32, **changes: np.ndarray) -> Path:
    path.mkdir()
    (path / "config.json").write_bytes((GOLDEN / "config.json").read_bytes())
    tensors = {name: t.astype(dtype) for name, t in load_file(GOLDEN / "model.safetensors").items()}
    save_file(tensors | changes, path / "model.safetensors")
    return path


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_they_are_not_stored_here_and_come_back_at_export(tmp_path, dtype):
    source = folder_of(tmp_path / "source", dtype)
    imported = import_model(source, tmp_path / "imported")
    assert not [name for name in open_checkpoint(imported).tensors if name.endswith((".eps", ".beta"))]
    exported = load_file(export_model(imported, tmp_path / "exported", canary=False) / "model.safetensors")
    stored = load_file(source / "model.safetensors")
    assert exported.keys() == stored.keys()
    assert exported[EPS].shape == ()
    for name, tensor in stored.items():
        np.testing.assert_array_equal(exported[name], tensor, err_msg=name, strict=True)


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (np.asarray(-1e-5, np.float32), f"tensor '{EPS}' in model.safetensors is -1e-05; supported: -1e-06, as in all"),
        (np.full(1, -1e-6, np.float32), r"act_fn.eps' in model.safetensors has shape \[1\], config.json asks for \[\]"),
        (np.asarray(-1, np.int32), "act_fn.eps' in model.safetensors has dtype I32"),
    ],
)
def test_another_number_is_refused(tmp_path, value, sentence):
    source = folder_of(tmp_path / "source", **{EPS: value})
    with pytest.raises(CheckpointError, match=sentence):
        import_model(source, tmp_path / "imported")


def test_a_number_that_is_missing_is_named(tmp_path):
    source = folder_of(tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    del tensors[EPS]
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"the weights lack tensor '{EPS}'"):
        import_model(source, tmp_path / "imported")
