"""What transformers made of each export (`exports.json`), and that the same is still exported."""

import dataclasses
import json
from pathlib import Path

import pytest
from exported_patterns import fingerprint, patterns
from golden_models import MODELS, hf_of

from scripts.goldens.exports import problems_of
from swa_jax.checkpoint.families import model_config
from swa_jax.checkpoint.servers import find_served
from swa_jax.checkpoint.tensor_names import hf_tensors

TABLE = json.loads(Path(__file__).with_name("exports.json").read_text())


def test_every_golden_was_checked_under_every_pattern():
    assert sorted(TABLE["exports"]) == MODELS
    assert sorted(TABLE["transformers"]) == MODELS
    assert set(TABLE["transformers"].values()) <= {"5.23.0", "5.24.0"}
    for model, rows in TABLE["exports"].items():
        assert set(rows) == set(patterns(2)), model


def test_transformers_computes_what_was_exported():
    rows = [row for rows in TABLE["exports"].values() for row in rows.values()]
    assert [problems for row in rows if (problems := problems_of(row))] == []
    assert all(row["canary, float32"][0] == 0 for row in rows if "refused" not in row), "right, by its own canary"
    assert sum("refused" not in row for row in rows) > 120
    bad = {"weights not matched": [], "difference": 2e-4, "same bits when imported again": True}
    assert problems_of(bad) == ["logits differ by 0.0002"]
    assert problems_of(bad | {"difference": float("nan")}) == ["logits differ by nan"]


@pytest.mark.parametrize("model", MODELS)
def test_what_is_exported_now_is_what_was_checked(model):
    """After a change here: run `python -m scripts.goldens exports`, which has transformers look at it."""
    hf = hf_of(model)
    for name, pattern in patterns(hf["num_hidden_layers"]).items():
        row = TABLE["exports"][model][name]
        if (served := find_served("transformers", hf, pattern)) is None:
            assert "refused" in row, name
            continue
        written = dataclasses.replace(model_config(hf), model_type=served.model_type)
        assert row.get("fingerprint") == fingerprint(served.hf, hf_tensors(written)), name
