"""Mixtures of experts in Hugging Face's `config.json`."""

import dataclasses

import pytest
from small_configs import ROPES, SIZES, SPARSE, config_of

from swa_jax.checkpoint.families import apply_pattern, hf_config, hf_pattern, model_config
from swa_jax.model.config import RopeScaling
from swa_jax.model.layer_types import FULL, WINDOW
from swa_jax.model.pattern import AttentionPattern


def test_which_layers_of_qwen3_moe_have_experts():
    config = config_of("qwen3_moe", **SPARSE, decoder_sparse_step=2)
    assert (config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size) == (4, 2, 16)
    assert (config.mlp_layer_types, config.norm_topk_prob) == (("dense", "sparse", "dense"), False)
    assert config_of("qwen3_moe", **SPARSE, mlp_only_layers=[0]).sparse_layers == (1, 2)
    dense = config_of("qwen3_moe", **SPARSE | {"num_experts": 0})
    assert (dense.num_experts, dense.moe_intermediate_size, dense.mlp_layer_types) == (0, 0, ())


def test_gpt_oss_scales_its_rope_unless_config_json_says_how():
    config = config_of("gpt_oss", num_key_value_heads=2)
    assert config.rope_scaling == RopeScaling("yarn", 32.0, 4096, truncate=False)
    assert config_of("gpt_oss", num_key_value_heads=2, rope_parameters={"rope_type": "default"}).rope_scaling is None
    pattern = hf_pattern({"model_type": "gpt_oss", **SIZES})
    assert (pattern.layer_types, pattern.sliding_window) == ((WINDOW, FULL, WINDOW), 128)


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


def test_afmoe_routes_by_sigmoids_and_gates_attention():
    config = config_of("afmoe", **SPARSE, num_shared_experts=3, route_scale=2.5, mup_enabled=True)
    assert (config.mlp_layer_types, config.head_dim) == (("dense", "sparse", "sparse"), 128)
    assert (config.router_scores, config.router_choice_bias, config.norm_topk_prob) == ("sigmoid", True, True)
    assert (config.expert_multiplier, config.shared_expert_intermediate_size) == (2.5, 48)
    assert (config.attention_gate, config.embedding_multiplier) == ("channel", 24**0.5)
    assert config.rope_layers == ()
    types = hf_pattern({"model_type": "afmoe", **SIZES, "global_attn_every_n_layers": 2})
    assert (types.layer_types, types.sliding_window) == ((WINDOW, FULL, WINDOW), 1024)
    assert config_of("afmoe", **SPARSE, global_attn_every_n_layers=2).rope_layers[1] == "none"
    dense = config_of("afmoe", **SPARSE, num_dense_layers=3)
    assert (dense.num_experts, dense.shared_expert_intermediate_size) == (0, 0)


def test_exaone_moe_takes_experts_of_the_best_groups():
    keys = {"num_hidden_layers": 5, "n_group": 2, "topk_group": 2, "layer_types": None}
    config = config_of("exaone_moe", **SPARSE | keys, first_k_dense_replace=2)
    assert config.sparse_layers == (2, 3, 4)
    assert (config.expert_groups, config.expert_groups_per_tok, config.expert_multiplier) == (2, 2, 2.5)
    assert config.rope_layers == ("global",) * 3 + ("none", "global")
    assert config_of("exaone_moe", **SPARSE, sliding_window=None).rope_layers == ()
    assert config.norm_placement == "pre"


def test_cohere2_moe_turns_its_dense_layers():
    keys = {"num_experts": 4, "num_hidden_layers": 4, "prefix_dense_intermediate_size": 52}
    config = config_of("cohere2_moe", **keys, first_k_dense_replace=1, sliding_window_pattern=2)
    assert config.dense_layers == (0,)
    assert config.rope_layers == ("global", "global", "none", "global")
    assert (config.intermediate_size, config.moe_intermediate_size) == (52, 32)
    assert (config.norm_type, config.mixture_multiplier, config.norm_topk_prob) == ("layer", 1.0, True)
    shared = {"num_shared_experts": 2, "expert_selection_fn": "sigmoid", "norm_topk_prob": False}
    config = config_of("cohere2_moe", **keys, **shared, rms_norm_eps=1e-6)
    assert (config.norm_type, config.rms_norm_eps, config.mixture_multiplier) == ("rms", 1e-6, 0.5)
    assert (config.shared_expert_intermediate_size, config.router_scores) == (64, "sigmoid")
    assert config.norm_topk_prob is False


def test_laguna_has_other_heads_in_full_layers():
    kinds = {"layer_types": [WINDOW, FULL, WINDOW], "rope_parameters": ROPES}
    config = config_of("laguna", **SPARSE, **kinds, num_attention_heads_per_layer=[6, 4, 6])
    assert config.query_heads == (6, 4, 6)
    assert (config.partial_rotary_factor, config.global_partial_rotary_factor) == (1.0, 0.5)
    assert (config.rope_theta, config.local_rope_theta) == (7e5, 90.0)
    assert (config.attention_gate, config.attention_gate_act) == ("head", "softplus")
    assert (config.shared_expert_intermediate_size, config.router_logit_softcap) == (512, None)
    assert config.mlp_layer_types == ("dense", "sparse", "sparse")
    plain = config_of("laguna", **SPARSE, gating="per-element", moe_router_logit_softcapping=2.0)
    assert (plain.query_heads, plain.rope_layers, plain.partial_rotary_factor) == ((4, 4, 4), (), 0.5)
    assert (plain.attention_gate, plain.router_logit_softcap) == ("channel", 2.0)
    assert hf_pattern({"model_type": "laguna", **SIZES}).layer_types == (FULL, FULL, FULL)
    windows = config_of("laguna", **SPARSE, **kinds | {"layer_types": [WINDOW] * 3})
    assert (windows.rope_layers, windows.partial_rotary_factor) == (("local",) * 3, 1.0)


def test_mimo_has_twice_the_kv_heads_in_windowed_layers():
    hf = {"num_key_value_heads": 2, "n_routed_experts": 4, "num_experts_per_tok": 2}
    config = config_of("mimo_v2_flash", **hf)
    assert config.head_shapes == ((2, 192), (4, 192), (4, 192))
    assert (config.rope_layers, config.v_head_dim) == (("global", "local", "local"), 128)
    assert (config.sink_logits, config.global_sink_logits, config.value_multiplier) == (True, False, 0.707)
    assert (config.rotary_dim, config.global_partial_rotary_factor) == (64, 0.334)
    assert (config.rope_theta, config.local_rope_theta) == (5e6, 1e4)
    assert hf_pattern({"model_type": "mimo_v2_flash", **SIZES, **hf}).sliding_window == 129
    sized = {"model_type": "mimo_v2_flash", **SIZES, **hf, "sliding_window": 128, "sliding_window_size": 128}
    assert hf_pattern(sized).sliding_window == 129
    full = config_of("mimo_v2_flash", **hf, layer_types=[FULL] * 3, attention_value_scale=None)
    assert (full.head_shapes[0], full.sink_logits, full.value_multiplier) == ((2, 192), False, 1.0)


def test_granite_moe_swa_has_experts_everywhere_and_perhaps_a_shared_one():
    config = config_of("granitemoe_swa", shared_intermediate_size=20, layer_rope_theta=[1e4, 0, 500.0])
    assert (config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size) == (8, 2, 32)
    assert (config.shared_expert_intermediate_size, config.norm_topk_prob, config.sink_logits) == (20, True, True)
    assert (config.rope_layers, config.local_rope_theta) == (("global", "none", "local"), 500.0)
    pattern = hf_pattern({"model_type": "granitemoe_swa", **SIZES})
    assert (pattern.layer_types, pattern.sliding_window) == ((FULL, WINDOW, WINDOW), 128)


NEW = {
    "afmoe": {"route_scale": 1.5, "num_dense_layers": 1, "global_attn_every_n_layers": 2},
    "exaone_moe": {"n_group": 2, "topk_group": 2, "mlp_layer_types": ["sparse", "dense", "sparse"]},
    "laguna": {
        "layer_types": [WINDOW, FULL, WINDOW],
        "rope_parameters": ROPES,
        "num_attention_heads_per_layer": [8, 4, 8],
    },
    "mimo_v2_flash": {"routed_scaling_factor": 1.5},
    "granitemoe_swa": {"shared_intermediate_size": 20, "layer_rope_theta": [1e4, 0, 500.0]},
    "cohere2_moe": {"num_shared_experts": 1, "first_k_dense_replace": 1, "sliding_window_pattern": 2},
}


@pytest.mark.parametrize("family", NEW)
@pytest.mark.parametrize("changes", [{}, {"attention_bias": True}, {"num_shared_experts": 3}], ids=str)
def test_what_a_family_writes_reads_as_the_same_model_and_pattern(family, changes):
    hf = {"model_type": family, **SIZES, **SPARSE, **NEW[family], **changes}
    config, pattern = model_config(hf), hf_pattern(hf)
    written = hf_config(config, pattern)
    assert written["model_type"] == family
    assert (model_config(written), hf_pattern(written)) == (config, pattern)
    full = AttentionPattern((FULL,) * 3)
    out, notice = apply_pattern(hf, full)
    assert (model_config(out), hf_pattern(out), notice) == (config, full, None)
