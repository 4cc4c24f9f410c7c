"""The language model of a folder that holds more than one: its `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swa_jax.base.errors import ConfigError
from swa_jax.checkpoint.families import FAMILIES

# The family of a `text_config` that names none, by the model_type around it.
WHOLE_MODELS = {"gemma3": "gemma3_text", "gemma4": "gemma4_text", "mistral3": "mistral", "qwen3_5": "qwen3_5_text"}
# What is said once for the whole model, and is the language model's.
_OF_THE_WHOLE = (
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "pad_token_id",
    "quantization_config",
    "torch_dtype",
    "transformers_version",
)


def text_config(hf: Mapping[str, Any]) -> dict[str, Any] | None:
    """The `config.json` of the language model in one of `WHOLE_MODELS`, which are for images; None for any other.

    Raises:
      ConfigError: no `text_config`, or one of a family that is not supported.
    """
    whole = hf.get("model_type")
    if not isinstance(whole, str) or whole not in WHOLE_MODELS:
        return None
    inner = hf.get("text_config")
    if not isinstance(inner, Mapping):
        raise ConfigError(f"config.json: text_config must be a mapping in a {whole} model, got {str(inner)[:100]!r}")
    name = inner.get("model_type", WHOLE_MODELS[whole])
    if not isinstance(name, str) or name not in FAMILIES:
        raise ConfigError(
            f"config.json: text_config.model_type {str(name)[:100]!r} is not supported; supported: "
            f"{', '.join(sorted(FAMILIES))}"
        )
    said = {key: hf[key] for key in _OF_THE_WHOLE if hf.get(key) is not None}
    return {**inner, "model_type": name, "architectures": [FAMILIES[name].architecture], **said}
