"""Adapters on disk: PEFT's names and orientation, and what `adapter_config.json` says."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from golden_models import MODELS, hf_of
from safetensors.numpy import load_file
from tiny_models import model_of
from written_adapters import CASES, adapters_alone, written

from scripts.goldens.exports import NOT_LOADED, problems_of
from swa_jax.checkpoint.families import model_config
from swa_jax.checkpoint.peft import save_adapter
from swa_jax.model.lora import LoraConfig, with_lora


def test_an_adapter_has_pefts_names_and_orientation(tmp_path):
    config = LoraConfig(rank=2, alpha=6.0, targets=("q_proj", "down_proj"))
    model = with_lora(model_of("window"), config, nnx.Rngs(1))
    projections = {"self_attn.q_proj": model.layers.attention.q_proj, "mlp.down_proj": model.layers.mlp.down_proj}
    for projection in projections.values():
        projection.lora_b[...] = jax.random.normal(jax.random.key(0), projection.lora_b.shape)
    folder = save_adapter(model, tmp_path / "adapter", base="the/base")
    tensors = load_file(folder / "adapter_model.safetensors")
    assert len(tensors) == 2 * 2 * model.config.num_hidden_layers
    for name, projection in projections.items():
        for layer in range(model.config.num_hidden_layers):
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            # As PEFT and PyTorch hold them: A [rank, inputs], B [outputs, rank].
            a, b = tensors[f"{prefix}.lora_A.weight"], tensors[f"{prefix}.lora_B.weight"]
            assert (a.shape[0], b.shape[1]) == (2, 2)
            np.testing.assert_array_equal(a.T, projection.lora_a[...][layer])
            np.testing.assert_array_equal(b.T, projection.lora_b[...][layer])
    said = json.loads((folder / "adapter_config.json").read_text())
    assert (said["r"], said["lora_alpha"], said["base_model_name_or_path"]) == (2, 6.0, "the/base")
    assert said["target_modules"] == ["q_proj", "down_proj"]


# ---- what PEFT made of them: `python -m scripts.goldens peft` ----

TABLE = json.loads(Path(__file__).with_name("adapters.json").read_text())
FAMILIES = {hf_of(model)["model_type"]: model for model in reversed(MODELS)}  # the first golden of each
ROWS = [pytest.param(model, marks=() if model in FAMILIES.values() else pytest.mark.slow) for model in MODELS]


def test_peft_computes_what_was_written():
    assert set(TABLE["adapters"]) == set(MODELS)
    for model, rows in TABLE["adapters"].items():
        assert set(rows) == set(CASES), model
        for case, row in rows.items():
            assert bool(problems_of(row)) == ((model, case) in NOT_LOADED), (model, case)
    bad = {"tensors not matched": ["x"], "difference": float("nan"), "changes logits by": 0.0}
    assert len(problems_of(bad)) == 3


@pytest.mark.parametrize("model", ROWS)
def test_what_is_written_now_is_what_was_checked(model, tmp_path, caplog):
    """After a change here: run `python -m scripts.goldens peft`. Of what PEFT does not load we warn."""
    for case, adapter in adapters_alone(model_config(hf_of(model))).items():
        caplog.clear()
        folder = save_adapter(adapter, tmp_path / case)
        assert written(folder) == TABLE["adapters"][model][case]["fingerprint"], case
        assert ("PEFT 0.21 does not load" in caplog.text) == ((model, case) in NOT_LOADED), case
