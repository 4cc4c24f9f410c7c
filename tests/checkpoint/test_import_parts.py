"""Tensors that pass through memory in parts: the same bits, whatever the parts."""

import shutil
import time

import pytest
from golden_models import GOLDEN, bits_of, contents, files_of, tensors_of

import swa_jax
from swa_jax.checkpoint import folder, hf_import, safetensors_files
from swa_jax.checkpoint.folder import open_checkpoint
from swa_jax.checkpoint.hf_import import import_model


@pytest.mark.parametrize("nbytes", [1, 5000])
@pytest.mark.parametrize("case", ["phi3-full", "qwen3-full", "gpt-oss-hybrid"])
def test_parts_make_the_same_folder(tmp_path, monkeypatch, case, nbytes):
    """phi3 has joined tensors, which are cut; gpt-oss tensors of three axes."""
    whole = import_model(GOLDEN / case, tmp_path / "whole")
    monkeypatch.setattr(safetensors_files, "PART_BYTES", nbytes)
    parts = import_model(GOLDEN / case, tmp_path / "parts")
    assert files_of(parts) == files_of(whole)
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
    assert bits_of(contents(imported)) == bits_of(tensors_of("qwen2-full"))  # opening it compares the sums


def test_the_weights_of_equal_models_are_equal_files(tmp_path):
    """Their sum is what kept scores are keyed by."""
    shutil.copytree(GOLDEN / "qwen3-full", tmp_path / "copy")
    one = import_model(GOLDEN / "qwen3-full", tmp_path / "one")
    other = import_model(tmp_path / "copy", tmp_path / "other", pattern="window")
    assert folder.weights_sum(one) == folder.weights_sum(other)
    again = folder.save_model(swa_jax.load_model(one), tmp_path / "again")
    assert open_checkpoint(again).tensors == open_checkpoint(one).tensors
