"""StarCoder2: LayerNorms and projections with biases, MLPs without a gate, and a window in every layer or in none."""

from __future__ import annotations

from swa_jax.checkpoint.families.common import Family, HfConfig, HfKeys, read_dense, write_dense
from swa_jax.checkpoint.families.windows import window_alike_keys, windows_alike
from swa_jax.model.config import ModelConfig

DEFAULTS = {
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "initializer_range": 0.018042,
}
NAMES = {
    f"layers.mlp.{ours}.{part}": f"model.layers.{{layer}}.mlp.{theirs}.{suffix}"
    for ours, theirs in (("up_proj", "c_fc"), ("down_proj", "c_proj"))
    for part, suffix in (("kernel", "weight"), ("bias", "bias"))
}


def from_hf(hf: HfConfig) -> ModelConfig:
    bias = bool(hf.get("use_bias", True))
    return read_dense(
        {**hf, "hidden_act": hf.get("hidden_act", "gelu_pytorch_tanh")},
        DEFAULTS,
        attention_bias=bias,
        attention_out_bias=bias,
        mlp_bias=bias,
        gated_mlp=False,
        norm_type="layer",
        norm_bias=True,
        rms_norm_eps=hf.get("norm_epsilon", 1e-5),
    )


def to_hf(config: ModelConfig) -> HfKeys:
    hf = write_dense(config, use_bias=config.mlp_bias)
    return hf | {"norm_epsilon": hf.pop("rms_norm_eps")}


FAMILY = Family(
    "starcoder2",
    "Starcoder2ForCausalLM",
    from_hf,
    to_hf,
    windows_alike(),
    window_alike_keys,
    peculiarity="StarCoder2's LayerNorms",
    tensor_names=NAMES,
)
