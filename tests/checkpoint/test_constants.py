"""Numbers that a checkpoint holds and the decoder knows: checked at import, written at export (Apertus)."""

import ml_dtypes
import numpy as np
import pytest
from golden_models import bits_of, contents, hf_of, tensors_of, write_folder

from swa_jax.base.errors import CheckpointError
from swa_jax.checkpoint.hf_export import export_model
from swa_jax.checkpoint.hf_import import import_model

APERTUS, EPS = "apertus-full", "model.layers.2.mlp.act_fn.eps"


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_they_are_not_stored_here_and_come_back_at_export(tmp_path, dtype):
    stored = {name: tensor.astype(dtype) for name, tensor in tensors_of(APERTUS).items()}
    imported = import_model(write_folder(tmp_path / "source", hf_of(APERTUS), stored), tmp_path / "imported")
    assert not [name for name in contents(imported) if name.endswith((".eps", ".beta"))]
    assert bits_of(tensors_of(export_model(imported, tmp_path / "exported", canary=False))) == bits_of(stored)


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (np.asarray(-1e-5, np.float32), f"tensor '{EPS}' in model.safetensors is -1e-05; supported: -1e-06, as in all"),
        (np.full(1, -1e-6, np.float32), r"act_fn.eps' in model.safetensors has shape \[1\], config.json asks for \[\]"),
        (np.asarray(-1, np.int32), "act_fn.eps' in model.safetensors has dtype I32"),
        (None, f"the weights lack tensor '{EPS}'"),
    ],
)
def test_another_number_is_refused(tmp_path, value, sentence):
    source = write_folder(tmp_path / "source", hf_of(APERTUS), tensors_of(APERTUS) | {EPS: value})
    with pytest.raises(CheckpointError, match=sentence):
        import_model(source, tmp_path / "imported")
