"""The real models of `make models` against transformers' own loading of the same files (tests/golden/real)."""

import functools
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from real_models import FILES, real_model
from safetensors.numpy import load_file

import swa_jax
from swa_jax.checkpoint.folder import open_checkpoint
from swa_jax.checkpoint.hf_import import import_model
from swa_jax.data.tokenizer import load_tokenizer
from swa_jax.model.layer_types import FULL, WINDOW

REAL = Path(__file__).parents[1] / "golden" / "real"
LENGTH, EVERY = 2000, 50
TOLERANCE = 1e-3
pytestmark = pytest.mark.models


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """`imported(name)`: the checkpoint folder, made once, and what was said of the model."""

    @functools.cache
    def make(name: str) -> tuple[Path, list[str]]:
        said: list[str] = []
        folder = tmp_path_factory.mktemp("real") / name
        return import_model(real_model(name), folder, describe=said.append), said

    return make


@pytest.mark.parametrize("name", FILES)
def test_the_tokens_of_a_text_are_those_of_transformers(imported, name):
    tokenizer = load_tokenizer(imported(name)[0])
    text = (REAL / "text.txt").read_text()
    ids = tokenizer.start_ids + tokenizer.encode(text)
    assert len(ids) > LENGTH
    assert ids == load_file(REAL / f"{name}.safetensors")["ids"].tolist()
    assert tokenizer.decode(tokenizer.encode("a  b\n\tc é 你好")) == "a  b\n\tc é 你好"


@pytest.mark.parametrize("name", FILES)
def test_the_logits_are_those_of_transformers(imported, name):
    golden = load_file(REAL / f"{name}.safetensors")
    ids = golden["ids"][:LENGTH]
    logits = np.asarray(swa_jax.load_model(imported(name)[0])(jnp.asarray(ids)[None]))[0]  # [T, V]
    few = logits[::EVERY][:, golden["columns"]]
    np.testing.assert_allclose(few, golden["logits"][: len(few)], rtol=0, atol=TOLERANCE)
    highest = logits.max(-1)
    totals = highest + np.log([np.exp(row - top).sum() for row, top in zip(logits, highest, strict=True)])
    log_probs = logits[np.arange(LENGTH - 1), ids[1:]] - totals[:-1]
    np.testing.assert_allclose(log_probs, golden["log_probs"][: LENGTH - 1], rtol=0, atol=TOLERANCE)


def test_what_is_said_of_a_model(imported):
    folder, said = imported("smollm2")
    assert "SmolLM2-135M-Instruct.Q4_1.gguf: weights of type Q4_1, Q8_0 become float32" in said
    assert open_checkpoint(folder).dtype == np.float32


def test_gemma_has_its_windows(imported):
    pattern = open_checkpoint(imported("gemma3-270m")[0]).pattern
    assert pattern.sliding_window == 512
    assert [i for i, kind in enumerate(pattern.layer_types) if kind == FULL] == [5, 11, 17]
    assert set(pattern.layer_types) == {FULL, WINDOW}
