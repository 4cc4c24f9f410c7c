"""What is particular to Granite-SWA, CWM, Seed-OSS, VaultGemma, Ministral 3, StarCoder2 and Apertus."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_configs import config_of, pattern_of

from swa_jax.base.errors import ConfigError
from swa_jax.checkpoint.families import apply_pattern, hf_config, hf_pattern, model_config
from swa_jax.checkpoint.tensor_names import hf_tensors
from swa_jax.model.config import RopeScaling
from swa_jax.model.layers import XIELU, query_scale

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 9.0}
BETA = "llama_4_scaling_beta"


def test_cwm_scales_its_rope_unless_config_json_says_how():
    scaled = config_of("cwm", num_attention_heads=8, rope_theta=7.0)  # transformers does not read it here either
    assert (scaled.rope_theta, scaled.rope_scaling) == (1e6, RopeScaling("llama3", 16.0, 8192, 1.0, 4.0))
    plain = config_of("cwm", num_attention_heads=8, rope_parameters={"rope_type": "default"})
    assert (plain.rope_theta, plain.rope_scaling) == (1e6, None)
    # Under any pattern it stays a CWM; a Llama of the same numbers is written as a Ministral.
    hf, notice = apply_pattern(hf_config(scaled), pattern_of("wFw"))
    assert (hf["model_type"], notice, hf_pattern(hf)) == ("cwm", None, pattern_of("wFw"))


def test_seed_oss_has_biases_where_it_says():
    def biases(**keys) -> tuple[bool, bool, bool]:
        config = config_of("seed_oss", num_attention_heads=8, **keys)
        return config.attention_bias, config.attention_out_bias, config.mlp_bias

    assert biases() == (True, False, False)
    assert biases(attention_bias=False, attention_out_bias=True, mlp_bias=True) == (False, True, True)
    hf = hf_config(config_of("seed_oss", num_attention_heads=8))
    assert apply_pattern(hf, pattern_of("wFw"))[0]["model_type"] == "qwen2"  # which has the same biases
    hf = hf_config(config_of("seed_oss", num_attention_heads=8, attention_out_bias=True, attention_bias=False))
    assert "Seed-OSS's biases" in apply_pattern(hf, pattern_of("wFw"))[1]


def test_granite_swa_has_a_theta_for_each_layer():
    config = config_of("granite_swa", layer_rope_theta=[50, 0, 1e4])
    assert (config.rope_layers, config.rope_theta, config.local_rope_theta) == (("global", "none", "local"), 50.0, 1e4)
    assert config.sink_logits
    hf, notice = apply_pattern(hf_config(config), pattern_of("wwF"))  # RoPE is the layer's, whatever its window
    assert (model_config(hf), hf_pattern(hf), notice) == (config, pattern_of("wwF"), None)
    assert hf["layer_rope_theta"] == [50.0, 0, 1e4]
    assert config_of("granite_swa", layer_rope_theta=None, rope_theta=7.0).rope_theta == 7.0
    assert config_of("granite_swa", layer_rope_theta=[0, 0, 0], rope_theta=7.0).rope_layers == ("none",) * 3
    alike = config_of("granite_swa", layer_rope_theta=[7, 7, 7], rope_theta=3.0)
    assert alike == config_of("granite_swa", rope_theta=7.0)
    scaled = config_of("granite_swa", layer_rope_theta=[7, 0, 7], rope_parameters=YARN)
    assert (scaled.rope_theta, scaled.rope_scaling.factor) == (7.0, 4.0)
    assert dataclasses.replace(scaled, rope_scaling=None).rope_layers == ("global", "none", "global")


def test_ministral3_scales_its_queries():
    keys = {"num_key_value_heads": 2, "rope_parameters": YARN | {BETA: 0.25}}
    config = config_of("ministral3", **keys)
    assert config.rope_scaling == RopeScaling("yarn", 4.0, 32, llama_4_scaling_beta=0.25)
    np.testing.assert_allclose(
        query_scale(config, jnp.array([[0, 31, 32, 63, 64]])),
        [[1, 1, 1 + 0.25 * np.log(2), 1 + 0.25 * np.log(2), 1 + 0.25 * np.log(3)]],
        rtol=1e-6,
    )
    hf, notice = apply_pattern(hf_config(config), pattern_of("www"))
    assert (model_config(hf), hf_pattern(hf), notice) == (config, pattern_of("www"), None)
    assert hf["rope_parameters"][BETA] == 0.25
    _, notice = apply_pattern(hf, pattern_of("wFw"))
    assert "Ministral 3's factor on queries" in notice
    # Other families do not read the key, and without it this is a Mistral.
    assert config_of("mistral", **keys).rope_scaling == RopeScaling("yarn", 4.0, 32)
    plain = config_of("ministral3", num_key_value_heads=2, rope_parameters=YARN)
    assert query_scale(plain, jnp.zeros((1, 1), jnp.int32)) is None
    assert apply_pattern(hf_config(plain), pattern_of("wFw"))[0]["model_type"] == "ministral"
    for rope, sentence in (
        (YARN | {BETA: 10**400}, f"rope_parameters.{BETA} must be a number from 0 to 100, got 1000"),
        (YARN | {BETA: "x"}, f"rope_parameters.{BETA} must be a number from 0 to 100, got 'x'"),
        ({"rope_type": "default", BETA: 0.1}, f"{BETA} is not supported with rope_type 'default'; supported"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            config_of("ministral3", num_key_value_heads=2, rope_parameters=rope)
    with pytest.raises(ConfigError, match=f"{BETA} needs rope_type yarn"):
        RopeScaling("linear", 2.0, llama_4_scaling_beta=0.1)


def test_starcoder2_has_biases_everywhere_or_in_its_norms_alone():
    config = config_of("starcoder2", num_key_value_heads=2, norm_epsilon=1e-3)
    assert (config.norm_type, config.norm_bias, config.gated_mlp, config.rms_norm_eps) == ("layer", True, False, 1e-3)
    without = config_of("starcoder2", num_key_value_heads=2, use_bias=False)
    names = {name for name in hf_tensors(without) if name.endswith(".bias")}
    assert {name.split(".")[-2] for name in names} == {"norm", "input_layernorm", "post_attention_layernorm"}
    hf, notice = apply_pattern(hf_config(config), pattern_of("wFw"))
    assert hf_pattern(hf) == pattern_of("FFF")
    assert "StarCoder2's LayerNorms" in notice


def test_apertus_has_an_activation_of_its_own_in_each_layer():
    config = config_of("apertus")
    assert (config.hidden_act, config.gated_mlp, config.qk_norm, config.rope_theta) == ("xielu", False, True, 12e6)
    assert config_of("apertus", hidden_act="silu").hidden_act == "silu"
    with pytest.raises(ConfigError, match="hidden_act 'xielu' is not supported"):
        config_of("llama", hidden_act="xielu")
    with pytest.raises(ConfigError, match="'xielu' is for dense MLPs without a gate: set gated_mlp to false"):
        dataclasses.replace(config, gated_mlp=True)
    hf, notice = apply_pattern(hf_config(config), pattern_of("wFw"))
    assert (hf["model_type"], hf_pattern(hf)) == ("apertus", pattern_of("FFF"))
    assert "Apertus's activation" in notice
    assert hf_config(dataclasses.replace(config, model_type="llama"))["model_type"] == "swat"


def test_xielu_is_that_of_the_paper():
    """Equation 12 of arXiv:2411.13010 in f64, and its derivative, which is continuous at 0."""
    act = XIELU(config_of("apertus"), jnp.float32)
    act.alpha_p[...], act.alpha_n[...] = jnp.array([0.3]), jnp.array([-0.2])
    x = np.linspace(-6, 6, 41)
    p, n = np.log1p(np.exp(0.3)), 0.5 + np.log1p(np.exp(-0.2))
    expected = np.where(x > 0, p * x * x, n * (np.expm1(np.minimum(x, 0)) - x)) + 0.5 * x
    slope = np.where(x > 0, 2 * p * x, n * np.expm1(np.minimum(x, 0))) + 0.5
    both = jax.jit(jax.vmap(jax.value_and_grad(lambda x: act(x[None])[0])))
    for found, wanted in zip(both(x.astype(np.float32)), (expected, slope), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=2e-6)
    assert act(jnp.ones(3, jnp.bfloat16)).dtype == jnp.bfloat16
