"""VaultGemma: Gemma 2 without the norms on what attention and MLP give."""

from __future__ import annotations

from swa_jax.checkpoint.families import gemma2
from swa_jax.checkpoint.families.common import Family, HfConfig
from swa_jax.checkpoint.families.windows import window_always
from swa_jax.model.config import ModelConfig

NAMES = {"layers.post_attention_norm.scale": "model.layers.{layer}.pre_feedforward_layernorm.weight"}


def from_hf(hf: HfConfig) -> ModelConfig:
    return gemma2.read_gemma(hf, gemma2.DEFAULTS, attention_softcap=50.0, logit_softcap=30.0, norm_placement="pre")


FAMILY = Family(
    "vaultgemma", "VaultGemmaForCausalLM", from_hf, gemma2.to_hf, gemma2.read_windows, window_always, tensor_names=NAMES
)
