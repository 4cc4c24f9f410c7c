"""What a family is, and the keys of `config.json` that mean the same in every family."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from swa_jax.base.errors import ConfigError
from swa_jax.base.settings import from_dict
from swa_jax.checkpoint.families.quantization import fp8_blocks
from swa_jax.checkpoint.families.rope import Windows as Windows
from swa_jax.checkpoint.families.rope import read_rope, rope_keys
from swa_jax.model.config import ModelConfig
from swa_jax.model.layer_types import FULL
from swa_jax.model.pattern import AttentionPattern

# Fields of `ModelConfig` that every family writes under the field's own name.
FIELDS = (
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

# `hidden_act` of config.json and of `ModelConfig`; the first of several spellings is written.
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


def no_windows(hf: Mapping[str, Any], layers: int) -> Windows:
    """A family whose layers are all full: Hugging Face's class reads no key for windows, `layer_types` included."""
    return None, [FULL] * layers


def no_window_keys(config: ModelConfig, pattern: AttentionPattern) -> dict[str, Any]:
    """A family that has no keys for windows: full attention is all that it can say."""
    return {}


def layer_types(hf: Mapping[str, Any], by_default: list[str]) -> list[str]:
    """The key `layer_types`, or else what the family assumes.

    Raises:
      ConfigError: no list, or another number of layer types than of layers.
    """
    types = by_default if hf.get("layer_types") is None else hf["layer_types"]
    if not isinstance(types, list):
        raise ConfigError(f"config.json: layer_types must be a list with one type a layer, got {types!r}")
    if len(types) != len(by_default):
        raise ConfigError(f"config.json: layer_types has {len(types)} entries for {len(by_default)} layers")
    return types


def positive_int(hf: Mapping[str, Any], key: str, by_default: int) -> int:
    """A key that counts something."""
    value = hf.get(key, by_default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"config.json: {key} must be a whole number above 0, got {value!r}")
    return value


@dataclasses.dataclass(frozen=True)
class Family:
    """How one family of models is described in `config.json`.

    Attributes:
      model_type, architecture: its names there.
      from_hf: reads a `config.json` of this family as a `ModelConfig`, with the family's defaults for absent keys.
      to_hf: writes what a `ModelConfig` of this family says, less the windows.
      read_windows: reads the window and the layer types of a `config.json` with a number of layers.
      window_keys: the keys that say what a pattern says of a model; all of its layers are full or windowed. Whether
        they really do is found by reading them again.
      peculiarity: what this family computes and no family with windows does, for a sentence; "" if nothing.
      tensor_names: {parameter of the decoder: its name in checkpoints} where that is not the one that
        `swa_jax.model.parameters` declares, such as {"norm.scale": "model.final_layernorm.weight"}; "{layer}" stands
        for the number of a layer.
      joined: {tensor of Hugging Face's checkpoints: the parameters that it holds, one below the other}, such as
        {"...qkv_proj.weight": ("layers.attention.q_proj.kernel", ...)}. Import cuts it into theirs, export joins them.
      constants: {tensor of Hugging Face's checkpoints: its number}: tensors without axes, the same in all models.
      mlps_by_peft: whether PEFT loads adapters of this family's dense MLPs; PEFT 0.21 takes those of some families, and
        adapters of AFMoE's gates, for adapters of experts.
    """

    model_type: str
    architecture: str
    from_hf: Callable[[Mapping[str, Any]], ModelConfig]
    to_hf: Callable[[ModelConfig], dict[str, Any]]
    read_windows: Callable[[Mapping[str, Any], int], Windows] = no_windows
    window_keys: Callable[[ModelConfig, AttentionPattern], dict[str, Any]] = no_window_keys
    peculiarity: str = ""
    tensor_names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    joined: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    constants: Mapping[str, float] = dataclasses.field(default_factory=dict)
    mlps_by_peft: bool = True


# ---- reading ----


def read_dense(hf: Mapping[str, Any], defaults: Mapping[str, Any], **fields: Any) -> ModelConfig:
    """A dense decoder as most families spell it.

    Args:
      defaults: what Hugging Face's configuration class assumes where a key is absent. `num_key_value_heads` None
        means as many as query heads.
      fields: fields of `ModelConfig` that the family reads in its own way, or that it fixes.

    Raises:
      ConfigError: a feature that the decoder does not have, a missing key, or a value of the wrong type.
    """
    _refuse_unsupported(hf)
    given = {key: hf[key] for key in FIELDS if hf.get(key) is not None}
    values = {key: value for key, value in defaults.items() if key not in hf} | given
    heads = values.get("num_attention_heads")
    if values.get("num_key_value_heads") is None:
        values["num_key_value_heads"] = heads
    if "head_dim" not in values and isinstance(heads, int) and isinstance(values.get("hidden_size"), int):
        values["head_dim"] = _divide(values["hidden_size"], heads)
    values |= {"model_type": hf["model_type"], "hidden_act": _activation(hf)} | fields
    config = from_dict(ModelConfig, values, "config.json")
    theta, scaling = read_rope(hf, config.rope_theta, config.max_position_embeddings, config.partial_rotary_factor)
    return dataclasses.replace(config, rope_theta=theta, rope_scaling=scaling)


def _divide(hidden_size: int, heads: int) -> int:
    if heads < 1 or hidden_size % heads:
        raise ConfigError(
            f"config.json: hidden_size ({hidden_size}) is not a multiple of num_attention_heads ({heads}); "
            "give head_dim"
        )
    return hidden_size // heads


def _activation(hf: Mapping[str, Any]) -> str:
    name = hf.get("hidden_act", "silu")
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise ConfigError(f"config.json: hidden_act '{name}' is not supported; supported: silu, gelu_pytorch_tanh")
    return _ACTIVATIONS[name]


def _refuse_unsupported(hf: Mapping[str, Any]) -> None:
    fp8_blocks(hf)
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        if hf.get(key):
            raise ConfigError(
                f"config.json: {key} is set, but model_type '{hf.get('model_type')}' is read as a dense model: "
                "experts are supported in families whose own class has them, such as qwen3_moe, mixtral and gpt_oss"
            )
    if hf.get("is_causal") is False:
        raise ConfigError(
            "config.json: is_causal is false (tokens see what follows them), which is not supported; supported: "
            "causal models"
        )
    if hf.get("use_mrope"):
        raise ConfigError("config.json: use_mrope (rotary embeddings of images) is not supported; supported: text")


# ---- writing ----


def write_dense(config: ModelConfig, **keys: Any) -> dict[str, Any]:
    """The keys that most families write, and `keys` beside them."""
    names = (name for name, ours in _ACTIVATIONS.items() if ours == config.hidden_act)
    activation = next(names, config.hidden_act)
    hf: dict[str, Any] = {"model_type": config.model_type, "hidden_act": activation}
    return hf | {key: getattr(config, key) for key in FIELDS} | keys | rope_keys(config)
