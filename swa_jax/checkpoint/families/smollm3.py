"""SmolLM3: no rotary embeddings in some layers (`no_rope_layers`); windows by `layer_types`, if switched on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swa_jax.base.errors import ConfigError
from swa_jax.checkpoint.families.common import Family, Windows, layer_types, read_dense, write_dense
from swa_jax.model.config import ModelConfig
from swa_jax.model.layer_types import FULL, WINDOW
from swa_jax.model.pattern import AttentionPattern

DEFAULTS = {"num_key_value_heads": 4, "max_position_embeddings": 32768, "rope_theta": 2e6, "tie_word_embeddings": True}


def from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    bias, layers = bool(hf.get("attention_bias")), hf.get("num_hidden_layers")
    return read_dense(
        hf,
        DEFAULTS,
        attention_bias=bias,
        attention_out_bias=bias,
        mlp_bias=bool(hf.get("mlp_bias")),
        rope_layers=_ropes(hf, layers) if isinstance(layers, int) else (),
    )


def _ropes(hf: Mapping[str, Any], layers: int) -> list[str]:
    """`no_rope_layers` is 1 where a layer has rotary embeddings, despite its name. By default 3 in 4 have them."""
    turned, interval = hf.get("no_rope_layers"), hf.get("no_rope_layer_interval", 4)
    if turned is None and isinstance(interval, int) and interval > 0:
        turned = [int((i + 1) % interval != 0) for i in range(layers)]
    if not isinstance(turned, list) or len(turned) < layers or any(one not in (0, 1) for one in turned):
        raise ConfigError(
            "config.json: no_rope_layers must be a list with 1 (rotary embeddings) or 0 (none) for each of the "
            f"{layers} layers, or be absent with no_rope_layer_interval above 0; got {turned!r}"
        )
    return ["global" if one else "none" for one in turned[:layers]]


def to_hf(config: ModelConfig) -> dict[str, Any]:
    ropes = config.rope_layers or ("global",) * config.num_hidden_layers
    return write_dense(
        config,
        attention_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
        no_rope_layers=[int(kind != "none") for kind in ropes],
    )


def read_windows(hf: Mapping[str, Any], layers: int) -> Windows:
    """Without `layer_types` the layers without rotary embeddings have the window."""
    window = hf.get("sliding_window") if hf.get("use_sliding_window", False) else None
    none = FULL if window is None else WINDOW
    return window, layer_types(hf, [FULL if kind == "global" else none for kind in _ropes(hf, layers)])


def window_keys(config: ModelConfig, pattern: AttentionPattern) -> dict[str, Any]:
    window = pattern.sliding_window
    types = list(pattern.layer_types)
    return {"sliding_window": window, "layer_types": types, "use_sliding_window": window is not None}


FAMILY = Family("smollm3", "SmolLM3ForCausalLM", from_hf, to_hf, read_windows, window_keys)
