"""Mixtures of experts in Hugging Face's `config.json`."""

import dataclasses

import pytest
from small_configs import ROPES, SIZES, SPARSE, config_of

from swa_jax.checkpoint.families import apply_pattern, hf_config, hf_pattern, model_config
from swa_jax.model.config import RopeScaling
from swa_jax.model.layer_types import FULL, WINDOW
from swa_jax.model.pattern import AttentionPattern

YARN = RopeScaling("yarn", 32.0, 4096, truncate=False)
COHERE2 = {"num_hidden_layers": 4, "prefix_dense_intermediate_size": 52}
KINDS = {"layer_types": [WINDOW, FULL, WINDOW], "rope_parameters": ROPES}
# What becomes of keys that the goldens have otherwise.
READ = [
    ("qwen3_moe", {"decoder_sparse_step": 2}, {"mlp_layer_types": ("dense", "sparse", "dense"), "num_experts": 4}),
    ("qwen3_moe", {"mlp_only_layers": [0]}, {"sparse_layers": (1, 2), "norm_topk_prob": False}),
    ("qwen3_moe", {"num_experts": 0}, {"num_experts": 0, "moe_intermediate_size": 0, "mlp_layer_types": ()}),
    ("gpt_oss", {}, {"rope_scaling": YARN}),
    ("gpt_oss", {"rope_parameters": {"rope_type": "default"}}, {"rope_scaling": None}),
    (
        "afmoe",
        {"num_shared_experts": 3, "route_scale": 2.5, "mup_enabled": True},
        {"expert_multiplier": 2.5, "shared_expert_intermediate_size": 48, "embedding_multiplier": 24**0.5},
    ),
    ("afmoe", {"num_dense_layers": 3}, {"num_experts": 0, "shared_expert_intermediate_size": 0}),
    ("afmoe", {"global_attn_every_n_layers": 2}, {"rope_layers": ("global", "none", "global")}),
    (
        "exaone_moe",
        {"num_hidden_layers": 5, "n_group": 2, "topk_group": 2, "layer_types": None, "first_k_dense_replace": 2},
        {"sparse_layers": (2, 3, 4), "expert_groups": 2, "rope_layers": ("global",) * 3 + ("none", "global")},
    ),
    ("exaone_moe", {"sliding_window": None}, {"rope_layers": (), "expert_multiplier": 2.5}),
    (
        "cohere2_moe",
        COHERE2 | {"first_k_dense_replace": 1, "sliding_window_pattern": 2},
        {"dense_layers": (0,), "rope_layers": ("global", "global", "none", "global"), "norm_type": "layer"}
        | {"intermediate_size": 52, "moe_intermediate_size": 32, "mixture_multiplier": 1.0, "norm_topk_prob": True},
    ),
    (
        "cohere2_moe",
        COHERE2
        | {"num_shared_experts": 2, "expert_selection_fn": "sigmoid", "norm_topk_prob": False, "rms_norm_eps": 1e-6},
        {"norm_type": "rms", "rms_norm_eps": 1e-6, "mixture_multiplier": 0.5, "router_scores": "sigmoid"}
        | {"shared_expert_intermediate_size": 64, "norm_topk_prob": False},
    ),
    (
        "laguna",
        KINDS | {"num_attention_heads_per_layer": [6, 4, 6]},
        {"query_heads": (6, 4, 6), "partial_rotary_factor": 1.0, "global_partial_rotary_factor": 0.5},
    ),
    (
        "laguna",
        {"gating": "per-element", "moe_router_logit_softcapping": 2.0},
        {"query_heads": (4, 4, 4), "rope_layers": (), "partial_rotary_factor": 0.5}
        | {"attention_gate": "channel", "router_logit_softcap": 2.0},
    ),
    ("laguna", KINDS | {"layer_types": [WINDOW] * 3}, {"rope_layers": ("local",) * 3, "partial_rotary_factor": 1.0}),
    (
        "mimo_v2_flash",
        {},
        {"head_shapes": ((2, 192), (4, 192), (4, 192)), "v_head_dim": 128, "value_multiplier": 0.707}
        | {"sink_logits": True, "global_sink_logits": False, "rotary_dim": 64, "global_partial_rotary_factor": 0.334},
    ),
    (
        "mimo_v2_flash",
        {"layer_types": [FULL] * 3, "attention_value_scale": None},
        {"head_shapes": ((2, 192),) * 3, "sink_logits": False, "value_multiplier": 1.0},
    ),
    (
        "granitemoe_swa",
        {"shared_intermediate_size": 20, "layer_rope_theta": [1e4, 0, 500.0]},
        {"shared_expert_intermediate_size": 20, "rope_layers": ("global", "none", "local"), "local_rope_theta": 500.0},
    ),
]


@pytest.mark.parametrize(("family", "keys", "fields"), READ)
def test_what_becomes_of_keys(family, keys, fields):
    config = config_of(family, **SPARSE | keys)
    assert {name: getattr(config, name) for name in fields} == fields


def test_the_window_of_mimo_may_not_count_its_own_key():
    sizes = {"sliding_window": 128, "sliding_window_size": 128}
    assert hf_pattern({"model_type": "mimo_v2_flash", **SIZES, **sizes}).sliding_window == 129


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
