"""Mixtures of experts in Hugging Face's `config.json`."""

import dataclasses

import pytest
from small_configs import SIZES, config_of

from swa_jax.errors import ConfigError
from swa_jax.families import apply_pattern, hf_config, hf_pattern, model_config
from swa_jax.model.config import RopeScaling
from swa_jax.model.layer_types import FULL, WINDOW
from swa_jax.model.pattern import AttentionPattern

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
