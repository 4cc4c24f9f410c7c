"""Values that no key of config.json can have, whatever family reads it."""

import pytest
from golden_models import hf_of

from swa_jax.base.errors import ConfigError
from swa_jax.checkpoint.families import hf_pattern, model_config
from swa_jax.model.layer_types import WINDOW
from swa_jax.model.pattern import AttentionPattern

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 3, "long_factor": [2.0] * 3, "factor": 4.0}


def llama(**keys) -> dict:
    return {key: value for key, value in hf_of("llama-plain").items() if not key.startswith("rope_")} | keys


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
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
    ],
)
def test_what_no_model_can_have(keys, sentence):
    with pytest.raises(ConfigError, match=sentence) as caught:
        model_config(llama(**keys))
    assert len(str(caught.value)) < 400


def test_windows_beyond_all_positions():
    hf = hf_of("mistral-window")
    with pytest.raises(ConfigError, match="sliding_window must be at most 2147483647"):
        model_config(hf | {"sliding_window": 2**31})
    with pytest.raises(ConfigError, match="num_sink_tokens must be at most 2147483647, got 2147483648"):
        AttentionPattern((WINDOW,), 4, num_sink_tokens=2**31)
    assert hf_pattern(hf | {"sliding_window": 2**31 - 1}).sliding_window == 2**31 - 1
    assert model_config(hf | {"sliding_window": None}).num_hidden_layers == hf["num_hidden_layers"]


def test_experts_without_end():
    hf = hf_of("qwen3-moe-full")
    with pytest.raises(ConfigError, match=r"num_experts .* in .* layers: more than 1000000 in all"):
        model_config(hf | {"num_experts": 10**8, "num_local_experts": 10**8})
