"""Phi-3 and Phi-4: Llama with joined projections and LongRoPE; Phi-4-mini rotates part of a head's channels only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swa_jax.base.errors import ConfigError
from swa_jax.checkpoint.families.common import Family, HfConfig, HfKeys, read_dense, write_dense
from swa_jax.checkpoint.families.rope import read_partial_rotary
from swa_jax.checkpoint.families.windows import window_alike_keys, windows_of
from swa_jax.model.config import ModelConfig
from swa_jax.model.layer_types import WINDOW

DEFAULT_CONTEXT = 4096
DEFAULTS = {"num_key_value_heads": None, "max_position_embeddings": DEFAULT_CONTEXT, "rms_norm_eps": 1e-5}
DEFAULT_ORIGINAL = 4096  # positions of the first training, where the key is absent
DEFAULT_PADDING = 32000  # the padding token, where the key is absent
OLD_LONGROPE = ("su", "yarn")  # what Phi-3's first checkpoints call LongRoPE
JOINED = {
    "model.layers.{layer}.self_attn.qkv_proj.weight": (
        "layers.attention.q_proj.kernel",
        "layers.attention.k_proj.kernel",
        "layers.attention.v_proj.kernel",
    ),
    "model.layers.{layer}.mlp.gate_up_proj.weight": ("layers.mlp.gate_proj.kernel", "layers.mlp.up_proj.kernel"),
}


def from_hf(hf: HfConfig) -> ModelConfig:
    original = hf.get("original_max_position_embeddings") or DEFAULT_ORIGINAL
    named = {key: _as_longrope(hf[key], key) for key in ("rope_scaling", "rope_parameters") if hf.get(key)}
    return read_dense(
        {**hf, **named, "original_max_position_embeddings": original},
        DEFAULTS,
        partial_rotary_factor=read_partial_rotary(hf),
    )


def _as_longrope(rope: Any, key: str) -> Any:
    """RoPE parameters with today's name of LongRoPE, which is the only scaling that this family knows."""
    if not isinstance(rope, Mapping):
        return rope  # refused where it is read
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind in OLD_LONGROPE:
        return {**rope, "rope_type": "longrope"}
    if kind not in ("default", "longrope"):
        raise ConfigError(
            f"config.json: {key}.rope_type '{kind}' is not supported for phi3; supported: default, longrope"
        )
    return rope


def to_hf(config: ModelConfig) -> HfKeys:
    hf, scaling = write_dense(config), config.rope_scaling
    if config.vocab_size <= DEFAULT_PADDING:
        hf["pad_token_id"] = None  # Hugging Face's class refuses its own default in a small vocabulary
    if scaling is None or scaling.rope_type != "longrope":
        return hf
    original = scaling.original_max_position_embeddings or config.max_position_embeddings
    if scaling.attention_factor is None and scaling.factor == config.max_position_embeddings / original:
        # transformers 4 wants these three keys and no other.
        factors = {key: hf["rope_scaling"][key] for key in ("short_factor", "long_factor")}
        hf["rope_scaling"] = {"type": "longrope"} | factors
    return hf | {"original_max_position_embeddings": original}


FAMILY = Family(
    "phi3",
    "Phi3ForCausalLM",
    from_hf,
    to_hf,
    windows_of(lambda hf, layers: [WINDOW] * layers, None, DEFAULT_CONTEXT),
    window_alike_keys,
    peculiarity="rotary embeddings of part of a head's channels",
    joined=JOINED,
)
