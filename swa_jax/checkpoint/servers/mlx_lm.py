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
    native,
    rotated_as_olmo3,
)
from swa_jax.model.config import ModelConfig


def _as_in_mlx(config: ModelConfig) -> bool:
    """SwiGLU, and a RoPE of all channels that MLX-LM has as Hugging Face has it; others, such as LongRoPE, differ."""
    scaling = config.rope_scaling
    if config.partial_rotary_factor != 1 or config.hidden_act != "silu":
        return False
    if scaling is None:
        return True
    own = scaling.attention_factor, scaling.mscale, scaling.mscale_all_dim
    return scaling.rope_type in ("llama3", "yarn") and scaling.truncate and not any(own)


def _mlx(
    name: str, reads: Reads, only: Callable[[ModelConfig], bool] = any_model, **options: Any
) -> tuple[ServerClass, ...]:
    return native(name, reads, spelled=True, only=lambda config: _as_in_mlx(config) and only(config), **options)


# MLX-LM's other classes read another key for windows, or none. SmolLM3's sees them in prompts and not in answers, and
# Mellum's has experts in every layer.
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
}
SERVER = Server(
    "MLX-LM",
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
)
