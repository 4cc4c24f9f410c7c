"""GGUF files of every architecture against the same weights as a Hugging Face folder."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from gguf_files import read_folder, write_gguf
from safetensors.numpy import load_file

import swa_jax
from swa_jax.checkpoint.folder import open_checkpoint
from swa_jax.checkpoint.gguf.hyperparameters import ARCHITECTURES
from swa_jax.checkpoint.hf_import import import_model

GOLDEN = Path(__file__).parents[1] / "golden"
# Goldens by what in their config.json no GGUF file can say; {}: all can be said.
CASES: dict[str, dict] = {
    "llama-plain": {},
    "llama3-rope": {},
    "llama-yarn": {},
    "llama-bias": {},
    "mistral-full": {},
    "mixtral-window": {"sliding_window": None},
    "qwen2-full": {},
    "qwen3-full": {},
    "qwen3-moe-full": {"norm_topk_prob": True},
    "olmo2-full": {},
    "olmo3-hybrid": {},
    "smollm3-hybrid": {"layer_types": None, "use_sliding_window": False, "no_rope_layers": None},
    "gemma2-hybrid": {},
    "gemma3-hybrid": {},
    "granite-full": {},
    "phi3-full": {},
    "phi3-window": {},
    "cohere-full": {},
    "cohere2-hybrid": {},
    "exaone4-full": {},
    "exaone4-hybrid": {},
    "gpt-oss-hybrid": {"swiglu_limit": 7.0, "swiglu_alpha": 1.702},
    "mellum-hybrid": {},
    "mellum-moe-hybrid": {},
}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """`folder_of(case)`: a golden's Hugging Face folder, with what GGUF can say."""

    def changed(case: str) -> Path:
        folder = tmp_path_factory.mktemp(case) / "hf"
        shutil.copytree(GOLDEN / case, folder)
        config = json.loads((folder / "config.json").read_text()) | CASES[case]
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return changed


def contents(folder: Path) -> dict[str, np.ndarray]:
    checkpoint = open_checkpoint(folder)
    return dict(checkpoint.read(list(checkpoint.stored)))


def assert_same_model(one: Path, other: Path, rtol: float = 0, atol: float = 0) -> None:
    """The same decoder, pattern and weights, whatever family they are called."""
    ours, theirs = open_checkpoint(one), open_checkpoint(other)
    assert dataclasses.replace(ours.config, model_type=theirs.config.model_type) == theirs.config
    assert ours.pattern == dataclasses.replace(theirs.pattern, provenance=ours.pattern.provenance)
    found, expected = contents(one), contents(other)
    renamed = {name.replace("mlp.gate", "block_sparse_moe.gate"): array for name, array in found.items()}
    found = renamed if renamed.keys() == expected.keys() else found
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=rtol, atol=atol, err_msg=name)


@pytest.mark.parametrize("case", CASES)
def test_a_file_is_the_model_that_its_folder_is(case, folder_of, tmp_path):
    folder = folder_of(case)
    imported = import_model(write_gguf(tmp_path / "model.gguf", folder), tmp_path / "from-gguf")
    # Norms of Gemma are stored with 1 added to them in f32.
    atol = 3e-7 if "gemma" in case else 0
    assert_same_model(imported, import_model(folder, tmp_path / "from-hf"), atol=atol)


def test_every_architecture_has_a_file(tmp_path):
    """At least twelve are held to goldens."""
    from gguf_files import architecture_of

    tested = {architecture_of(read_folder(GOLDEN / case)[0]) for case in CASES}
    assert tested == ARCHITECTURES.keys()
    assert len(tested) >= 12


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case, changes in CASES.items() if not changes])
def test_logits_are_the_goldens(case, folder_of, tmp_path):
    file = write_gguf(tmp_path / "model.gguf", folder_of(case))
    model = swa_jax.load_model(import_model(file, tmp_path / "model"))
    golden = load_file(GOLDEN / case / "golden.safetensors")
    logits = np.asarray(model(jnp.asarray(golden["tokens"])))
    np.testing.assert_allclose(logits, golden["logits"], rtol=0, atol=1e-4)
