"""EXAONE 4: norms on what attention and MLP give, QK norms; a model with windows rotates windowed layers only."""

from __future__ import annotations

import dataclasses

from swa_jax.checkpoint.families.common import Family, HfConfig, HfKeys, read_dense, write_dense
from swa_jax.checkpoint.families.windows import Windows, one_full_in, window_keys_with_nope, within_context
from swa_jax.model.config import ModelConfig, RopeKind
from swa_jax.model.layer_stacks import nope_of_full_layers
from swa_jax.model.layer_types import FULL
from swa_jax.model.pattern import AttentionPattern

DEFAULT_CONTEXT = 2048
DEFAULTS = {"num_key_value_heads": 32, "max_position_embeddings": DEFAULT_CONTEXT, "rms_norm_eps": 1e-5}
DEFAULT_WINDOW = 4096
_types = one_full_in(4, "sliding_window_pattern")


def from_hf(hf: HfConfig) -> ModelConfig:
    config = read_dense(hf, DEFAULTS, norm_placement="post", qk_norm=True)
    return dataclasses.replace(config, rope_layers=rope_layers(hf, config.num_hidden_layers))


def rope_layers(hf: HfConfig, layers: int) -> tuple[RopeKind, ...]:
    """Without a window all layers have rotary embeddings."""
    return () if hf.get("sliding_window", DEFAULT_WINDOW) is None else nope_of_full_layers(_types(hf, layers))


def read_windows(hf: HfConfig, layers: int) -> Windows:
    window = hf.get("sliding_window", DEFAULT_WINDOW)
    types = [FULL] * layers if window is None else _types(hf, layers)
    return within_context(window, types, hf.get("max_position_embeddings") or DEFAULT_CONTEXT)


def window_keys(config: ModelConfig, pattern: AttentionPattern) -> HfKeys:
    """Without a window every layer has rotary embeddings, and only then may a full layer have them."""
    if not config.rope_layers and pattern.sliding_window is None:
        return {"sliding_window": None, "layer_types": [FULL] * pattern.num_layers}
    return window_keys_with_nope(config, pattern)


FAMILY = Family(
    "exaone4",
    "Exaone4ForCausalLM",
    from_hf,
    write_dense,
    read_windows,
    window_keys,
    peculiarity="rotary embeddings in these layers alone",
)
