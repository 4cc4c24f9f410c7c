"""Qwen3-MoE: Qwen3 with experts in some or all layers; windows in every layer or in none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swa_jax.base.errors import ConfigError
from swa_jax.checkpoint.families import qwen2
from swa_jax.checkpoint.families.common import Family, Windows, read_dense, write_dense
from swa_jax.checkpoint.families.experts import expert_keys_beside_dense, read_experts, with_mlp_types, without_experts
from swa_jax.model.config import ModelConfig
from swa_jax.model.layer_types import FULL, WINDOW
from swa_jax.model.pattern import AttentionPattern

DEFAULTS = {"num_key_value_heads": 4, "max_position_embeddings": 32768}


def from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    bias = bool(hf.get("attention_bias"))
    experts = read_experts(hf, count=128, per_token=8, width=("moe_intermediate_size", 768), normalized=False)
    return read_dense(
        without_experts(hf),
        DEFAULTS,
        qk_norm=True,
        attention_bias=bias,
        attention_out_bias=bias,
        **with_mlp_types(experts, _mlp_types(hf)),
    )


def _mlp_types(hf: Mapping[str, Any]) -> list[str]:
    """Every `decoder_sparse_step`-th layer has experts, unless `mlp_only_layers` names it."""
    layers, step, dense = (
        hf.get("num_hidden_layers"),
        hf.get("decoder_sparse_step", 1),
        hf.get("mlp_only_layers") or [],
    )
    if not isinstance(step, int) or step < 1:
        raise ConfigError(f"config.json: decoder_sparse_step must be a whole number above 0, got {step!r}")
    if not isinstance(dense, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in dense):
        raise ConfigError(f"config.json: mlp_only_layers must be a list of layers, got {dense!r}")
    count = layers if isinstance(layers, int) else 0  # `read_dense` says what is wrong with it
    return ["dense" if i in dense or (i + 1) % step else "sparse" for i in range(count)]


def to_hf(config: ModelConfig) -> dict[str, Any]:
    dense = list(config.dense_layers)
    return write_dense(
        config,
        attention_bias=config.attention_bias,
        decoder_sparse_step=1,
        mlp_only_layers=dense,
        **expert_keys_beside_dense(config),
    )


def read_windows(hf: Mapping[str, Any], layers: int) -> Windows:
    """Hugging Face's class reads neither `layer_types` nor `max_window_layers`."""
    window = hf.get("sliding_window", qwen2.DEFAULT_WINDOW) if hf.get("use_sliding_window", False) else None
    return window, [FULL if window is None else WINDOW] * layers


def window_keys(config: ModelConfig, pattern: AttentionPattern) -> dict[str, Any]:
    window = pattern.sliding_window
    return {"sliding_window": window, "use_sliding_window": window is not None}


FAMILY = Family("qwen3_moe", "Qwen3MoeForCausalLM", from_hf, to_hf, read_windows, window_keys, mlps_by_peft=False)
