"""Configurations: Hugging Face's `config.json` to `ModelConfig`, and back."""

import dataclasses
import json
from pathlib import Path

import pytest
from small_configs import SIZES, config_of, pattern_of

from swa_jax.base.errors import ConfigError
from swa_jax.checkpoint.families import FAMILIES, apply_pattern, hf_config, hf_pattern, model_config
from swa_jax.model.config import ModelConfig, RopeScaling
from swa_jax.model.layer_types import FULL, WINDOW

DEFAULTS = json.loads(Path(__file__).with_name("default_configs.json").read_text())  # transformers' own


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"swat"}))
def test_a_key_that_is_absent_has_the_default_of_transformers(family):
    assert family in DEFAULTS, "run python -m scripts.goldens configs, which says where"
    keys = DEFAULTS[family]
    full = model_config(keys), hf_pattern(keys)
    sizes = {"model_type": family} | {key: keys[key] for key in SIZES}
    for absent in keys.keys() - sizes.keys():
        rest = {key: value for key, value in keys.items() if key != absent}
        assert (model_config(rest), hf_pattern(rest)) == full, absent
    assert (model_config(sizes), hf_pattern(sizes)) == full


@pytest.mark.parametrize("family", sorted(DEFAULTS))
def test_a_key_of_another_value_is_written_as_it_is_read(family):
    kept = 0
    for key, value in DEFAULTS[family].items():
        if isinstance(value, int | float):
            hf = DEFAULTS[family] | {key: not value if isinstance(value, bool) else 2 * value or 1}
            try:
                config, pattern = model_config(hf), hf_pattern(hf)
                pattern.validate(config)
            except ConfigError:
                continue
            written = json.loads(json.dumps(hf_config(config, pattern)))
            assert (model_config(written), hf_pattern(written)) == (config, pattern), key
            assert written["model_type"] == family, key
            kept += 1
    assert kept > 10


@pytest.mark.parametrize("family", ["cohere2", "exaone4", "gemma3_text", "mellum", "olmo3", "phi3"])
def test_a_window_over_all_positions_is_none(family):
    keys = DEFAULTS[family] | {"sliding_window": 24, "use_sliding_window": True, "max_position_embeddings": 25}
    keys["layer_types"] = [WINDOW] * keys["num_hidden_layers"]
    assert hf_pattern(keys).sliding_window == 24
    shorter = hf_pattern(keys | {"max_position_embeddings": 24})
    assert (shorter.sliding_window, set(shorter.layer_types)) == (None, {FULL})


def test_the_default_padding_of_phi3_is_written_off_where_the_vocabulary_does_not_hold_it():
    for size, absent in ((32000, True), (32001, False)):
        config = config_of("phi3", vocab_size=size)
        assert ("pad_token_id" in hf_config(config, pattern_of("FFF"))) == absent


def test_heads_that_are_null():
    assert config_of("mistral", num_key_value_heads=None).num_key_value_heads == 4
    assert config_of("qwen3", num_key_value_heads=2, head_dim=None).head_dim == 6


def test_rope_in_every_spelling():
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    expected = RopeScaling("llama3", 8.0, 64, 1.0, 4.0)
    new = scaling | {"rope_type": "llama3", "rope_theta": 5e5}
    for keys in (
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **scaling}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **scaling}},
        {"rope_parameters": new},
        {"rope_parameters": {FULL: new, WINDOW: new}},
        {"rope_parameters": {FULL: new}},
        {"rope_theta": 1.0, "rope_scaling": None, "rope_parameters": new},
    ):
        config = config_of("llama", **keys)
        assert (config.rope_theta, config.rope_scaling) == (5e5, expected)
    yarn = config_of(
        "qwen3",
        num_key_value_heads=2,
        max_position_embeddings=4096,
        rope_scaling={"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 1024, "beta_fast": None},
    )
    assert yarn.rope_scaling == RopeScaling("yarn", 4.0, 1024)
    linear = config_of("llama", rope_scaling={"type": "linear", "factor": 2})
    assert linear.rope_scaling == RopeScaling("linear", 2.0)


# ---- ModelConfig to config.json ----

YARN = RopeScaling("yarn", 4.0, 512, truncate=False, mscale=1.0)


@pytest.mark.parametrize(
    "config",
    [
        dataclasses.replace(config_of("llama"), rope_theta=5e5, rope_scaling=RopeScaling("llama3", 8.0, 64)),
        dataclasses.replace(config_of("mistral", num_key_value_heads=2), rope_scaling=RopeScaling("linear", 2.0)),
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


def test_keys_that_cohere_2_does_not_read():
    """Its released files have keys of Cohere's own code, which Hugging Face's class ignores."""
    own = {"use_qk_norm": True, "layer_switch": 2, "rotary_pct": 0.5, "use_parallel_block": False}
    plain = config_of("cohere2", num_key_value_heads=2)
    assert config_of("cohere2", num_key_value_heads=2, **own) == plain


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


def test_part_of_the_channels_is_rotated():
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
    assert (config.rope_layers, config.head_dim, config.num_experts) == (("global", "local", "global"), 128, 0)
    hf, notice = apply_pattern(hf_config(config), pattern_of("FwF"))
    assert (model_config(hf), hf_pattern(hf), notice) == (config, pattern_of("FwF"), None)
    assert not {"rope_theta", "rope_scaling"} & hf.keys()
    # Every Qwen3 can be written as Mellum, which other servers know windows of.
    qwen3 = dataclasses.replace(config_of("qwen3", num_key_value_heads=2), model_type="mellum", rope_scaling=YARN)
    hf = hf_config(qwen3, pattern_of("wFw"))
    assert (hf["model_type"], model_config(hf), hf_pattern(hf)) == ("mellum", qwen3, pattern_of("wFw"))


def test_gemma_3_caps_no_attention_logits():
    """transformers stores the key and never applies it; Gemma 2 does, and both cap the last logits."""
    keys = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    caps = {name: config_of(name, **keys) for name in ("gemma2", "gemma3_text")}
    assert (caps["gemma2"].attention_softcap, caps["gemma3_text"].attention_softcap) == (50.0, None)
    assert (caps["gemma2"].logit_softcap, caps["gemma3_text"].logit_softcap) == (30.0, 30.0)


def test_layers_without_rope_are_named_for_every_layer():
    assert config_of("smollm3", no_rope_layers=[1, 0, 1, 0]).rope_layers == ("global", "none", "global")
    assert config_of("smollm3").rope_layers == ()  # three layers: the fourth would be without
    assert config_of("smollm3", no_rope_layer_interval=2).rope_layers == ("global", "none", "global")


def test_the_page_on_families_has_a_line_for_each():
    page = (Path(__file__).parents[3] / "docs/families.md").read_text()
    first_table = page.split("| model_type |")[1].split("\n\n")[0]
    rows = [line.split("`")[1] for line in first_table.splitlines() if line.startswith("| `")]
    assert sorted(rows) == sorted(FAMILIES)
