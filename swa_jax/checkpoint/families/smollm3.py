"""SmolLM3: no rotary embeddings in some layers (`no_rope_layers`); windows by `layer_types`, if switched on."""

from __future__ import annotations

from swa_jax.base.errors import ConfigError
from swa_jax.checkpoint.families.common import Family, HfConfig, HfKeys, attention_biases, read_dense, write_dense
from swa_jax.checkpoint.families.grammar import layers_of
from swa_jax.checkpoint.families.windows import Windows, layer_types
from swa_jax.model.config import ModelConfig
from swa_jax.model.layer_types import FULL, WINDOW
from swa_jax.model.pattern import AttentionPattern

DEFAULTS = {"num_key_value_heads": 4, "max_position_embeddings": 32768, "rope_theta": 2e6, "tie_word_embeddings": True}


def from_hf(hf: HfConfig) -> ModelConfig:
    return read_dense(
        hf, DEFAULTS, **attention_biases(hf), mlp_bias=bool(hf.get("mlp_bias")), rope_layers=_ropes(hf, layers_of(hf))
    )


def _ropes(hf: HfConfig, layers: int) -> list[str]:
    """`no_rope_layers` is 1 where a layer has rotary embeddings, despite its name. By default 3 in 4 have them."""
    rotated, interval = hf.get("no_rope_layers"), hf.get("no_rope_layer_interval", 4)
    if rotated is None and isinstance(interval, int) and interval > 0:
        rotated = [int((i + 1) % interval != 0) for i in range(layers)]
    if not isinstance(rotated, list) or len(rotated) < layers or any(one not in (0, 1) for one in rotated):
        raise ConfigError(
            "config.json: no_rope_layers must be a list with 1 (rotary embeddings) or 0 (none) for each of the "
            f"{layers} layers, or be absent with no_rope_layer_interval above 0; got {rotated!r}"
        )
    return ["global" if one else "none" for one in rotated[:layers]]


def to_hf(config: ModelConfig) -> HfKeys:
    no_rope_layers = [int(kind != "none") for kind in config.rope_kinds_by_layer]
    return write_dense(config, "attention_bias", "mlp_bias", no_rope_layers=no_rope_layers)


def read_windows(hf: HfConfig, layers: int) -> Windows:
    """Without `layer_types` the layers without rotary embeddings have the window."""
    window = hf.get("sliding_window") if hf.get("use_sliding_window", False) else None
    none = FULL if window is None else WINDOW
    return window, layer_types(hf, [FULL if kind == "global" else none for kind in _ropes(hf, layers)])


def window_keys(config: ModelConfig, pattern: AttentionPattern) -> HfKeys:
    window, types = pattern.sliding_window, list(pattern.layer_types)
    return {"sliding_window": window, "layer_types": types, "use_sliding_window": window is not None}


FAMILY = Family("smollm3", "SmolLM3ForCausalLM", from_hf, to_hf, read_windows, window_keys)
