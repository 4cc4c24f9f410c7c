"""Model families: what each reads and writes of Hugging Face's `config.json`.

A family is one file with a `FAMILY`; its name in `_FILES` makes it known. `ModelConfig` describes what the decoder
computes, so nothing above or below this room asks for a family's name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from importlib import import_module

from swa_jax.base.errors import ConfigError
from swa_jax.base.settings import nearest
from swa_jax.checkpoint.families.common import Family, HfConfig, HfKeys
from swa_jax.checkpoint.families.grammar import TOKEN_KEYS, check_types
from swa_jax.checkpoint.families.rope import ROPE_KEYS
from swa_jax.checkpoint.families.windows import WINDOW_KEYS
from swa_jax.model.config import ModelConfig
from swa_jax.model.layer_types import FULL, HYBRID, LINEAR, SWITCH, WINDOW
from swa_jax.model.pattern import AttentionPattern

# Where several families can express a model under a pattern, the first is written; our own is the last resort.
_FILES = """
llama mistral ministral qwen2 qwen3 olmo2 smollm3 olmo3 gemma2 gemma3 gemma4 granite granite_swa phi3 cohere cohere2 cwm
exaone4 seed_oss vaultgemma ministral3 starcoder2 apertus qwen3_moe mixtral gpt_oss mellum afmoe exaone_moe cohere2_moe
granitemoe_swa laguna mimo_v2_flash qwen3_5 swat
"""
FAMILIES: dict[str, Family] = {
    family.model_type: family for family in (import_module(f"{__name__}.{name}").FAMILY for name in _FILES.split())
}
_OURS = FAMILIES["swat"]
MOST_LAYERS = 100_000

# ---- reading ----


def model_config(hf: HfConfig) -> ModelConfig:
    """The decoder that a Hugging Face `config.json` describes.

    Reads transformers 4's spelling (`rope_theta`, `rope_scaling`) and 5's (`rope_parameters`, also one for each
    layer type), with the defaults of Hugging Face's configuration classes for absent keys.

    Raises:
      ConfigError: a family, activation, RoPE type or other feature this decoder does not have, a missing key, or a
        value of the wrong type; the sentence names the key.
    """
    check_types(hf)
    layers = hf.get("num_hidden_layers")
    if isinstance(layers, int) and layers > MOST_LAYERS:  # before lists of that length are made
        raise ConfigError(f"config.json: num_hidden_layers must be at most {MOST_LAYERS}, got {layers}")
    return _family(hf).from_hf(hf)


def hf_pattern(hf: HfConfig) -> AttentionPattern:
    """The pattern that a Hugging Face `config.json` describes (`layer_types`, or the older `sliding_window` keys).

    Raises:
      ConfigError: an unknown family, or layer types that do not fit the number of layers or are not supported.
    """
    family = _family(hf)
    window, types = family.read_windows(hf, hf["num_hidden_layers"])
    linear = family.from_hf(hf).linear_layers if LINEAR in types else ()
    for i, kind in enumerate(types):
        if kind not in (FULL, WINDOW) and i not in linear:
            raise ConfigError(f"config.json: layer_types[{i}] is {kind!r}; supported: {FULL}, {WINDOW}")
    return AttentionPattern(tuple(types), window if WINDOW in types else None, provenance={"method": "hf-config"})


def family_of(config: ModelConfig) -> Family:
    """The family whose names a model's tensors have in checkpoints: our own where `model_type` is not a known one."""
    return FAMILIES.get(config.model_type, _OURS)


def _family(hf: HfConfig) -> Family:
    name = hf.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        text = hf.get("text_config")
        inner = text.get("model_type") if isinstance(text, Mapping) else None
        route = f"; its text_config is of model_type '{inner}': save the text model alone"
        raise ConfigError(
            f"config.json: model_type {name!r} is not supported; supported: {', '.join(sorted(FAMILIES))}"
            f"{route if isinstance(inner, str) and inner in FAMILIES else ''}"
        )
    return FAMILIES[name]


# ---- writing ----


def hf_config(config: ModelConfig, pattern: AttentionPattern | None = None, *, dtype: str = "float32") -> HfKeys:
    """The `config.json` of a model, readable by transformers 4 and 5.

    The family is `config.model_type` where that can express the model, else `swat`, which this library alone reads.
    The pattern is written where Hugging Face knows it (`apply_pattern`); None means full attention in every layer.
    """
    if config.model_type not in FAMILIES:
        raise ConfigError(f"model_type '{config.model_type}' is not known{nearest(config.model_type, [*FAMILIES])}")
    hf = _written(FAMILIES[config.model_type], config)
    if not _reads_as(hf, config):
        hf = _written(_OURS, config)
    return apply_pattern(hf | {"dtype": dtype}, pattern or AttentionPattern.everywhere(FULL, config))[0]


def with_keys_of(hf: HfConfig, config: ModelConfig) -> HfKeys:
    """The `config.json` of a model that has changed, with what `hf` says beside the model: the ids of tokens at least,
    and all that its family takes."""
    made, tokens = hf_config(config), {key: hf[key] for key in TOKEN_KEYS if key in hf}
    rest = {key: value for key, value in hf.items() if key not in (*ROPE_KEYS, *WINDOW_KEYS)} | made | tokens
    return rest if _reads_as(rest, config) else made | tokens


def _reads_as(hf: HfConfig, config: ModelConfig) -> bool:
    """Whether a `config.json` describes a model, whatever family it is of."""
    try:
        return dataclasses.replace(model_config(hf), model_type=config.model_type) == config
    except ConfigError:
        return False  # the family refuses what it was made to write


def _written(family: Family, config: ModelConfig) -> HfKeys:
    own = dataclasses.replace(config, model_type=family.model_type)
    full = AttentionPattern.everywhere(FULL, config)
    return family.to_hf(own) | family.window_keys(own, full) | {"architectures": [family.architecture]}


def apply_pattern(hf: HfConfig, pattern: AttentionPattern) -> tuple[HfKeys, str | None]:
    """`hf` with the keys that make Hugging Face attend as `pattern` says, and a notice where they cannot.

    Where the model's own family cannot express the pattern, but another one computes the same and can, the family
    changes: Llama and Mistral become Mistral (windows in every layer) or Ministral (`layer_types`), Llama with biases
    becomes SmolLM3, OLMo 2 becomes OLMo 3. A family can express a model and a pattern if what it writes reads as the
    same model and pattern. A pattern that none can express leaves full attention in every layer.
    """
    family, config, reason = _family(hf), model_config(hf), inexpressible(pattern)
    if reason is None:
        for other, described in same_model(hf, config):
            if (out := expressed(other, described, pattern, config)) is not None:
                return out, None if other is family else (
                    f"model_type changed from {family.model_type} to {other.model_type}, which computes the "
                    "same and knows windows"
                )
        reason = f"no family with windows has {family.peculiarity or 'what this model computes'}"
    return fully(hf), (
        f"Hugging Face cannot express this pattern ({reason}): config.json says full attention in every layer, "
        "the pattern itself is in pattern.json"
    )


def same_model(hf: HfConfig, config: ModelConfig) -> Iterator[tuple[Family, HfKeys]]:
    """The families that may compute what `hf` describes with the same tensors, its own first, and `hf` as they say it.

    Whether one does shows when what it says is read again (`expressed`).
    """
    family = _family(hf)
    yield family, dict(hf)
    rest = {key: value for key, value in hf.items() if key not in ROPE_KEYS}
    for other in FAMILIES.values():
        if other not in (family, _OURS) and other.tensor_names == family.tensor_names:
            yield other, {**rest, **_written(other, config)}


def fully(hf: HfConfig) -> HfKeys:
    """`hf` with full attention in every layer."""
    family = _family(hf)
    full = expressed(family, hf, AttentionPattern.everywhere(FULL, model_config(hf)))
    assert full is not None, f"{family.model_type} cannot say full attention in every layer"
    return full


def expressed(
    family: Family, hf: HfConfig, pattern: AttentionPattern, config: ModelConfig | None = None
) -> HfKeys | None:
    """`hf` with a family's keys for a pattern, if they read back as the model (`hf`'s own by default) and pattern."""
    config = config or model_config(hf)
    window = pattern.sliding_window if WINDOW in pattern.layer_types else None
    plain = AttentionPattern(pattern.layer_types, window)
    keys = family.window_keys(config, plain)
    out = {key: value for key, value in hf.items() if key not in WINDOW_KEYS} | keys
    return out if _reads_as(out, config) and hf_pattern(out) == plain else None


def inexpressible(pattern: AttentionPattern) -> str | None:
    """What no family knows of this pattern."""
    if HYBRID in pattern.layer_types:
        return "it keeps single KV heads full"
    if SWITCH in pattern.layer_types:
        return "it routes tokens"
    if pattern.chunked:
        return "it attends in chunks"
    if pattern.num_sink_tokens and WINDOW in pattern.layer_types:
        return f"num_sink_tokens = {pattern.num_sink_tokens}"
    if pattern.full_attention_decode and WINDOW in pattern.layer_types:
        return "full_attention_decode"
    if pattern.nope_full_layers:
        return "its full layers have no rotary embeddings (nope_full_layers)"
    return None
