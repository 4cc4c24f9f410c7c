"""gpt-oss: experts with biases in every layer, sink logits, and a window in every second layer."""

from __future__ import annotations

from swa_jax.checkpoint.families import experts
from swa_jax.checkpoint.families.common import Family, HfConfig, HfKeys, attention_biases, read_dense, write_dense
from swa_jax.checkpoint.families.quantization import is_mxfp4, without_quantization
from swa_jax.checkpoint.families.rope import with_default_rope
from swa_jax.checkpoint.families.windows import one_full_in, windows_of
from swa_jax.model.config import ModelConfig
from swa_jax.model.pattern import AttentionPattern

DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
}
DEFAULT_WINDOW = 128
DEFAULT_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def from_hf(hf: HfConfig) -> ModelConfig:
    """Weights in MXFP4 are the import's to turn into bf16 (`swa_jax.checkpoint.mxfp4`)."""
    fields = experts.read(hf, count=128, per_token=4, width=("intermediate_size", 2880))
    hf = with_default_rope(experts.without(hf), DEFAULT_ROPE)
    if is_mxfp4(hf):
        hf = without_quantization(hf)
    return read_dense(
        hf,
        DEFAULTS,
        **attention_biases(hf, by_default=True),
        sink_logits=True,
        mlp_bias=True,
        fused_experts=True,
        swiglu_limit=hf.get("swiglu_limit", 7.0),
        swiglu_alpha=hf.get("swiglu_alpha", 1.702),
        **fields | {"norm_topk_prob": True},
    )


def to_hf(config: ModelConfig) -> HfKeys:
    return write_dense(config, "attention_bias", "swiglu_limit", "swiglu_alpha") | experts.keys(config)


def window_keys(config: ModelConfig, pattern: AttentionPattern) -> HfKeys:
    """Hugging Face's class needs a window even where no layer has it."""
    return {"sliding_window": pattern.sliding_window or DEFAULT_WINDOW, "layer_types": list(pattern.layer_types)}


read_windows = windows_of(one_full_in(2), DEFAULT_WINDOW)
FAMILY = Family(
    "gpt_oss", "GptOssForCausalLM", from_hf, to_hf, read_windows, window_keys, peculiarity="gpt-oss's experts"
)
