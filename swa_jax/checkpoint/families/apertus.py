"""Apertus: Llama with QK norms and MLPs without a gate, whose activation (xIELU) each layer learns."""

from __future__ import annotations

from typing import Any

from swa_jax.checkpoint.families.common import Family, HfConfig, attention_biases, read_dense, writes
from swa_jax.checkpoint.families.rope import with_default_rope
from swa_jax.model.config import XIELU_BETA, ModelConfig

DEFAULTS = {"num_key_value_heads": None, "max_position_embeddings": 65536, "rms_norm_eps": 1e-5, "rope_theta": 12e6}
DEFAULT_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 12e6,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
NAMES = {
    "layers.input_norm.scale": "model.layers.{layer}.attention_layernorm.weight",
    "layers.post_attention_norm.scale": "model.layers.{layer}.feedforward_layernorm.weight",
}
CONSTANTS = {
    "model.layers.{layer}.mlp.act_fn.beta": XIELU_BETA,
    "model.layers.{layer}.mlp.act_fn.eps": -1e-6,  # from here to 0 Hugging Face's class takes it for the input
}


def from_hf(hf: HfConfig) -> ModelConfig:
    act: dict[str, Any] = {}
    if hf.get("hidden_act", "xielu") == "xielu":  # no other family has it
        hf, act = {**hf, "hidden_act": "silu"}, {"hidden_act": "xielu"}
    return read_dense(
        with_default_rope(hf, DEFAULT_ROPE), DEFAULTS, **attention_biases(hf), qk_norm=True, gated_mlp=False, **act
    )


FAMILY = Family(
    "apertus",
    "ApertusForCausalLM",
    from_hf,
    writes("attention_bias"),
    peculiarity="Apertus's activation",
    tensor_names=NAMES,
    constants=CONSTANTS,
)
