"""What no `config.json` may say: each is refused in one sentence that names the key."""

import pytest
from golden_models import hf_of
from small_configs import ROPES, SIZES, SPARSE

from swa_jax.base.errors import ConfigError
from swa_jax.checkpoint.families import hf_pattern, model_config
from swa_jax.model.layer_types import FULL, WINDOW
from swa_jax.model.pattern import AttentionPattern

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 3, "long_factor": [2.0] * 3, "factor": 4.0}
LINEAR = {"rope_type": "linear", "factor": 2.0}

# Values that a key cannot have, and what a Llama may not ask for.
LLAMA = [
    ({"attention_bias": "false"}, "attention_bias must be true or false, got 'false'"),
    ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false, got 1"),
    ({"use_cache": []}, "use_cache must be true or false"),
    ({"rms_norm_eps": "1e-5"}, "rms_norm_eps must be a number, got '1e-5'"),
    ({"rms_norm_eps": True}, "rms_norm_eps must be a number, got True"),
    ({"attention_dropout": "none"}, "attention_dropout must be a number"),
    ({"eos_token_id": "2"}, "eos_token_id must be the id of a token, or a list of them, got '2'"),
    ({"eos_token_id": [1, 2.0]}, "eos_token_id must be the id of a token, or a list of them"),
    ({"bos_token_id": 10**30}, "bos_token_id must be the id of a token"),
    ({"architectures": "LlamaForCausalLM"}, "architectures must be a list of names"),
    ({"layer_types": [[]]}, r"layer_types must be a list with one type a layer, got \[\[\]\]"),
    ({"dtype": 16}, "dtype must be a text, got 16"),
    ({"hidden_size": 10**400}, r"hidden_size must be at most 2147483647, got 1000"),
    ({"vocab_size": 2**31}, "vocab_size must be at most 2147483647"),
    ({"rms_norm_eps": 1e30}, "rms_norm_eps must be from 1e-20 to 0.5, got 1e[+]30"),
    ({"rms_norm_eps": 1e-300}, "rms_norm_eps must be from"),
    ({"initializer_range": float("inf")}, "initializer_range must be from 0 to 10, got inf"),
    ({"rope_theta": 1}, r"rope_theta must be from 2 to 1e\+12, got 1"),
    ({"rope_theta": float("nan")}, "rope_theta must be .*, got nan"),
    ({"rope_theta": 1e308}, "rope_theta must be from"),
    ({"rope_scaling": YARN | {"factor": 0.5}}, r"rope_scaling.factor must be from 1 to 10000, got 0.5"),
    ({"rope_scaling": YARN | {"factor": float("nan")}}, r"rope_scaling.factor must be from"),
    ({"rope_scaling": YARN | {"beta_fast": 1, "beta_slow": 32}}, r"beta_slow \(32\) must be below beta_fast \(1\)"),
    ({"rope_scaling": YARN | {"attention_factor": 0}}, "attention_factor must be from 0.01 to 100, got 0"),
    ({"rope_scaling": YARN | {"mscale": -1}}, "mscale must be from 0 to 100, got -1"),
    ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}}, r"low_freq_factor \(4\) must be below high_freq_factor"),
    ({"rope_scaling": LONG | {"factor": 0}}, "rope_scaling.factor must be from 1"),
    ({"rope_scaling": LONG | {"long_factor": [1e9] * 3}}, "long_factor must have 3 numbers above 0, at most 1e4"),
    (
        {"model_type": "gemma3"},
        "model_type 'gemma3' is not supported; supported: .*gemma3_text, .*llama, mellum, .*ministral, .*mistral",
    ),
    (
        {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}},
        "swat, .*; its text_config is of model_type 'gemma3_text': save the text model alone",
    ),
    ({"model_type": None}, "model_type None is not supported"),
    ({"model_type": ["llama"], "text_config": {"model_type": []}}, r"model_type \['llama'\] is not supported"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported: silu"),
    ({"quantization_config": {"bits": 4}}, "quantization_config without a quant_method is not supported"),
    ({"is_causal": False}, "is_causal is false .* is not supported; supported: causal models"),
    ({"num_experts": 8}, "num_experts is set, but model_type 'llama' is read as a dense model"),
    ({"use_mrope": True}, "use_mrope"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is not supported; supported: 1.0"),
    (
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        r"'dynamic' is not supported; supported: default, linear, llama3, yarn, longrope, proportional; remove "
        r"rope_scaling to use the model up to max_position_embeddings \(2048\), or set yarn",
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
    (
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 0}},
        "original_max_position_embeddings must be a whole number above 0, got 0",
    ),
    (
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 0},
        "original_max_position_embeddings must be a whole number above 0, got 0",
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
]
FP8 = {"quant_method": "fp8", "weight_block_size": [16, 8]}
LLAMA += [
    ({"quantization_config": settings}, sentence)
    for settings, sentence in (
        ({"quant_method": "gptq", "bits": 4}, "quant_method 'gptq' is not supported; supported: fp8 with"),
        ({"quant_method": "mxfp4"}, "quant_method 'mxfp4' is not supported; supported: .* mxfp4 in gpt_oss"),
        ({"quant_method": "fp8"}, "'fp8' without weight_block_size"),
        (FP8 | {"fmt": "e5m2"}, "'fp8' with fmt 'e5m2'"),
        (FP8 | {"weight_block_size": [128]}, r"weight_block_size must be two whole numbers .*got \[128\]"),
        (FP8 | {"weight_block_size": [128, 0]}, "weight_block_size must be two whole numbers"),
        (FP8 | {"weight_block_size": [True, 2.0]}, "weight_block_size must be two whole numbers"),
        ("fp8", "quantization_config must be a mapping, got 'fp8'"),
    )
]
QWEN3_MOE = [
    ({"num_experts": "4"}, "num_experts must be a whole number, got '4'"),
    ({"num_experts": None, "num_local_experts": 2.5}, "num_local_experts must be a whole number, got 2.5"),
    ({"num_experts_per_tok": True}, "num_experts_per_tok must be a whole number, got True"),
    ({"num_experts_per_tok": 5}, r"num_experts_per_tok must be from 1 to num_experts \(4\), got 5"),
    ({"moe_intermediate_size": -1}, "moe_intermediate_size must be a whole number, got -1"),
    ({"decoder_sparse_step": 0}, "decoder_sparse_step must be a whole number above 0, got 0"),
    ({"mlp_only_layers": 3}, "mlp_only_layers must be a list of layers, got 3"),
    ({"num_hidden_layers": "3"}, "'config.json.num_hidden_layers' must be int, got '3'"),
    ({"num_experts": 10**8}, r"num_experts .* in .* layers: more than 1000000 in all"),
]
GEMMA4 = [
    ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention 'all' is not supported"),
    ({"enable_moe_block": "yes"}, "enable_moe_block must be true or false, got 'yes'"),
    ({"enable_moe_block": True}, "num_experts is missing; enable_moe_block needs it"),
    ({"num_kv_shared_layers": 8}, r"num_kv_shared_layers must be from 0 to num_hidden_layers \(7\), got 8"),
    ({"num_kv_shared_layers": 6}, "num_kv_shared_layers is 6, but none of the other layers has .* 'global'"),
    ({"num_kv_shared_layers": "2"}, "num_kv_shared_layers' must be int, got '2'"),
    ({"vocab_size_per_layer_input": -1}, "vocab_size_per_layer_input must be above 0"),
    ({"per_layer_config": {"2": {"head_dim": 24}}}, "per_layer_config must have one entry for every layer of full"),
    ({"per_layer_config": []}, "per_layer_config must have one entry"),
    ({"per_layer_config": {"2": 5, "4": 5, "6": 5}}, "per_layer_config must have one entry"),
    ({"per_layer_config": {n: {"head_dim": 0} for n in "246"}}, "head_dim of full layers must be .* got 0"),
    ({"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters must have those of full_attention and of"),
    (
        {"rope_parameters": {WINDOW: {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}},
        "rope_parameters.sliding_attention.rope_type 'linear' is not supported",
    ),
]
GRANITE_SWA = [
    ({"layer_rope_theta": [1, 2]}, r"must be a list with a number from 0 to 1e\+12 for each of the 3 layers"),
    ({"layer_rope_theta": [1, 2, 10**400]}, "layer_rope_theta must be a list with a number from 0"),
    ({"layer_rope_theta": [1, -2, 3]}, "layer_rope_theta must be a list with a number from 0"),
    ({"layer_rope_theta": [1, True, 3]}, "layer_rope_theta must be a list with a number from 0"),
    ({"layer_rope_theta": "1"}, "layer_rope_theta must be a list with a number from 0"),
    ({"layer_rope_theta": [10, 20, 30]}, "layer_rope_theta has 3 thetas; supported: 2 beside 0"),
    (
        {"layer_rope_theta": [10, 20, 0], "rope_parameters": LINEAR},
        "has 2 thetas; supported: 1 beside 0 where RoPE is scaled",
    ),
]
SMOLLM3 = [
    (keys, r"no_rope_layers must be a list with 1 .* for each of the 3 layers")
    for keys in ({"no_rope_layers": [1, 0]}, {"no_rope_layers": "1"}, {"no_rope_layer_interval": 0})
]
OTHERS = [
    ("mistral", {"sliding_window": 2**31}, "sliding_window must be at most 2147483647"),
    (
        "qwen2",
        {"use_sliding_window": True, "max_window_layers": "x", "num_key_value_heads": 2},
        "max_window_layers must be a whole number, got 'x'",
    ),
    ("gemma3_text", {"num_hidden_layers": 10**30}, "num_hidden_layers must be at most 100000"),
    ("olmo3", {"layer_types": [FULL] * 2}, "layer_types has 2 entries for 3 layers"),
    (
        "olmo3",
        {"layer_types": ["chunked_attention"] * 3, "sliding_window": 8},
        r"layer_types\[0\] is 'chunked_attention'; supported",
    ),
    ("cohere", {"use_qk_norm": True}, "use_qk_norm .* is not supported"),
    ("cohere2", {"logit_scale": 0}, "logit_scale must be a number above 0, got 0"),
    ("cohere2", {"sliding_window": None}, "layer_types has sliding_attention, but sliding_window is null"),
    ("cohere2", {"sliding_window_pattern": "LLLG"}, "sliding_window_pattern must be a whole number above 0"),
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
    ("mellum", {"mlp_layer_types": ["dence"] * 3}, "mlp_layer_types.0' must be one of dense, sparse, got 'dence'"),
    ("mellum", {"mlp_layer_types": ["dense"] * 2}, "mlp_layer_types has 2 entries for 3 layers"),
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention is not supported"),
    ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be a number above 0, got 0"),
    ("gemma2", {"final_logit_softcapping": -1.0}, "logit_softcap must be above 0, got -1.0"),
    ("gemma3_text", {"hidden_size": "24"}, "hidden_size must be a number above 0, got '24'"),
    ("granite", {"logits_scaling": 0}, "logits_scaling must be a number above 0, got 0"),
    ("gemma3_text", {"sliding_window_pattern": 0}, "sliding_window_pattern must be a whole number above 0"),
    ("olmo3", {"layer_types": "full_attention"}, "layer_types must be a list with one type a layer, got 'full"),
    ("smollm3", {"no_rope_layers": [[], 1, 1]}, "no_rope_layers must be a list"),
    ("granite", {"residual_multiplier": 0}, "residual_multiplier must be a number above 0, got 0"),
    ("laguna", {"num_attention_heads_per_layer": [4, 4]}, "must be a list with a number for each of the 3 layers"),
    (
        "laguna",
        {"num_attention_heads_per_layer": [4, 4, 6]},
        "num_attention_heads_per_layer has 4 and 6 in layers of type full_attention",
    ),
    ("laguna", {"rope_parameters": {WINDOW: {}}}, "rope_parameters.full_attention must be a mapping, got None"),
    ("laguna", {"moe_apply_router_weight_on_input": True}, "moe_apply_router_weight_on_input is not supported"),
    (
        "laguna",
        {
            "layer_types": [FULL, WINDOW, FULL],
            "rope_parameters": ROPES | {WINDOW: {"rope_type": "linear", "factor": 2.0}},
        },
        "rope_parameters.sliding_attention.rope_type 'linear' is not supported",
    ),
    ("laguna", {"moe_routed_scaling_factor": []}, r"moe_routed_scaling_factor must be a number, got \[\]"),
    ("mimo_v2_flash", {"num_key_value_heads": 4}, r"num_attention_heads \(4\) must be a multiple of 8"),
    ("mimo_v2_flash", {"v_head_dim": 200}, r"v_head_dim \(200\) must be at most head_dim \(192\)"),
    ("afmoe", {"num_dense_layers": -1}, "num_dense_layers must be a whole number, got -1"),
    ("afmoe", {"num_shared_experts": "2"}, "num_shared_experts must be a whole number, got '2'"),
    ("afmoe", {"route_scale": "2"}, "route_scale must be a number, got '2'"),
    ("afmoe", {"mup_enabled": "yes"}, "mup_enabled must be true or false, got 'yes'"),
    ("exaone_moe", {"n_group": 3}, r"expert_groups \(3\) must cut num_experts \(4\)"),
    ("exaone_moe", {"routed_scaling_factor": [1]}, r"routed_scaling_factor must be a number, got \[1\]"),
    ("exaone_moe", {"mlp_layer_types": ["sparse"]}, "mlp_layer_types has 1 entries for 3 layers"),
    ("cohere2_moe", {"expert_selection_fn": "relu"}, "expert_selection_fn is 'relu'; known: sigmoid, softmax"),
    (
        "cohere2_moe",
        {"shared_expert_combination_strategy": 3},
        "shared_expert_combination_strategy is 3; known: average, sum",
    ),
    ("cohere2_moe", {"prefix_dense_sliding_window_pattern": 0}, "must be a whole number above 0, got 0"),
]
OF_ONE = {
    "llama": LLAMA, "qwen3_moe": QWEN3_MOE, "gemma4_text": GEMMA4, "granite_swa": GRANITE_SWA, "smollm3": SMOLLM3,
}  # fmt: skip
BASES = {"gemma4_text": hf_of("gemma4-e2b-hybrid")}
BASES |= dict.fromkeys(("qwen3_moe", "laguna", "mimo_v2_flash", "afmoe", "exaone_moe", "cohere2_moe"), SIZES | SPARSE)


def read(hf):
    return model_config(hf), hf_pattern(hf)


@pytest.mark.parametrize(
    ("family", "keys", "sentence"), [*((family, *row) for family, rows in OF_ONE.items() for row in rows), *OTHERS]
)
def test_what_is_refused(family, keys, sentence):
    hf = {"model_type": family, **BASES.get(family, SIZES), **keys}
    with pytest.raises(ConfigError, match=sentence) as caught:
        read(hf)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 700


def test_the_largest_sizes():
    with pytest.raises(ConfigError, match="num_sink_tokens must be at most 2147483647, got 2147483648"):
        AttentionPattern((WINDOW,), 4, num_sink_tokens=2**31)
    assert hf_pattern({"model_type": "mistral", **SIZES, "sliding_window": 2**31 - 1}).sliding_window == 2**31 - 1
