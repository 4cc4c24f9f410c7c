"""SWAT: this library's own family, which can say all that the decoder can do; no other library reads it."""

from __future__ import annotations

import dataclasses

from swa_jax.base.errors import ConfigError
from swa_jax.base.settings import from_dict, nearest, to_dict
from swa_jax.checkpoint.families.common import Family, HfConfig, HfKeys
from swa_jax.checkpoint.families.windows import Windows, windows_alike
from swa_jax.model.config import ModelConfig
from swa_jax.model.layer_types import LINEAR
from swa_jax.model.pattern import AttentionPattern

# Keys that `config.json` may hold beside the fields of `ModelConfig`; they do not change what the decoder computes.
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


def from_hf(hf: HfConfig) -> ModelConfig:
    """Every field of `ModelConfig` under its own name."""
    fields = [f.name for f in dataclasses.fields(ModelConfig)]
    for key in hf:
        if key not in fields and key not in _NEUTRAL:
            raise ConfigError(f"config.json: unknown key '{key}' for model_type 'swat'{nearest(key, fields)}")
    return from_dict(ModelConfig, {key: value for key, value in hf.items() if key in fields}, "config.json")


def _windows(hf: HfConfig, layers: int) -> Windows:
    """Windows as `sliding_window` and `layer_types` say, in the layers that are not in `linear_layers`."""
    window, types = windows_alike(by_type=True)(hf, layers)
    linear = from_hf(hf).linear_layers
    return window, [LINEAR if layer in linear else kind for layer, kind in enumerate(types)]


def window_keys(config: ModelConfig, pattern: AttentionPattern) -> HfKeys:
    if pattern.sliding_window is None:
        return {}
    return {"sliding_window": pattern.sliding_window, "layer_types": list(pattern.layer_types)}


FAMILY = Family("swat", "SwatForCausalLM", from_hf, to_dict, _windows, window_keys)
