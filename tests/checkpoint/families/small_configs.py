"""A small configuration of each family, as Hugging Face writes it."""

from layer_letters import types_of

from swa_jax.checkpoint.families import model_config
from swa_jax.model.config import ModelConfig
from swa_jax.model.layer_types import FULL, WINDOW
from swa_jax.model.pattern import AttentionPattern

SIZES = {"vocab_size": 40, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
SPARSE = {"num_key_value_heads": 2, "num_experts_per_tok": 2, "num_experts": 4, "moe_intermediate_size": 16}
ROPES = {
    FULL: {"rope_type": "default", "rope_theta": 7e5, "partial_rotary_factor": 0.5},
    WINDOW: {"rope_type": "default", "rope_theta": 90.0},
}


def config_of(family: str, **keys) -> ModelConfig:
    return model_config({"model_type": family, **SIZES, **keys})


def pattern_of(letters: str, **fields) -> AttentionPattern:
    return AttentionPattern(types_of(letters), None if set(letters) == {"F"} else 9, **fields)
