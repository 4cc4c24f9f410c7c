"""Adapters on disk, against what PEFT made of them: `python -m scripts.goldens peft`."""

import json
from pathlib import Path

import pytest
from golden_models import MODELS, hf_of
from written_adapters import CASES, adapters_alone, written

from scripts.goldens.exports import NOT_LOADED, problems_of
from swa_jax.checkpoint.families import model_config
from swa_jax.checkpoint.peft import save_adapter

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


def test_the_settings_name_the_base(tmp_path, monkeypatch):
    adapter = adapters_alone(model_config(hf_of("llama-plain")))["some"]
    folder = save_adapter(adapter, tmp_path / "adapter", base="the/base")
    with monkeypatch.context() as patched:
        patched.setattr("jax.process_index", lambda: 1)  # comes when the first process has written
        assert save_adapter(adapter, folder) == folder
    settings = json.loads((folder / "adapter_config.json").read_text())
    assert (settings["base_model_name_or_path"], settings["r"], settings["lora_alpha"]) == ("the/base", 2, 8.0)
