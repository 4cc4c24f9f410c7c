"""Published patterns on the model that they were chosen for."""

import json

import pytest
from command_line import run
from real_models import real_model

PATTERNS = ("smollm2-135m-heads-eighth", "smollm2-135m-layers-quarter")


@pytest.mark.models
def test_they_keep_what_windows_lose(tmp_path):
    """Prompts that no choice has seen; docs/findings.md has the losses of more of them."""
    named = [word for name in PATTERNS for word in ("--pattern", name)]
    options = ("--window", 64, "--sink-tokens", 4, "--length", 384, "--held-out", 4, "--seed", 7, "--dtype", "float32")
    run("compare", real_model("smollm2"), *named, *options, "--out", tmp_path / "out")
    rows = {row["name"]: row for row in json.loads((tmp_path / "out" / "results.json").read_text())["rows"]}
    full, window = rows["full"], rows["window"]
    assert window["answer_nll"] > full["answer_nll"] + 0.5
    for name in PATTERNS:
        assert rows[name]["answer_nll"] < full["answer_nll"] + 0.15
        assert rows[name]["needle_accuracy"] == full["needle_accuracy"] == 1
        assert rows[name]["kv_cache_bytes"] < 0.4 * full["kv_cache_bytes"]
