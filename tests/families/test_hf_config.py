"""Configurations: Hugging Face's `config.json` to `ModelConfig` and `AttentionPattern`, and back."""

import dataclasses
import json
from pathlib import Path

import pytest

from swa_jax.errors import ConfigError
from swa_jax.families import FAMILIES, apply_pattern, hf_config, hf_pattern, model_config
from swa_jax.model.config import ModelConfig, RopeScaling
from swa_jax.model.layer_types import FULL, HYBRID, SWITCH, WINDOW
from swa_jax.model.pattern import AttentionPattern

SIZES = {
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}


def config_of(family: str, **keys) -> ModelConfig:
    return model_config({"model_type": family, **SIZES, **keys})


# ---- config.json to ModelConfig ----


def test_defaults_are_those_of_each_family():
    llama, mistral = config_of("llama"), config_of("mistral", num_attention_heads=8, hidden_size=32)
    assert (llama.num_key_value_heads, llama.head_dim, llama.max_position_embeddings) == (4, 6, 2048)
    assert (llama.rms_norm_eps, llama.rope_theta, llama.tie_word_embeddings) == (1e-6, 10000.0, False)
    assert (mistral.num_key_value_heads, mistral.head_dim, mistral.max_position_embeddings) == (8, 4, 131072)
    assert config_of("mistral", num_key_value_heads=None).num_key_value_heads == 4
    qwen3 = config_of("qwen3", num_attention_heads=32)
    assert (qwen3.num_key_value_heads, qwen3.head_dim, qwen3.max_position_embeddings) == (32, 128, 32768)
    assert config_of("qwen3", num_key_value_heads=2, head_dim=None).head_dim == 6


def test_biases_and_norms_of_each_family():
    def flags(family: str, **keys) -> tuple[bool, ...]:
        c = config_of(family, num_key_value_heads=2, **keys)
        return c.attention_bias, c.attention_out_bias, c.mlp_bias, c.qk_norm

    assert flags("llama") == (False, False, False, False)
    assert flags("llama", attention_bias=True, mlp_bias=True) == (True, True, True, False)
    assert flags("mistral", attention_bias=True) == (False, False, False, False)
    assert flags("ministral") == (False, False, False, False)
    assert flags("qwen2") == (True, False, False, False)
    assert flags("qwen3") == (False, False, False, True)
    assert flags("qwen3", attention_bias=True) == (True, True, False, True)


def test_rope_in_every_spelling():
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    expected = RopeScaling("llama3", 8.0, 64, 1.0, 4.0)
    new = scaling | {"rope_type": "llama3", "rope_theta": 5e5}
    for keys in (
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **scaling}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **scaling}},
        {"rope_parameters": new},
        {"rope_parameters": {FULL: new, WINDOW: new}},
        {"rope_theta": 1.0, "rope_scaling": None, "rope_parameters": new},
    ):
        config = config_of("llama", **keys)
        assert (config.rope_theta, config.rope_scaling) == (5e5, expected)
    yarn = config_of(
        "qwen3",
        num_key_value_heads=2,
        max_position_embeddings=4096,
        rope_scaling={
            "rope_type": "yarn",
            "factor": None,
            "original_max_position_embeddings": 1024,
            "beta_fast": None,
        },
    )
    assert yarn.rope_scaling == RopeScaling("yarn", 4.0, 1024)
    linear = config_of("llama", rope_scaling={"type": "linear", "factor": 2})
    assert linear.rope_scaling == RopeScaling("linear", 2.0)


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        (
            {"model_type": "gemma3"},
            "model_type 'gemma3' is not supported; supported: .*gemma3_text, .*llama, mellum, ministral, mistral",
        ),
        (
            {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}},
            "swat; its text_config is of model_type 'gemma3_text': save the text model alone",
        ),
        ({"model_type": None}, "model_type None is not supported"),
        (
            {"model_type": ["llama"], "text_config": {"model_type": []}},
            r"model_type \['llama'\] is not supported",
        ),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported: silu"),
        ({"quantization_config": {"bits": 4}}, "quantization_config without a quant_method is not supported"),
        ({"is_causal": False}, "is_causal is false .* is not supported; supported: causal models"),
        ({"num_experts": 8}, "num_experts is set, but mixtures of experts are not supported"),
        ({"use_mrope": True}, "use_mrope"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is not supported; supported: 1.0"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            r"'dynamic' is not supported; supported: default, linear, llama3, yarn, longrope; remove rope_scaling to "
            r"use the model up to max_position_embeddings \(2048\), or set yarn",
        ),
        (
            {"rope_scaling": {"rope_type": "longrope"}},
            "rope_scaling.short_factor is missing; rope_type 'longrope' needs it",
        ),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 3, "long_factor": [1.0] * 2}},
            r"rope_scaling.long_factor must have 3 numbers above 0, .* got \[1.0, 1.0\]",
        ),
        ({"partial_rotary_factor": "half"}, "partial_rotary_factor must be a number, got 'half'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor is missing"),
        ({"rope_scaling": "yarn"}, "'rope_scaling' must be a mapping"),
        ({"rope_scaling": {"rope_type": []}}, r"rope_scaling.rope_type '\[\]' is not supported"),
        ({"hidden_act": {}}, "hidden_act '{}' is not supported"),
        (
            {"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": "4k"}},
            "original_max_position_embeddings must be a whole number above 0, got '4k'",
        ),
        ({"rope_theta": "big"}, "rope_theta must be a positive number, got 'big'"),
        (
            {"rope_parameters": {FULL: {"rope_theta": 1e6}, WINDOW: {"rope_theta": 1e4}}},
            "rope_parameters differs between layer types",
        ),
        ({"hidden_size": None}, "missing key 'config.json.hidden_size'"),
        ({"num_hidden_layers": "3"}, "'config.json.num_hidden_layers' must be int, got '3'"),
        ({"num_attention_heads": 5}, r"hidden_size \(24\) is not a multiple of num_attention_heads \(5\)"),
        ({"num_key_value_heads": 3}, r"num_attention_heads \(4\) must be a multiple of num_key_value_heads"),
    ],
)
def test_what_a_configuration_may_not_ask_for(keys, sentence):
    with pytest.raises(ConfigError, match=sentence):
        model_config({"model_type": "llama", **SIZES} | keys)


def test_patterns_of_hf_configs_with_absent_keys():
    def types(family: str, **keys) -> str:
        pattern = hf_pattern({"model_type": family, **SIZES, **keys})
        return "".join("w" if kind == WINDOW else "F" for kind in pattern.layer_types) + str(
            pattern.sliding_window
        )

    assert types("mistral") == "www4096"  # the family's default window
    assert types("mistral", sliding_window=None) == "FFFNone"
    assert types("llama", sliding_window=9) == "FFFNone"  # Llama knows no windows
    # Hugging Face's classes of these families do not read the key.
    assert types("llama", sliding_window=9, layer_types=[WINDOW, FULL, FULL]) == "FFFNone"
    assert types("olmo2", sliding_window=9, layer_types=[WINDOW, FULL]) == "FFFNone"
    assert types("mistral", sliding_window=9, layer_types=[WINDOW, FULL, FULL]) == "www9"
    assert types("phi3", sliding_window=9, layer_types=[WINDOW, FULL, FULL]) == "www9"
    assert types("qwen2", sliding_window=9) == "FFFNone"
    assert types("qwen2", sliding_window=9, max_window_layers=1) == "FFFNone"  # stored, but not switched on
    assert types("qwen2", sliding_window=9, use_sliding_window=True, max_window_layers=1) == "Fww9"
    assert types("ministral", sliding_window=9, layer_types=[FULL, WINDOW, FULL]) == "FwF9"
    with pytest.raises(ConfigError, match="max_window_layers must be a whole number, got 'x'"):
        types("qwen2", sliding_window=9, use_sliding_window=True, max_window_layers="x")


# ---- ModelConfig to config.json ----

YARN = RopeScaling("yarn", 4.0, 512, truncate=False, mscale=1.0)


@pytest.mark.parametrize(
    "config",
    [
        config_of("llama", attention_bias=True, mlp_bias=True, head_dim=10),
        dataclasses.replace(config_of("llama"), rope_theta=5e5, rope_scaling=RopeScaling("llama3", 8.0, 64)),
        dataclasses.replace(
            config_of("mistral", num_key_value_heads=2), rope_scaling=RopeScaling("linear", 2.0)
        ),
        config_of("ministral", num_key_value_heads=2),
        config_of("qwen2", num_key_value_heads=2, tie_word_embeddings=True),
        dataclasses.replace(config_of("qwen3", num_key_value_heads=2), rope_scaling=YARN),
        ModelConfig(
            **SIZES,
            num_key_value_heads=2,
            head_dim=6,
            model_type="swat",
            attention_activation="sigmoid",
            position_embedding="alirope",
            alibi_negative_heads=2,
            alibi_positive_heads=2,
            rope_scaling=YARN,
        ),
    ],
    ids=lambda config: config.model_type,
)
def test_model_config_survives_hf_config(config):
    hf = json.loads(json.dumps(hf_config(config, dtype="bfloat16")))
    assert model_config(hf) == config
    assert (hf["model_type"], hf["dtype"]) == (config.model_type, "bfloat16")
    assert hf["architectures"][0].lower() == f"{config.model_type}forcausallm"
    del hf["rope_scaling"]  # transformers 5 reads rope_parameters alone
    if config.model_type != "swat":
        assert model_config(hf) == config


def test_a_model_its_family_cannot_express_is_written_as_swat():
    config = dataclasses.replace(config_of("llama"), qk_norm=True)
    hf = hf_config(config)
    assert hf["model_type"] == "swat"
    assert model_config(hf) == dataclasses.replace(config, model_type="swat")
    with pytest.raises(ConfigError, match=r"unknown key 'slope_schedul' .* did you mean 'slope_schedule'"):
        model_config(hf | {"slope_schedul": "swat"})
    with pytest.raises(ConfigError, match="model_type 'lama' is not known; did you mean 'llama'"):
        hf_config(dataclasses.replace(config, model_type="lama"))


def pattern_of(letters: str, **fields) -> AttentionPattern:
    kinds = {"F": FULL, "w": WINDOW, "h": HYBRID, "S": SWITCH}
    window = None if set(letters) == {"F"} else 9
    return AttentionPattern(tuple(kinds[letter] for letter in letters), window, **fields)


@pytest.mark.parametrize(
    ("family", "letters", "written_as"),
    [
        ("llama", "FFF", "llama"),
        ("llama", "www", "mistral"),
        ("llama", "wFw", "ministral"),
        ("mistral", "FFF", "mistral"),
        ("mistral", "www", "mistral"),
        ("mistral", "FwF", "ministral"),
        ("ministral", "FFF", "ministral"),
        ("ministral", "wwF", "ministral"),
        ("qwen2", "FFF", "qwen2"),
        ("qwen2", "FFw", "qwen2"),
        ("qwen2", "www", "qwen2"),
        ("qwen3", "wFw", "qwen3"),
        ("phi3", "FFF", "phi3"),
        ("phi3", "www", "phi3"),
        ("phi3", "wFw", "ministral"),
        ("cohere2", "FFF", "cohere2"),  # three layers: the fourth would be full
        ("cohere2", "www", "cohere2"),
        ("exaone4", "FFF", "exaone4"),
        ("exaone4", "www", "exaone4"),
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


LOCAL = {"rope_parameters": {FULL: {"rope_theta": 1e6}, WINDOW: {"rope_theta": 1e4}}}


@pytest.mark.parametrize("family", ["gemma3_text", "olmo3"])
def test_rope_stays_with_the_layer_it_was_trained_in(family):
    """Hugging Face chooses RoPE by the layer's type: only the types trained with, under any window, can be written."""
    types = [WINDOW, FULL, WINDOW]
    config = config_of(family, **LOCAL, num_key_value_heads=2, layer_types=types, sliding_window=5)
    assert (config.rope_layers, config.rope_theta) == (("local", "global", "local"), 1e6)
    assert config.local_rope_theta == 1e4
    trained, full = pattern_of("wFw"), pattern_of("FFF")
    for pattern, written, said in (
        (trained, trained, False),
        (full, full, False),
        (pattern_of("FFw"), full, True),
    ):
        hf, notice = apply_pattern(hf_config(config), pattern)
        assert (model_config(hf), hf_pattern(hf)) == (config, written)
        assert hf["layer_types"] == types
        assert (notice is not None) == said
    plain = config_of(family, num_key_value_heads=2, rope_theta=1e4, rope_local_base_freq=1e4)
    hf, notice = apply_pattern(hf_config(plain), pattern_of("FFw"))
    assert (model_config(hf), hf_pattern(hf), notice) == (plain, pattern_of("FFw"), None)
    with pytest.raises(
        ConfigError, match=r"rope_parameters.sliding_attention.rope_type 'linear' is not supported"
    ):
        config_of(family, rope_parameters={FULL: {}, WINDOW: {"rope_type": "linear", "factor": 2.0}})


@pytest.mark.parametrize("family", ["cohere2", "exaone4"])
def test_layers_without_rope_stay_those_it_was_trained_with(family):
    """Full layers have no rotary embeddings: only the types trained with, under any window, can be written."""
    types = [WINDOW, FULL, WINDOW]
    config = config_of(family, num_key_value_heads=2, layer_types=types, sliding_window=5)
    assert config.rope_layers == ("global", "none", "global")
    for pattern, written, noticed in (
        (pattern_of("wFw"), pattern_of("wFw"), False),
        (pattern_of("FFF"), pattern_of("FFF"), False),
        (pattern_of("FFw"), pattern_of("FFF"), True),
    ):
        hf, notice = apply_pattern(hf_config(config), pattern)
        assert (model_config(hf), hf_pattern(hf), hf["layer_types"]) == (config, written, types)
        assert (notice is not None) == noticed
    everywhere = config_of(family, num_key_value_heads=2, layer_types=[WINDOW] * 3)
    assert everywhere.rope_layers == ()
    nowhere = config_of(family, num_key_value_heads=2, layer_types=[FULL] * 3)
    assert nowhere.rope_layers == ("none",) * 3
    for config in (everywhere, nowhere):
        hf, notice = apply_pattern(hf_config(config), pattern_of("FFF"))
        assert (model_config(hf), hf_pattern(hf), notice) == (config, pattern_of("FFF"), None)


def test_keys_that_cohere_2_does_not_read():
    """Its released files have keys of Cohere's own code, which Hugging Face's class ignores."""
    own = {"use_qk_norm": True, "layer_switch": 2, "rotary_pct": 0.5, "use_parallel_block": False}
    plain = config_of("cohere2", num_key_value_heads=2)
    assert config_of("cohere2", num_key_value_heads=2, **own) == plain


def test_exaone_without_windows_turns_every_layer():
    config = config_of("exaone4", num_key_value_heads=2, sliding_window=None, layer_types=[FULL] * 3)
    assert config.rope_layers == ()
    assert config_of("exaone4", sliding_window_pattern=2, num_key_value_heads=2).rope_layers[1] == "none"
    hf, notice = apply_pattern(
        hf_config(config), pattern_of("wFw")
    )  # no window may have its RoPE in a full layer
    assert (model_config(hf), hf_pattern(hf), hf["sliding_window"]) == (config, pattern_of("FFF"), None)
    assert "rotary embeddings in these layers alone" in notice


FACTORS = {"short_factor": [1.0, 1.5, 2.0], "long_factor": [2.0, 3.0, 4.0]}


def test_longrope_in_every_spelling():
    """The class default of the first training's length is 4096; old checkpoints have other names for LongRoPE."""
    expected = RopeScaling("longrope", 4.0, 4096, short_factor=(1.0, 1.5, 2.0), long_factor=(2.0, 3.0, 4.0))
    sizes = {"max_position_embeddings": 16384}
    for keys in (
        {"rope_scaling": {"type": "longrope", **FACTORS}},
        {"rope_scaling": {"type": "su", **FACTORS}},
        {"rope_scaling": {"type": "yarn", **FACTORS}},
        {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, **FACTORS}},
    ):
        config = config_of("phi3", **sizes, **keys)
        assert (config.rope_scaling, config.rope_theta) == (expected, 1e4)
    hf = hf_config(config)
    assert set(hf["rope_scaling"]) == {"type", *FACTORS}  # transformers 4 refuses any other key
    assert hf["original_max_position_embeddings"] == 4096
    other = dataclasses.replace(config, rope_scaling=dataclasses.replace(expected, attention_factor=1.5))
    assert model_config(json.loads(json.dumps(hf_config(other)))) == other
    assert hf["pad_token_id"] is None  # the class default, 32000, is not in this vocabulary
    # Phi-3 knows no scaling but this one.
    assert hf_config(config_of("phi3").with_yarn(2.0))["model_type"] == "swat"


def test_part_of_the_channels_is_turned():
    config = config_of("phi3", head_dim=16, partial_rotary_factor=0.75)
    assert (config.partial_rotary_factor, config.rotary_dim) == (0.75, 12)
    hf = json.loads(json.dumps(hf_config(config)))
    assert (hf["model_type"], model_config(hf)) == ("phi3", config)
    assert model_config({**hf, "partial_rotary_factor": None}) == config  # rope_parameters says it too
    _, notice = apply_pattern(hf, pattern_of("wFw"))
    assert "rotary embeddings of part of a head's channels" in notice
    with pytest.raises(ConfigError, match=r"at most 1; got 1.5"):
        config_of("phi3", partial_rotary_factor=1.5)
    with pytest.raises(ConfigError, match=r"head_dim \(6\) \* partial_rotary_factor \(0.5\) must be even"):
        config_of("phi3", partial_rotary_factor=0.5)


def test_mellum_reads_rope_by_layer_type_alone():
    keys = {"num_key_value_heads": 2, "mlp_layer_types": ["dense"] * 3, "num_experts": 64, "rope_theta": 7.0}
    config = config_of("mellum", **keys, layer_types=[FULL, WINDOW, FULL], sliding_window=9)
    assert (config.rope_theta, config.local_rope_theta) == (5e5, 1e4)
    assert (config.rope_layers, config.head_dim, config.num_experts) == (
        ("global", "local", "global"),
        128,
        0,
    )
    hf, notice = apply_pattern(hf_config(config), pattern_of("FwF"))
    assert (model_config(hf), hf_pattern(hf), notice) == (config, pattern_of("FwF"), None)
    assert not {"rope_theta", "rope_scaling"} & hf.keys()
    # Every Qwen3 can be written as Mellum, which other servers know windows of.
    qwen3 = dataclasses.replace(
        config_of("qwen3", num_key_value_heads=2), model_type="mellum", rope_scaling=YARN
    )
    hf = hf_config(qwen3, pattern_of("wFw"))
    assert (hf["model_type"], model_config(hf), hf_pattern(hf)) == ("mellum", qwen3, pattern_of("wFw"))


@pytest.mark.parametrize(
    ("family", "keys", "sentence"),
    [
        ("cohere", {"use_qk_norm": True}, "use_qk_norm .* is not supported"),
        ("cohere2", {"logit_scale": 0}, "logit_scale must be a number above 0, got 0"),
        (
            "cohere2",
            {"sliding_window": None},
            "layer_types has sliding_attention, but sliding_window is null",
        ),
        (
            "cohere2",
            {"sliding_window_pattern": "LLLG"},
            "sliding_window_pattern must be a whole number above 0",
        ),
        (
            "exaone4",
            {"sliding_window_pattern": "LLLG", "num_key_value_heads": 2},
            "sliding_window_pattern must be a whole number above 0",
        ),
        (
            "phi3",
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            "'linear' is not supported for phi3; supported: default, longrope",
        ),
        (
            "mellum",
            {"mlp_layer_types": ["dence"] * 3},
            "mlp_layer_types.0' must be one of dense, sparse, got 'dence'",
        ),
        ("mellum", {"mlp_layer_types": ["dense"] * 2}, "mlp_layer_types has 2 entries for 3 layers"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention is not supported"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be a number above 0, got 0"),
        ("gemma2", {"final_logit_softcapping": -1.0}, "logit_softcap must be above 0, got -1.0"),
        ("gemma3_text", {"hidden_size": "24"}, "hidden_size must be a number above 0, got '24'"),
        ("granite", {"logits_scaling": 0}, "logits_scaling must be a number above 0, got 0"),
        (
            "gemma3_text",
            {"sliding_window_pattern": 0},
            "sliding_window_pattern must be a whole number above 0",
        ),
        (
            "olmo3",
            {"layer_types": "full_attention"},
            "layer_types must be a list with one type a layer, got 'full",
        ),
        ("smollm3", {"no_rope_layers": [[], 1, 1]}, "no_rope_layers must be a list"),
    ],
)
def test_what_these_families_refuse(family, keys, sentence):
    with pytest.raises(ConfigError, match=sentence):
        config_of(family, **keys)


@pytest.mark.parametrize(
    "keys", [{"no_rope_layers": [1, 0]}, {"no_rope_layers": "1"}, {"no_rope_layer_interval": 0}]
)
def test_layers_without_rope_are_named_for_every_layer(keys):
    with pytest.raises(
        ConfigError, match=r"no_rope_layers must be a list with 1 .* for each of the 3 layers"
    ):
        config_of("smollm3", **keys)
    assert config_of("smollm3", no_rope_layers=[1, 0, 1, 0]).rope_layers == ("global", "none", "global")
    assert config_of("smollm3").rope_layers == ()  # three layers: the fourth would be without
    assert config_of("smollm3", no_rope_layer_interval=2).rope_layers == ("global", "none", "global")


def test_the_page_on_families_has_a_line_for_each():
    page = (Path(__file__).parents[2] / "docs/families.md").read_text()
    first_table = page.split("| model_type |")[1].split("\n\n")[0]
    rows = [line.split("`")[1] for line in first_table.splitlines() if line.startswith("| `")]
    assert sorted(rows) == sorted(FAMILIES)


def test_more_layers_than_memory_holds_are_one_sentence():
    with pytest.raises(ConfigError, match="num_hidden_layers must be at most 100000"):
        config_of("gemma3_text", num_hidden_layers=10**30)


# ---- experts ----

SPARSE = {"num_key_value_heads": 2, "num_experts_per_tok": 2, "num_experts": 4, "moe_intermediate_size": 16}


def test_experts_of_each_family():
    qwen3 = config_of("qwen3_moe", **SPARSE, decoder_sparse_step=2)
    assert (qwen3.num_experts, qwen3.num_experts_per_tok, qwen3.moe_intermediate_size) == (4, 2, 16)
    assert (qwen3.mlp_layer_types, qwen3.norm_topk_prob) == (("dense", "sparse", "dense"), False)
    assert config_of("qwen3_moe", **SPARSE, mlp_only_layers=[0]).sparse_layers == (1, 2)
    assert config_of("qwen3_moe", **SPARSE | {"num_experts": 0}).num_experts == 0
    defaults = config_of("qwen3_moe", num_key_value_heads=2)
    assert (defaults.num_experts, defaults.num_experts_per_tok, defaults.moe_intermediate_size) == (
        128,
        8,
        768,
    )
    mixtral = config_of("mixtral", num_key_value_heads=2)
    assert (mixtral.num_experts, mixtral.num_experts_per_tok, mixtral.moe_intermediate_size) == (8, 2, 32)
    assert (mixtral.norm_topk_prob, mixtral.rope_theta, mixtral.rms_norm_eps) == (True, 1e6, 1e-5)
    oss = config_of("gpt_oss", num_key_value_heads=2, num_hidden_layers=2)
    assert (oss.num_experts, oss.num_experts_per_tok, oss.swiglu_limit, oss.swiglu_alpha) == (
        128,
        4,
        7.0,
        1.702,
    )
    assert oss.rope_scaling == RopeScaling("yarn", 32.0, 4096, truncate=False)
    assert (oss.rope_theta, oss.sink_logits, oss.fused_experts, oss.mlp_bias) == (150000.0, True, True, True)
    assert hf_pattern({"model_type": "gpt_oss", **SIZES}).layer_types == (WINDOW, FULL, WINDOW)
    assert hf_pattern({"model_type": "gpt_oss", **SIZES}).sliding_window == 128
    mellum = config_of("mellum", num_experts=2, num_experts_per_tok=2, num_key_value_heads=2)
    assert (mellum.moe_intermediate_size, mellum.norm_topk_prob, mellum.head_dim) == (896, True, 128)
    assert (mellum.rope_theta, mellum.rope_layers) == (500000.0, ())
    types = {"layer_types": [WINDOW, FULL, WINDOW], "rope_theta": 7.0}
    local = config_of("mellum", num_experts=2, num_experts_per_tok=2, num_key_value_heads=2, **types)
    assert (local.rope_layers, local.local_rope_theta) == (("local", "global", "local"), 10000.0)
    assert local.rope_theta == 500000.0  # what Hugging Face's class does not read is not read


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"num_experts": "4"}, "num_experts must be a whole number, got '4'"),
        (
            {"num_experts": None, "num_local_experts": 2.5},
            "num_local_experts must be a whole number, got 2.5",
        ),
        ({"num_experts_per_tok": True}, "num_experts_per_tok must be a whole number, got True"),
        ({"num_experts_per_tok": 5}, r"num_experts_per_tok must be from 1 to num_experts \(4\), got 5"),
        ({"moe_intermediate_size": -1}, "moe_intermediate_size must be a whole number, got -1"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step must be a whole number above 0, got 0"),
        ({"mlp_only_layers": 3}, "mlp_only_layers must be a list of layers, got 3"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "quant_method 'mxfp4' is not supported"),
        ({"num_hidden_layers": "3"}, "'config.json.num_hidden_layers' must be int, got '3'"),
    ],
)
def test_experts_that_cannot_be(keys, sentence):
    with pytest.raises(ConfigError, match=sentence) as caught:
        config_of("qwen3_moe", **SPARSE | keys)
    assert "\n" not in str(caught.value)


def test_mlp_types_that_cannot_be():
    with pytest.raises(
        ConfigError, match="mlp_layer_types must be a list with one type a layer, got 'sparse'"
    ):
        config_of("mellum", **SPARSE, mlp_layer_types="sparse")
    with pytest.raises(ConfigError, match="mlp_layer_types has 2 entries for 3 layers"):
        config_of("mellum", **SPARSE, mlp_layer_types=["sparse", "dense"])


def test_qwen3_with_experts_and_some_windows_becomes_mellum():
    """Qwen3-MoE's class knows windows in every layer or in none."""
    config = config_of("qwen3_moe", **SPARSE, mlp_only_layers=[1])
    hybrid = AttentionPattern((WINDOW, FULL, WINDOW), 5)
    hf, notice = apply_pattern(hf_config(config), hybrid)
    assert (hf["model_type"], hf["mlp_layer_types"]) == ("mellum", ["sparse", "dense", "sparse"])
    assert not {"rope_scaling", "rope_theta"} & hf.keys()  # Hugging Face's class fails on them
    assert "changed from qwen3_moe to mellum" in notice
    assert hf_pattern(hf) == hybrid
    assert dataclasses.replace(model_config(hf), model_type="qwen3_moe") == config
    whole = AttentionPattern((WINDOW,) * 3, 5)
    assert apply_pattern(hf_config(config), whole)[0]["model_type"] == "qwen3_moe"


def test_what_no_other_family_can_say_of_experts():
    config = config_of("mixtral", num_key_value_heads=2)
    hf, notice = apply_pattern(hf_config(config), AttentionPattern((WINDOW, FULL, WINDOW), 5))
    assert (hf["model_type"], hf_pattern(hf).layer_types) == ("mixtral", (FULL,) * 3)
    assert "cannot express this pattern" in notice
