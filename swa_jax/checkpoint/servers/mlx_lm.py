"""MLX-LM, on Apple's GPUs."""

from collections.abc import Callable
from typing import Any

from swa_jax.checkpoint.servers.allocation import ring_entries
from swa_jax.checkpoint.servers.common import (
    Cache,
    Device,
    Reads,
    Server,
    ServerClass,
    any_model,
    as_afmoe,
    native,
    rotated_as_olmo3,
)
from swa_jax.model.config import ModelConfig


def _scaled_as_in_mlx(config: ModelConfig) -> bool:
    """MLX-LM has the scaling of RoPE as Hugging Face has it; it has others, such as LongRoPE, in another way."""
    scaling = config.rope_scaling
    if scaling is None:
        return True
    own = scaling.attention_factor, scaling.mscale, scaling.mscale_all_dim
    return scaling.rope_type in ("llama3", "yarn") and scaling.truncate and not any(own)


def _as_in_mlx(config: ModelConfig) -> bool:
    """SwiGLU, and a RoPE of all channels that is scaled as in Hugging Face's classes, if at all."""
    return config.partial_rotary_factor == 1 and config.hidden_act == "silu" and _scaled_as_in_mlx(config)


def _as_laguna(config: ModelConfig) -> bool:
    return config.attention_gate == "head" and not config.attention_bias and _scaled_as_in_mlx(config)


def _mlx(
    name: str, reads: Reads, only: Callable[[ModelConfig], bool] = any_model, **options: Any
) -> tuple[ServerClass, ...]:
    return native(name, reads, spelled=True, only=lambda config: _as_in_mlx(config) and only(config), **options)


# SmolLM3's class sees windows in prompts and not in answers, and Mellum's has experts in every layer.
_CLASSES = {
    "llama": _mlx("llama.Model", Reads.MIXED, alone=True),
    "mistral": _mlx("llama.Model", Reads.MIXED, alone=True),
    "mellum": _mlx(
        "mellum.Model", Reads.MIXED, lambda config: {*config.mlp_kinds} == {"sparse"} and not config.attention_bias
    ),
    "olmo2": _mlx("olmo2.Model", Reads.NEVER),
    "olmo3": _mlx("olmo3.Model", Reads.BOTH, rotated_as_olmo3),
    "qwen2": _mlx(
        "qwen2.Model", Reads.NEVER, lambda config: config.head_dim * config.num_attention_heads == config.hidden_size
    ),
    "qwen3": _mlx("qwen3.Model", Reads.NEVER),
    "smollm3": _mlx("smollm3.Model", Reads.NEVER),
    "afmoe": _mlx("afmoe.Model", Reads.MIXED, as_afmoe),
    "laguna": native("laguna.Model", Reads.MIXED, spelled=True, only=_as_laguna),
    "gemma4_text": native("gemma4_text.Model", spelled=True),
}
_NO_CLASS = {
    **dict.fromkeys(
        ("gemma2", "granite", "phi3", "cohere", "seed_oss", "starcoder2", "apertus", "mixtral"),
        "its class knows no window, and was not compared with full attention",
    ),
    **dict.fromkeys(
        ("gemma3_text", "cohere2", "exaone4"), "its class finds windowed layers by sliding_window_pattern, not by layer"
    ),
    "gpt_oss": "its class reads experts in MXFP4 alone, which is not exported",
    "exaone_moe": "its class reads is_moe_layer, which transformers does not write",
    "mimo_v2_flash": "its class reads hybrid_layer_pattern and swa_ keys, which transformers does not write",
    "ministral3": "its class was not compared",
    **dict.fromkeys(("granite_swa", "granitemoe_swa", "vaultgemma", "cohere2_moe"), "it has no class of that name"),
}
SERVER = Server(
    "MLX-LM",
    "mlx-lm",
    "0.32.2",
    "2026-10-16",
    "mlx_lm.server --model {folder}",
    "--prefill-step-size {batched}",
    _CLASSES,
    # `KVCache.step`
    Cache(
        "a ring for each windowed layer",
        ring_entries,
        {"apple": Device(2048, batches=1, block_tokens=256)},
        least_batch=16,
    ),
    no_class=_NO_CLASS,
)
