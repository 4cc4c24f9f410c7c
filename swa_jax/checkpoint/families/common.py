"""What a family is, and the keys of `config.json` that mean the same in every family."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from swa_jax.base.errors import ConfigError
from swa_jax.base.settings import from_dict
from swa_jax.checkpoint.families.grammar import HfConfig as HfConfig
from swa_jax.checkpoint.families.grammar import HfKeys as HfKeys
from swa_jax.checkpoint.families.quantization import fp8_blocks
from swa_jax.checkpoint.families.rope import read_rope, rope_keys
from swa_jax.checkpoint.families.windows import WindowReader, no_window_keys, no_windows
from swa_jax.model.config import ModelConfig
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
    from_hf: Callable[[HfConfig], ModelConfig]
    to_hf: Callable[[ModelConfig], HfKeys]
    read_windows: WindowReader = no_windows
    window_keys: Callable[[ModelConfig, AttentionPattern], HfKeys] = no_window_keys
    peculiarity: str = ""
    tensor_names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    joined: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    constants: Mapping[str, float] = dataclasses.field(default_factory=dict)
    mlps_by_peft: bool = True


# ---- reading ----


def read_dense(hf: HfConfig, defaults: Mapping[str, Any], **fields: Any) -> ModelConfig:
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


def attention_biases(hf: HfConfig, *, by_default: bool = False) -> dict[str, bool]:
    """Fields of `ModelConfig`, where `attention_bias` is that of all four projections."""
    bias = bool(hf.get("attention_bias", by_default))
    return {"attention_bias": bias, "attention_out_bias": bias}


def _divide(hidden_size: int, heads: int) -> int:
    if heads < 1 or hidden_size % heads:
        raise ConfigError(
            f"config.json: hidden_size ({hidden_size}) is not a multiple of num_attention_heads ({heads}); "
            "give head_dim"
        )
    return hidden_size // heads


def _activation(hf: HfConfig) -> str:
    name = hf.get("hidden_act", "silu")
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise ConfigError(f"config.json: hidden_act '{name}' is not supported; supported: silu, gelu_pytorch_tanh")
    return _ACTIVATIONS[name]


def _refuse_unsupported(hf: HfConfig) -> None:
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


def write_dense(config: ModelConfig, *fields: str, **keys: Any) -> HfKeys:
    """The keys that most families write, those of more `fields` of `ModelConfig` under their own names, and `keys`."""
    names = (name for name, ours in _ACTIVATIONS.items() if ours == config.hidden_act)
    activation = next(names, config.hidden_act)
    hf: HfKeys = {"model_type": config.model_type, "hidden_act": activation}
    return hf | {key: getattr(config, key) for key in (*FIELDS, *fields)} | keys | rope_keys(config)


def writes(*fields: str) -> Callable[[ModelConfig], HfKeys]:
    """What writes the keys that most families write, and those of more fields of `ModelConfig`."""
    return lambda config: write_dense(config, *fields)
