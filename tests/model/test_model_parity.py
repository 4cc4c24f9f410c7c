"""The decoder against what Hugging Face's own models computed (tests/golden), at f32."""

import dataclasses
import functools
import json
from pathlib import Path

import numpy as np
import pytest
from flax import nnx
from layer_letters import letters_of
from safetensors.numpy import load_file

from swa_jax.checkpoint.families import apply_pattern, hf_config, hf_pattern, model_config
from swa_jax.model.attention import LayerData, kinds_of, layer_data
from swa_jax.model.decoder import Decoder
from swa_jax.model.layer_types import FULL, WINDOW
from swa_jax.model.layers import rope_frequencies
from swa_jax.model.pattern import AttentionPattern

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = sorted(folder.parent.name for folder in GOLDEN.glob("*/golden.safetensors"))
# The first golden of each family.
FAMILIES = {json.loads((GOLDEN / case / "config.json").read_text())["model_type"]: case for case in reversed(CASES)}
ROPE = json.loads((GOLDEN / "rope.json").read_text())
TOLERANCE = 1e-4
KINDS = kinds_of(AttentionPattern((FULL, WINDOW), 1))
# The letters of each case's layers, as the table in the goldens' README has them.
PATTERNS = {
    cells[1].strip(" `"): cells[3].strip(" `")
    for cells in (line.split("|") for line in (GOLDEN / "README.md").read_text().splitlines())
    if len(cells) > 3 and cells[1].startswith(" `")
}


@functools.cache
def golden(case: str) -> dict[str, np.ndarray]:
    return load_file(GOLDEN / case / "golden.safetensors")


@nnx.jit
def logits_by(model: Decoder, tokens: np.ndarray, data: LayerData):
    return model.logits(model.features(tokens, data=data)[0])


def logits(model: Decoder, case: str, *kinds: str) -> np.ndarray:
    """With the layers of the config, or all of one kind. To a program the kinds of layers are data: one a golden."""
    window = AttentionPattern((WINDOW,) * model.config.num_hidden_layers, model.pattern.sliding_window or 8)
    pattern = dataclasses.replace(window, layer_types=kinds * window.num_layers or model.pattern.layer_types)
    data = layer_data(pattern, model.config, KINDS)
    return np.asarray(logits_by(model.with_pattern(window), golden(case)["tokens"], data))


def test_the_cases_are_those_known():
    assert sorted(PATTERNS) == CASES


@pytest.mark.parametrize("case", CASES)
def test_logits_with_the_pattern_of_the_config(load, case):
    model = load(case)
    assert letters_of(model.pattern) == PATTERNS[case]
    np.testing.assert_allclose(logits(model, case), golden(case)["logits"], rtol=0, atol=TOLERANCE)


@nnx.jit
def called(model: Decoder, tokens: np.ndarray):
    return model(tokens)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("case", sorted(FAMILIES.values()))
def test_a_plain_call_gives_the_same_logits(load, case):
    """With the layers of the config as the program has them, and not as data."""
    found = called(load(case), golden(case)["tokens"])
    np.testing.assert_allclose(found, golden(case)["logits"], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("case", [case for case in CASES if "w" in PATTERNS[case]])
def test_other_patterns_on_the_same_weights(load, case):
    model, expected = load(case), golden(case)
    assert expected["tokens"].shape[1] >= 4 * model.pattern.sliding_window
    full = logits(model, case, FULL)
    np.testing.assert_allclose(full, expected["logits_full"], rtol=0, atol=TOLERANCE)
    # Were windows and full attention alike here, the test above would show nothing.
    after_window = np.s_[:, model.pattern.sliding_window :]
    assert np.abs(full - expected["logits"])[after_window].max() > 100 * TOLERANCE
    if "logits_window" in expected:
        window = logits(model, case, WINDOW)
        np.testing.assert_allclose(window, expected["logits_window"], rtol=0, atol=TOLERANCE)
        assert np.abs(window - expected["logits"])[after_window].max() > 100 * TOLERANCE


@pytest.mark.parametrize("case", [case for case in CASES if "w" not in PATTERNS[case]])
def test_windows_on_the_weights_of_a_full_model(load, case):
    """No oracle knows these models with windows: the first window must agree with full attention, the rest differ."""
    model, expected = load(case), golden(case)["logits"]
    actual = logits(model, case, WINDOW)
    np.testing.assert_allclose(actual[:, :8], expected[:, :8], rtol=0, atol=TOLERANCE)
    assert np.abs(actual - expected)[:, 8:].max() > 100 * TOLERANCE


@pytest.mark.parametrize("case", CASES)
def test_a_family_writes_what_it_reads(case):
    """`config.json` survives being read and written, under its own pattern and under full attention."""
    hf = json.loads((GOLDEN / case / "config.json").read_text())
    config, pattern = model_config(hf), hf_pattern(hf)
    written = hf_config(config, pattern)
    assert (written["model_type"], written["architectures"]) == (hf["model_type"], hf["architectures"])
    assert (model_config(written), hf_pattern(written)) == (config, pattern)
    full = AttentionPattern((FULL,) * pattern.num_layers)
    written, notice = apply_pattern(hf, full)
    assert (model_config(written), hf_pattern(written), notice) == (config, full, None)


@pytest.mark.parametrize("case", sorted(folder.parent.name for folder in GOLDEN.glob("*/legacy_config.json")))
def test_transformers_4_and_5_spell_the_same_model(case):
    new, old = (json.loads((GOLDEN / case / f).read_text()) for f in ("config.json", "legacy_config.json"))
    assert ("rope_parameters" in new, "rope_parameters" in old) == (True, False)
    assert model_config(old) == model_config(new)
    assert hf_pattern(old) == hf_pattern(new)


@pytest.mark.parametrize("name", ROPE)
def test_rope_frequencies_of_released_models(name):
    case = ROPE[name]
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    config = model_config(
        {"model_type": "llama", **sizes, "num_attention_heads": 1, "max_position_embeddings": 131072}
        | {"head_dim": case["head_dim"], "rope_parameters": case["rope_parameters"]}
    )
    length = case.get("length", 1)
    frequencies, factor = rope_frequencies(config.rope_theta, config.rope_scaling, config, length)
    np.testing.assert_allclose(frequencies, case["inv_freq"], rtol=1e-6)
    np.testing.assert_allclose(factor, case["attention_factor"], rtol=1e-12)
