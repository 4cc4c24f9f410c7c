"""Qwen3.5 as a text model: three layers of Gated DeltaNet to one of gated attention, which rotates a quarter of a head.

Hugging Face's class knows no windows: its attention layers are full.
"""

from __future__ import annotations

from swa_jax.base.errors import ConfigError
from swa_jax.checkpoint.families.common import Family, HfConfig, HfKeys, attention_biases, read_dense, write_dense
from swa_jax.checkpoint.families.grammar import layers_of, whole
from swa_jax.checkpoint.families.rope import read_partial_rotary, rope_mapping
from swa_jax.checkpoint.families.windows import Windows, layer_types
from swa_jax.model.config import ModelConfig
from swa_jax.model.layer_types import FULL, LINEAR
from swa_jax.model.pattern import AttentionPattern

DEFAULTS = {"num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 32768}
DEFAULT_SHARE = 0.25  # of a head's channels that are rotated
SIZES = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}


def from_hf(hf: HfConfig) -> ModelConfig:
    """The positions of images (`mrope_section`) are not read: those of text are the same in all three sections."""
    said = rope_mapping(hf)[1].get("partial_rotary_factor", hf.get("partial_rotary_factor")) is not None
    rotated = hf if said else {**hf, "partial_rotary_factor": DEFAULT_SHARE}
    return read_dense(
        rotated,
        DEFAULTS,
        qk_norm=True,
        norm_unit_offset=True,
        attention_gate="query",
        partial_rotary_factor=read_partial_rotary(rotated),
        linear_layers=[i for i, kind in enumerate(_types(hf, layers_of(hf))) if kind == LINEAR],
        **attention_biases(hf),
        **{key: whole(hf, key, default, least=1) for key, default in SIZES.items()},
    )


def _types(hf: HfConfig, layers: int) -> list[str]:
    interval = whole(hf, "full_attention_interval", 4, least=1)
    types = layer_types(hf, [LINEAR if i % interval else FULL for i in range(1, layers + 1)])
    for i, kind in enumerate(types):
        if kind not in (FULL, LINEAR):
            raise ConfigError(f"config.json: layer_types[{i}] is {kind!r}; supported: {FULL}, {LINEAR}")
    if types and FULL not in types:
        raise ConfigError(f"config.json: layer_types has no {FULL}: there is no layer that a pattern could speak of")
    return types


def _windows(hf: HfConfig, layers: int) -> Windows:
    return None, _types(hf, layers)


def to_hf(config: ModelConfig) -> HfKeys:
    return write_dense(config, "attention_bias", "partial_rotary_factor", *SIZES)


def _window_keys(config: ModelConfig, pattern: AttentionPattern) -> HfKeys:
    return {"layer_types": list(AttentionPattern.everywhere(FULL, config).layer_types)}


FAMILY = Family(
    "qwen3_5_text", "Qwen3_5ForCausalLM", from_hf, to_hf, _windows, _window_keys, peculiarity="Gated DeltaNet"
)
