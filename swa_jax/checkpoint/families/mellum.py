"""Mellum 2: Qwen3-MoE, or Qwen3 where all layers are dense, with windows by `layer_types`.

Rotary embeddings may differ between full and windowed layers.
"""

from __future__ import annotations

from swa_jax.checkpoint.families import experts
from swa_jax.checkpoint.families.common import Family, HfConfig, HfKeys, attention_biases, read_dense, write_dense
from swa_jax.checkpoint.families.rope import ROPE_KEYS, rope_keys_by_type, rope_of, with_local_rope, without_rope
from swa_jax.checkpoint.families.windows import one_full_in, window_keys_by_type, windows_of
from swa_jax.model.config import ModelConfig
from swa_jax.model.layer_types import FULL, WINDOW

DEFAULT_CONTEXT, DEFAULT_WINDOW = 131072, 1024
DEFAULTS = {"num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": DEFAULT_CONTEXT}
DEFAULT_ROPE = {
    FULL: {"rope_type": "default", "rope_theta": 500000.0},
    WINDOW: {"rope_type": "default", "rope_theta": 10000.0},
}
read_types = one_full_in(1)


def from_hf(hf: HfConfig) -> ModelConfig:
    """As in Hugging Face's class RoPE stands in `rope_parameters`, by layer type, and nowhere else, and layers for
    multi-token prediction are left out."""
    fields = experts.read(hf, count=64, per_token=8, width=("moe_intermediate_size", 896))
    own = {key: value for key, value in hf.items() if key not in ROPE_KEYS}
    own["rope_parameters"] = hf.get("rope_parameters") or DEFAULT_ROPE
    config = read_dense(
        experts.without(rope_of(own, FULL)),
        DEFAULTS,
        qk_norm=True,
        **attention_biases(hf),
        **experts.with_mlp_types(fields, experts.mlp_types(hf)),
    )
    return with_local_rope(config, own, read_types(hf, config.num_hidden_layers), config.rope_theta)


def to_hf(config: ModelConfig) -> HfKeys:
    """Without the older spelling of RoPE: Hugging Face's class would take it for the one of all layers."""
    own = write_dense(config, "attention_bias", mlp_layer_types=list(config.mlp_kinds))
    sparse = experts.keys_beside_dense(config) if config.num_experts else {}
    return without_rope(own) | sparse | rope_keys_by_type(config)


read_windows = windows_of(read_types, DEFAULT_WINDOW, DEFAULT_CONTEXT)
FAMILY = Family("mellum", "MellumForCausalLM", from_hf, to_hf, read_windows, window_keys_by_type, mlps_by_peft=False)
