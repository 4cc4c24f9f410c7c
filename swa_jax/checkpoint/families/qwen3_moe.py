"""Qwen3-MoE: Qwen3 with experts in some or all layers; windows in every layer or in none."""

from __future__ import annotations

from swa_jax.base.errors import ConfigError
from swa_jax.checkpoint.families import experts, qwen2
from swa_jax.checkpoint.families.common import Family, HfConfig, HfKeys, attention_biases, read_dense, write_dense
from swa_jax.checkpoint.families.grammar import layers_of, whole
from swa_jax.checkpoint.families.windows import Windows
from swa_jax.model.config import ModelConfig
from swa_jax.model.layer_types import FULL, WINDOW
from swa_jax.model.pattern import AttentionPattern

DEFAULTS = {"num_key_value_heads": 4, "max_position_embeddings": 32768}


def from_hf(hf: HfConfig) -> ModelConfig:
    fields = experts.read(hf, count=128, per_token=8, width=("moe_intermediate_size", 768), normalized=False)
    return read_dense(
        experts.without(hf),
        DEFAULTS,
        qk_norm=True,
        **attention_biases(hf),
        **experts.with_mlp_types(fields, _mlp_types(hf)),
    )


def _mlp_types(hf: HfConfig) -> list[str]:
    """Every `decoder_sparse_step`-th layer has experts, unless `mlp_only_layers` names it."""
    step, dense = whole(hf, "decoder_sparse_step", 1, least=1), hf.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in dense):
        raise ConfigError(f"config.json: mlp_only_layers must be a list of layers, got {dense!r}")
    return ["dense" if i in dense or (i + 1) % step else "sparse" for i in range(layers_of(hf))]


def to_hf(config: ModelConfig) -> HfKeys:
    dense = {"decoder_sparse_step": 1, "mlp_only_layers": list(config.dense_layers)}
    return write_dense(config, "attention_bias", **dense, **experts.keys_beside_dense(config))


def read_windows(hf: HfConfig, layers: int) -> Windows:
    """Hugging Face's class reads neither `layer_types` nor `max_window_layers`."""
    window = hf.get("sliding_window", qwen2.DEFAULT_WINDOW) if hf.get("use_sliding_window", False) else None
    return window, [FULL if window is None else WINDOW] * layers


def window_keys(config: ModelConfig, pattern: AttentionPattern) -> HfKeys:
    window = pattern.sliding_window
    return {"sliding_window": window, "use_sliding_window": window is not None}


FAMILY = Family("qwen3_moe", "Qwen3MoeForCausalLM", from_hf, to_hf, read_windows, window_keys, mlps_by_peft=False)
