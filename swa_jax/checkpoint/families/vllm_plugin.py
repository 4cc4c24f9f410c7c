"""`config.json` for the plug-in for vLLM (`plugins/vllm`): a `model_type` of its own, and the pattern under one key.

Who does not know this `model_type` refuses it, in place of computing full attention without a word.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from swa_jax.base.errors import ConfigError
from swa_jax.checkpoint.families import FAMILIES
from swa_jax.checkpoint.families.common import HfConfig, HfKeys
from swa_jax.model.pattern import VERSION, AttentionPattern

PREFIX = "swa_jax_"
KEY = "swa_pattern"


def architecture_of(model_type: str) -> str:
    """The class of the plug-in that runs a family."""
    return f"SwaJax{FAMILIES[model_type].architecture}"


def with_pattern(hf: HfConfig, pattern: AttentionPattern) -> HfKeys:
    """`hf`, which says full attention in every layer, as the plug-in reads it."""
    said = dataclasses.asdict(pattern) | {"version": VERSION}
    del said["provenance"], said["num_last_tokens"], said["nope_full_layers"]  # which it has none of
    model_type = hf["model_type"]
    return {
        **hf,
        "model_type": PREFIX + model_type,
        "architectures": [architecture_of(model_type)],
        KEY: {name: list(value) if isinstance(value, tuple) else value for name, value in said.items()},
    }


def without_pattern(hf: Mapping[str, Any]) -> tuple[dict[str, Any], AttentionPattern | None]:
    """`hf` as its family says it, and the pattern that was in it; `hf` itself and None if it is not of the plug-in.

    Raises:
      ConfigError: what lies under the key is no pattern.
    """
    name = hf.get("model_type")
    if not isinstance(name, str) or (model_type := name.removeprefix(PREFIX)) == name or model_type not in FAMILIES:
        return dict(hf), None
    said = hf.get(KEY)
    if not isinstance(said, Mapping):
        raise ConfigError(f"config.json: {KEY} must be a pattern in a {name} model, got {str(said)[:100]!r}")
    plain = {key: value for key, value in hf.items() if key != KEY}
    plain |= {"model_type": model_type, "architectures": [FAMILIES[model_type].architecture]}
    return plain, AttentionPattern.from_object(f"config.json: {KEY}", dict(said))
