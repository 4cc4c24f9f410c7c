"""The config.json of 68 released models: each imports with its own names and shapes, or is refused well."""

import hashlib
import json
from pathlib import Path

import pytest
from layer_letters import letters_of

from swa_jax.base.errors import ConfigError
from swa_jax.checkpoint.families import apply_pattern, hf_config, hf_pattern, model_config
from swa_jax.checkpoint.families.text_part import text_config
from swa_jax.checkpoint.tensor_names import hf_tensors
from swa_jax.model.layer_types import FULL, LINEAR, WINDOW
from swa_jax.model.pattern import AttentionPattern

HERE = Path(__file__).parent
CONFIGS = {file.stem: json.loads(file.read_text()) for file in (HERE / "configs").glob("*.json")}
# From transformers' own models: see python -m scripts.goldens configs.
GOLDENS = json.loads((HERE / "config_goldens.json").read_text())

UNKNOWN = "config.json: model_type '{}' is not supported; supported: "
REFUSED = {
    "LGAI-EXAONE--EXAONE-3.5-32B-Instruct-AWQ": UNKNOWN.format("exaone"),
    "Qwen--Qwen1.5-MoE-A2.7B": UNKNOWN.format("qwen2_moe"),
    "Qwen--Qwen2.5-VL-7B-Instruct": UNKNOWN.format("qwen2_5_vl"),
    "Qwen--Qwen3.5-27B": UNKNOWN.format("qwen3_5"),
    "deepseek-ai--DeepSeek-V2-Lite": UNKNOWN.format("deepseek_v2"),
    "deepseek-ai--DeepSeek-V3": UNKNOWN.format("deepseek_v3"),
    "google--gemma-2b": UNKNOWN.format("gemma"),
    "google--gemma-4-26B-A4B": UNKNOWN.format("gemma4"),
    "internlm--internlm2_5-7b-chat": UNKNOWN.format("internlm2"),
    "meta-llama--Llama-4-Scout-17B-16E-Instruct": UNKNOWN.format("llama4"),
    "mistralai--Devstral-2-123B-Instruct-2512": "quant_method 'fp8' without weight_block_size (one scale for a",
    "moonshotai--Kimi-K2-Instruct": UNKNOWN.format("kimi_k2"),
    "Qwen--Qwen3-32B-FP8-Static-PerTensor": "quantization_config without a quant_method is not supported",
    "stepfun-ai--Step-3.7-Flash": UNKNOWN.format("step3p7"),
    "stabilityai--stablelm-2-zephyr-1_6b": UNKNOWN.format("stablelm"),
}


def digest(tensors: dict[str, tuple[int, ...]]) -> str:
    lines = [f"{name} {'x'.join(map(str, shape))}" for name, shape in sorted(tensors.items())]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def test_the_set_is_that_known():
    assert len(CONFIGS) == 68
    assert REFUSED.keys() <= CONFIGS.keys()
    assert GOLDENS.keys() >= CONFIGS.keys() - REFUSED.keys()
    assert len(CONFIGS.keys() - REFUSED.keys()) == 53


@pytest.mark.parametrize("name", sorted(CONFIGS.keys() - REFUSED.keys()))
def test_a_model_is_read_as_transformers_reads_it(name):
    hf, golden = CONFIGS[name], GOLDENS[name]
    config, pattern = model_config(hf), hf_pattern(hf)
    pattern.validate(config)
    tensors = hf_tensors(config)
    assert (len(tensors), digest(tensors)) == (golden["tensors"], golden["sha256"])
    assert (letters_of(pattern), pattern.sliding_window) == (golden["layers"], golden["sliding_window"])
    written = json.loads(json.dumps(hf_config(config, pattern)))
    assert written["model_type"] == hf["model_type"]
    assert (model_config(written), hf_pattern(written)) == (config, pattern)


def test_devstral_is_read_where_its_weights_are_not_quantised():
    """Its factor on queries is 0: it is a Mistral with YaRN."""
    name = "mistralai--Devstral-2-123B-Instruct-2512"
    hf = {key: value for key, value in CONFIGS[name].items() if key != "quantization_config"}
    tensors = hf_tensors(model_config(hf))
    assert (len(tensors), digest(tensors)) == (GOLDENS[name]["tensors"], GOLDENS[name]["sha256"])
    assert letters_of(hf_pattern(hf)) == GOLDENS[name]["layers"]
    windowed = AttentionPattern((WINDOW, FULL) * 44, 4096)
    assert apply_pattern(hf, windowed)[0]["model_type"] == "ministral"


def test_the_language_model_of_qwen3_5_has_the_tensors_of_transformers():
    """Names and shapes of transformers 5.19's class for its text_config; where that is alone, nothing is refused."""
    hf = text_config(CONFIGS["Qwen--Qwen3.5-27B"])
    assert hf is not None
    config, pattern, tensors = model_config(hf), hf_pattern(hf), hf_tensors(model_config(hf))
    digits = "015728d7a870b14786cea2f4deb093740c1a333ca75f166cd0adb0c7dfbeb848"
    assert (len(tensors), digest(tensors)) == (851, digits)
    assert pattern == AttentionPattern(((LINEAR,) * 3 + (FULL,)) * 16)
    pattern.validate(config)
    assert (model_config(hf_config(config, pattern)), hf_pattern(hf_config(config, pattern))) == (config, pattern)
    assert apply_pattern(hf, AttentionPattern.everywhere(WINDOW, config, 4096))[1].startswith("Hugging Face cannot")


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_model_is_refused_in_one_sentence_that_names_the_reason(name):
    with pytest.raises(ConfigError) as caught:
        model_config(CONFIGS[name])
    assert REFUSED[name] in str(caught.value)
    assert "\n" not in str(caught.value)
