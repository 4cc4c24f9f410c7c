"""Patterns: which layers of Hugging Face's `config.json` have windows, and what each family can say of them."""

import dataclasses

import pytest
from layer_letters import letters_of
from small_configs import SIZES, config_of, pattern_of

from swa_jax.base.errors import ConfigError
from swa_jax.checkpoint.families import apply_pattern, hf_config, hf_pattern, model_config
from swa_jax.model.layer_types import FULL, WINDOW


def test_patterns_of_hf_configs_with_absent_keys():
    def types(family: str, **keys) -> str:
        pattern = hf_pattern({"model_type": family, **SIZES, **keys})
        return letters_of(pattern) + str(pattern.sliding_window)

    assert types("mistral") == "www4096"  # the family's default window
    assert types("mistral", sliding_window=None) == "FFFNone"
    assert types("llama") == "FFFNone"
    assert types("llama", sliding_window=9) == "FFFNone"  # Llama knows no windows
    # Hugging Face's classes of these families do not read the key.
    assert types("llama", sliding_window=9, layer_types=[WINDOW, FULL, FULL]) == "FFFNone"
    assert types("olmo2", sliding_window=9, layer_types=[WINDOW, FULL]) == "FFFNone"
    assert types("mistral", sliding_window=9, layer_types=[WINDOW, FULL, FULL]) == "www9"
    assert types("phi3", sliding_window=9, layer_types=[WINDOW, FULL, FULL]) == "www9"
    assert types("qwen2", sliding_window=9) == "FFFNone"
    assert types("qwen2", sliding_window=9, max_window_layers=1) == "FFFNone"  # stored, but not switched on
    assert types("qwen2", sliding_window=9, use_sliding_window=True, max_window_layers=1) == "Fww9"
    switched_on = {"sliding_window": 9, "use_sliding_window": True}
    assert types("qwen3", **switched_on) == "FFFNone"  # from layer 28 on by default
    assert types("qwen3", **switched_on, layer_types=[WINDOW, FULL, WINDOW]) == "wFw9"
    assert types("ministral", sliding_window=9, layer_types=[FULL, WINDOW, FULL]) == "FwF9"


@pytest.mark.parametrize(
    ("family", "letters", "written_as"),
    [
        ("llama", "www", "mistral"),
        ("llama", "wFw", "ministral"),
        ("mistral", "FFF", "mistral"),
        ("mistral", "FwF", "ministral"),
        ("qwen2", "FFw", "qwen2"),
        ("qwen2", "www", "qwen2"),
        ("phi3", "FFF", "phi3"),
        ("phi3", "wFw", "ministral"),
        ("exaone4", "www", "exaone4"),  # three layers: the fourth would be full
    ],
)
def test_patterns_hugging_face_knows(family, letters, written_as):
    pattern, config = pattern_of(letters), config_of(family, num_key_value_heads=2, head_dim=6)
    for hf in (hf_config(config, pattern), apply_pattern(hf_config(config), pattern)[0]):
        assert (hf["model_type"], hf["architectures"]) == (written_as, [f"{written_as.title()}ForCausalLM"])
        assert hf_pattern(hf) == pattern
        assert dataclasses.replace(model_config(hf), model_type=family) == config
    if "max_window_layers" in hf and "wF" not in letters:  # what readers go by that do not know `layer_types`
        assert hf_pattern({key: value for key, value in hf.items() if key != "layer_types"}) == pattern
    # Absent keys mean something else in another family.
    short = {"model_type": family, **SIZES, "num_key_value_heads": 2, "head_dim": 6}
    again = model_config(apply_pattern(short, pattern)[0])
    assert dataclasses.replace(again, model_type=family) == model_config(short)


@pytest.mark.parametrize(
    ("family", "pattern", "reason"),
    [
        ("qwen3", pattern_of("whF", full_kv_heads=((), (1,), ())), "single KV heads"),
        ("qwen3", pattern_of("wSF"), "routes tokens"),
        ("qwen3", pattern_of("wwF", num_sink_tokens=4), "num_sink_tokens = 4"),
        ("qwen3", pattern_of("wwF", full_attention_decode=True), "full_attention_decode"),
        ("granite", pattern_of("wwF"), "Granite's factors"),
    ],
)
def test_patterns_hugging_face_does_not_know(family, pattern, reason):
    config = config_of(family, num_key_value_heads=2, attention_bias=True)
    hf, notice = apply_pattern(hf_config(config), pattern)
    assert hf_pattern(hf) == pattern_of("FFF")
    assert model_config(hf) == config
    assert reason in notice
    assert "pattern.json" in notice


@pytest.mark.parametrize(
    ("family", "other", "architecture"),
    [("llama", "smollm3", "SmolLM3ForCausalLM"), ("olmo2", "olmo3", "Olmo3ForCausalLM")],
)
def test_another_family_that_computes_the_same_is_written(family, other, architecture):
    """No Llama knows windows, but SmolLM3 has its biases and knows them, where every layer has rotary embeddings."""
    config, pattern = config_of(family, attention_bias=True, mlp_bias=True), pattern_of("wwF")
    hf, notice = apply_pattern(hf_config(config) | {"bos_token_id": 7}, pattern)
    assert (hf["model_type"], hf["architectures"]) == (other, [architecture])
    assert (dataclasses.replace(model_config(hf), model_type=family), hf_pattern(hf)) == (config, pattern)
    assert hf["bos_token_id"] == 7
    assert f"model_type changed from {family} to {other}" in notice


def assert_types_are_kept(config, types):
    """Under any window; where a full layer would get one, all layers are written full."""
    for pattern, written in (("wFw", "wFw"), ("FFF", "FFF"), ("FFw", "FFF")):
        hf, notice = apply_pattern(hf_config(config), pattern_of(pattern))
        assert (model_config(hf), hf_pattern(hf), hf["layer_types"]) == (config, pattern_of(written), types)
        assert (notice is not None) == (pattern != written)


LOCAL = {"rope_parameters": {FULL: {"rope_theta": 1e6}, WINDOW: {"rope_theta": 1e4}}}


@pytest.mark.parametrize("family", ["gemma3_text", "olmo3"])
def test_rope_stays_with_the_layer_it_was_trained_in(family):
    """Hugging Face chooses RoPE by the layer's type: only the types trained with, under any window, can be written."""
    types = [WINDOW, FULL, WINDOW]
    config = config_of(family, **LOCAL, num_key_value_heads=2, layer_types=types, sliding_window=5)
    assert (config.rope_layers, config.rope_theta) == (("local", "global", "local"), 1e6)
    assert config.local_rope_theta == 1e4
    assert_types_are_kept(config, types)
    plain = config_of(family, num_key_value_heads=2, rope_theta=1e4, rope_local_base_freq=1e4)
    hf, notice = apply_pattern(hf_config(plain), pattern_of("FFw"))
    assert (model_config(hf), hf_pattern(hf), notice) == (plain, pattern_of("FFw"), None)
    with pytest.raises(ConfigError, match=r"rope_parameters.sliding_attention.rope_type 'linear' is not supported"):
        config_of(family, rope_parameters={FULL: {}, WINDOW: {"rope_type": "linear", "factor": 2.0}})


@pytest.mark.parametrize("family", ["cohere2", "exaone4"])
def test_layers_without_rope_stay_those_it_was_trained_with(family):
    """Full layers have no rotary embeddings: only the types trained with, under any window, can be written."""
    types = [WINDOW, FULL, WINDOW]
    config = config_of(family, num_key_value_heads=2, layer_types=types, sliding_window=5)
    assert config.rope_layers == ("global", "none", "global")
    assert_types_are_kept(config, types)
    everywhere = config_of(family, num_key_value_heads=2, layer_types=[WINDOW] * 3)
    assert everywhere.rope_layers == ()
    nowhere = config_of(family, num_key_value_heads=2, layer_types=[FULL] * 3)
    assert nowhere.rope_layers == ("none",) * 3
    for config in (everywhere, nowhere):
        hf, notice = apply_pattern(hf_config(config), pattern_of("FFF"))
        assert (model_config(hf), hf_pattern(hf), notice) == (config, pattern_of("FFF"), None)


def test_exaone_without_windows_turns_every_layer():
    config = config_of("exaone4", num_key_value_heads=2, sliding_window=None, layer_types=[FULL] * 3)
    assert config.rope_layers == ()
    assert config_of("exaone4", sliding_window_pattern=2, num_key_value_heads=2).rope_layers[1] == "none"
    hf, notice = apply_pattern(hf_config(config), pattern_of("wFw"))  # no window may have its RoPE in a full layer
    assert (model_config(hf), hf_pattern(hf), hf["sliding_window"]) == (config, pattern_of("FFF"), None)
    assert "rotary embeddings in these layers alone" in notice
