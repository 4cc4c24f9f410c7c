"""Hugging Face's `config.json`, to and from `ModelConfig` and `AttentionPattern`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from swa_jax.errors import ConfigError
from swa_jax.model.config import ModelConfig, RopeScaling
from swa_jax.model.layer_types import FULL, HYBRID, SWITCH, WINDOW
from swa_jax.model.pattern import AttentionPattern
from swa_jax.settings import from_dict, nearest, to_dict

SWAT = "swat"  # our own family: every field of ModelConfig under its own name
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "ministral": "MinistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    SWAT: "SwatForCausalLM",
}

# What Hugging Face's configuration classes assume where a key is absent; None: as many KV heads as query heads.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": None, "max_position_embeddings": 2048},
    "mistral": {"num_key_value_heads": 8, "max_position_embeddings": 4096 * 32},
    "ministral": {"num_key_value_heads": 8, "max_position_embeddings": 4096 * 32},
    "qwen2": {"num_key_value_heads": 32, "max_position_embeddings": 32768},
    "qwen3": {"num_key_value_heads": 32, "max_position_embeddings": 32768, "head_dim": 128},
}
_COMMON = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "tie_word_embeddings",
    "initializer_range",
)

# The keys of `rope_parameters` that each type reads, and those among them it cannot do without.
_ROPE_FIELDS: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
}
_ROPE_REQUIRED = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
}

# Keys any config.json may hold that do not change what the decoder computes.
_NEUTRAL = (
    "architectures",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "layer_types",
    "pad_token_id",
    "sliding_window",
    "torch_dtype",
    "transformers_version",
    "use_cache",
)


# ---- reading ----


def model_config(hf: Mapping[str, Any]) -> ModelConfig:
    """The decoder a Hugging Face `config.json` describes.

    Reads transformers 4's spelling (`rope_theta`, `rope_scaling`) and 5's (`rope_parameters`, also one for each
    layer type where all agree), with the defaults of Hugging Face's configuration classes for absent keys.

    Raises:
      ConfigError: a family, activation, RoPE type or other feature this decoder does not have, a missing key, or a
        value of the wrong type; the sentence names the key.
    """
    family = hf.get("model_type")
    if family not in ARCHITECTURES:
        raise ConfigError(
            f"config.json: model_type {family!r} is not supported; supported: {', '.join(sorted(ARCHITECTURES))}"
        )
    if family == SWAT:
        return _swat_config(hf)
    _refuse_unsupported(hf)
    given = {key: hf[key] for key in _COMMON if hf.get(key) is not None}
    values = {key: value for key, value in _DEFAULTS[family].items() if key not in hf} | given
    heads = values.get("num_attention_heads")
    if values.get("num_key_value_heads") is None:
        values["num_key_value_heads"] = heads
    if "head_dim" not in values and isinstance(heads, int) and isinstance(values.get("hidden_size"), int):
        values["head_dim"] = _divide(values["hidden_size"], heads)
    values |= {"model_type": family} | _biases(family, hf)
    config = from_dict(ModelConfig, values, "config.json")
    theta, scaling = _rope(hf, config.max_position_embeddings)
    return dataclasses.replace(config, rope_theta=theta, rope_scaling=scaling)


def _divide(hidden_size: int, heads: int) -> int:
    if heads < 1 or hidden_size % heads:
        raise ConfigError(
            f"config.json: hidden_size ({hidden_size}) is not a multiple of num_attention_heads ({heads}); "
            "give head_dim"
        )
    return hidden_size // heads


def _biases(family: str, hf: Mapping[str, Any]) -> dict[str, bool]:
    if family == "qwen2":
        return {"attention_bias": True}
    if family == "llama":
        bias = bool(hf.get("attention_bias"))
        return {"attention_bias": bias, "attention_out_bias": bias, "mlp_bias": bool(hf.get("mlp_bias"))}
    if family == "qwen3":
        bias = bool(hf.get("attention_bias"))
        return {"qk_norm": True, "attention_bias": bias, "attention_out_bias": bias}
    return {}


def _refuse_unsupported(hf: Mapping[str, Any]) -> None:
    if hf.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ConfigError(f"config.json: hidden_act '{hf['hidden_act']}' is not supported; supported: silu")
    if hf.get("quantization_config"):
        raise ConfigError(
            "config.json: quantization_config is not supported; import the float16, bfloat16 or float32 weights"
        )
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        if hf.get(key):
            raise ConfigError(
                f"config.json: {key} is set, but mixtures of experts are not supported; supported: dense models"
            )
    if hf.get("use_mrope"):
        raise ConfigError(
            "config.json: use_mrope (rotary embeddings of images) is not supported; supported: text"
        )


def _swat_config(hf: Mapping[str, Any]) -> ModelConfig:
    fields = [f.name for f in dataclasses.fields(ModelConfig)]
    for key in hf:
        if key not in fields and key not in _NEUTRAL:
            raise ConfigError(f"config.json: unknown key '{key}' for model_type 'swat'{nearest(key, fields)}")
    return from_dict(ModelConfig, {key: value for key, value in hf.items() if key in fields}, "config.json")


def _rope(hf: Mapping[str, Any], max_positions: int) -> tuple[float, RopeScaling | None]:
    """theta and the scaling, from either spelling; Hugging Face lets a non-empty `rope_scaling` win."""
    key = "rope_scaling" if hf.get("rope_scaling") else "rope_parameters"
    rope = hf.get(key) or {}
    if not isinstance(rope, Mapping):
        raise ConfigError(f"config.json: '{key}' must be a mapping, got {rope!r}")
    rope = _agreed(rope, key)
    theta = rope.get("rope_theta", hf.get("rope_theta"))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", hf.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ConfigError("config.json: partial_rotary_factor is not supported; supported: 1.0")
    if theta is None:
        theta = 10000.0
    if isinstance(theta, bool) or not isinstance(theta, int | float) or theta <= 0:
        raise ConfigError(f"config.json: rope_theta must be a positive number, got {theta!r}")
    if kind == "default":
        return float(theta), None
    if kind not in _ROPE_FIELDS:
        raise ConfigError(
            f"config.json: {key}.rope_type '{kind}' is not supported; supported: default, linear, llama3, yarn"
        )
    values = {name: rope[name] for name in _ROPE_FIELDS[kind] if rope.get(name) is not None}
    for name in _ROPE_REQUIRED[kind]:
        if name not in values:
            raise ConfigError(f"config.json: {key}.{name} is missing; rope_type '{kind}' needs it")
    if kind != "linear":
        # Some checkpoints keep the pretraining length outside the mapping; it wins there.
        original = hf.get("original_max_position_embeddings") or values.get(
            "original_max_position_embeddings"
        )
        values["original_max_position_embeddings"] = original or max_positions
        values.setdefault("factor", max_positions / values["original_max_position_embeddings"])
    return float(theta), from_dict(RopeScaling, {"rope_type": kind} | values, f"config.json.{key}")


def _agreed(rope: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """One set of RoPE parameters, also where they are nested by layer type."""
    nested = [value for value in rope.values() if isinstance(value, Mapping)]
    if not nested:
        return rope
    if any(other != nested[0] for other in nested):
        raise ConfigError(
            f"config.json: {key} differs between layer types ({', '.join(rope)}); supported: one for all layers"
        )
    return nested[0]


# ---- writing ----


def hf_config(
    config: ModelConfig, pattern: AttentionPattern | None = None, *, dtype: str = "float32"
) -> dict[str, Any]:
    """The `config.json` of a model, readable by transformers 4 and 5.

    The family is `config.model_type` where that can express the model, else `swat`, which this library alone reads.
    The pattern is written where Hugging Face knows it (`apply_pattern`); None means full attention in every layer.
    """
    hf = _family_keys(config, config.model_type)
    if config.model_type == SWAT or model_config(hf) != config:
        hf = to_dict(config) | {"model_type": SWAT}
    hf |= {"architectures": [ARCHITECTURES[hf["model_type"]]], "dtype": dtype}
    return apply_pattern(hf, pattern or AttentionPattern((FULL,) * config.num_hidden_layers))[0]


def _family_keys(config: ModelConfig, family: str) -> dict[str, Any]:
    """What Hugging Face's configuration class of a family would write."""
    if family not in ARCHITECTURES:
        raise ConfigError(f"model_type '{family}' is not known{nearest(family, [*ARCHITECTURES])}")
    hf = {"model_type": family, "hidden_act": "silu"} | {key: getattr(config, key) for key in _COMMON}
    if family in ("llama", "qwen3"):
        hf["attention_bias"] = config.attention_bias
    if family == "llama":
        hf["mlp_bias"] = config.mlp_bias
    return hf | _rope_keys(config)


def _rope_keys(config: ModelConfig) -> dict[str, Any]:
    """Both spellings, so that either transformers reads the same."""
    scaling: dict[str, Any] = {"rope_type": "default"}
    if config.rope_scaling is not None:
        kind, values = config.rope_scaling.rope_type, to_dict(config.rope_scaling)
        scaling = {"rope_type": kind} | {k: values[k] for k in _ROPE_FIELDS[kind] if values[k] is not None}
    return {
        "rope_theta": config.rope_theta,
        "rope_scaling": None if config.rope_scaling is None else dict(scaling),
        "rope_parameters": scaling | {"rope_theta": config.rope_theta},
    }


def apply_pattern(hf: Mapping[str, Any], pattern: AttentionPattern) -> tuple[dict[str, Any], str | None]:
    """`hf` with the keys that make Hugging Face attend as `pattern` says, and a notice where they cannot.

    Llama and Mistral without biases compute what Mistral and Ministral do, which know windows in every layer and
    `layer_types`: the family changes to the one that can express the pattern. A pattern none can express leaves
    full attention in every layer.
    """
    reason = _inexpressible(hf, pattern)
    if reason is not None:
        full = AttentionPattern((FULL,) * pattern.num_layers)
        return apply_pattern(hf, full)[0], (
            f"Hugging Face cannot express this pattern ({reason}): config.json says full attention in every layer, "
            "the pattern itself is in pattern.json"
        )
    types = pattern.layer_types
    window = pattern.sliding_window if WINDOW in types else None
    family = given = hf["model_type"]
    if family in ("llama", "mistral") and window is not None:
        family = "ministral" if FULL in types else "mistral"
    out = {key: value for key, value in hf.items() if key not in ("layer_types", "sliding_window")}
    if family in ("mistral", "ministral", "qwen2", "qwen3") or window is not None:
        out["sliding_window"] = window
    if family in ("ministral", "qwen2", "qwen3") or (family == SWAT and window is not None):
        out["layer_types"] = list(types)
    if family in ("qwen2", "qwen3"):
        out["use_sliding_window"] = window is not None
        if window is not None:  # how many layers at the start are full: what older readers go by
            out["max_window_layers"] = types.index(WINDOW)
    if family == given:
        return out, None
    config = model_config(hf)  # the two families' defaults for absent keys differ
    out |= {
        key: getattr(config, key) for key in ("num_key_value_heads", "head_dim", "max_position_embeddings")
    }
    out |= {"model_type": family, "architectures": [ARCHITECTURES[family]]}
    return out, f"model_type changed from {given} to {family}, which computes the same and knows windows"


def _inexpressible(hf: Mapping[str, Any], pattern: AttentionPattern) -> str | None:
    if HYBRID in pattern.layer_types:
        return "it keeps single KV heads full"
    if SWITCH in pattern.layer_types:
        return "it routes tokens"
    if pattern.num_sink_tokens and WINDOW in pattern.layer_types:
        return f"num_sink_tokens = {pattern.num_sink_tokens}"
    if pattern.full_attention_decode and WINDOW in pattern.layer_types:
        return "full_attention_decode"
    if (
        WINDOW in pattern.layer_types
        and hf["model_type"] == "llama"
        and (hf.get("attention_bias") or hf.get("mlp_bias"))
    ):
        return "no family with windows has Llama's biases"
    return None
