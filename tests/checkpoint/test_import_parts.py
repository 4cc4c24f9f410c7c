"""Tensors that pass through memory in parts: the same bits, whatever the parts."""

import shutil
import time
from pathlib import Path

import pytest
from safetensors.numpy import load_file

import swa_jax
from swa_jax.checkpoint import folder, hf_import, safetensors_files
from swa_jax.checkpoint.folder import open_checkpoint
from swa_jax.checkpoint.hf_import import import_model

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.mark.parametrize("nbytes", [1, 500, 5000])
@pytest.mark.parametrize("case", ["phi3-full", "qwen3-full", "gpt-oss-hybrid"])
def test_parts_make_the_same_folder(tmp_path, monkeypatch, case, nbytes):
    """phi3 has joined tensors, which are cut; gpt-oss tensors of three axes."""
    whole = import_model(GOLDEN / case, tmp_path / "whole")
    monkeypatch.setattr(safetensors_files, "PART_BYTES", nbytes)
    parts = import_model(GOLDEN / case, tmp_path / "parts")
    one, other = ({f.relative_to(d): f.read_bytes() for f in d.rglob("*") if f.is_file()} for d in (whole, parts))
    assert one == other
    swa_jax.load_model(parts)


def test_a_part_is_whole_until_it_is_summed(tmp_path, monkeypatch):
    """Reading the next part goes on beside that."""
    monkeypatch.setattr(safetensors_files, "PART_BYTES", 3000)
    check = hf_import.CheckedSource.check

    def slowly(source, name, part):
        time.sleep(0.002)
        check(source, name, part)

    monkeypatch.setattr(hf_import.CheckedSource, "check", slowly)
    imported = import_model(GOLDEN / "qwen2-full", tmp_path / "model")
    opened = open_checkpoint(imported)  # compares the sums
    original = load_file(GOLDEN / "qwen2-full" / "model.safetensors")
    for name, array in opened.read(list(original)):
        assert array.tobytes() == original[name].tobytes()


def test_the_weights_of_equal_models_are_equal_files(tmp_path):
    """Their sum is what kept scores are keyed by."""
    shutil.copytree(GOLDEN / "qwen3-full", tmp_path / "copy")
    one = import_model(GOLDEN / "qwen3-full", tmp_path / "one")
    other = import_model(tmp_path / "copy", tmp_path / "other", pattern="window")
    assert folder.weights_sum(one) == folder.weights_sum(other)
    again = folder.save_model(swa_jax.load_model(one), tmp_path / "again")
    assert open_checkpoint(again).tensors == open_checkpoint(one).tensors
