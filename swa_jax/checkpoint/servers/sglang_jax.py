"""sglang-jax: SGLang in JAX, on TPUs. Of its classes, those of Gemma 2 and Gemma 4 and MiMo's know windows.

It reads `config.json` as transformers 4 does.
"""

from swa_jax.checkpoint.families import FAMILIES
from swa_jax.checkpoint.servers.allocation import Blocks, Pools
from swa_jax.checkpoint.servers.common import Cache, Device, Reads, Server, ServerClass, native, whole_lanes
from swa_jax.checkpoint.servers.sglang import NO_POOL, POOLS, SIZES
from swa_jax.model.config import ModelConfig


def _plainly_rotated(config: ModelConfig) -> bool:
    return config.rope_scaling is None and config.partial_rotary_factor == 1


def _full(name: str) -> tuple[ServerClass, ...]:
    return native(name, Reads.NEVER, spelled=True, only=_plainly_rotated)


_CLASSES = {
    "llama": _full("LlamaForCausalLM"),
    "qwen2": _full("Qwen2ForCausalLM"),
    "qwen3": _full("Qwen3ForCausalLM"),
    "qwen3_moe": _full("Qwen3MoeForCausalLM"),
    "gemma2": native("Gemma2ForCausalLM", spelled=True, only=_plainly_rotated, full_flags=NO_POOL),
}
_NO_CLASS = dict.fromkeys((name for name in FAMILIES if name not in _CLASSES), "it has no class for this family") | {
    "gemma4_text": "it reads the heads of full layers only beside those of images",
    "mimo_v2_flash": "its class reads hybrid_layer_pattern and swa_ keys, which transformers does not write",
    "phi3": "whether its class reads this RoPE as Hugging Face does was not found out",
}


def _held(window: int, blocks: Blocks) -> int:
    """The window, two pages, and what is not freed yet (`swa_eviction_peak_tokens`): as many again, or the batches."""
    return window + 2 * blocks.tokens + max(window, blocks.tokens, blocks.in_flight)


# `server_args.py`
SERVER = Server(
    "sglang-jax",
    "sglang-jax",
    "0.1.0.dev20260821",  # the repository on that day; the last release, 0.0.2, knows no windows
    "2026-08-21",
    "python -m sgl_jax.launch_server --model-path {folder}",
    SIZES,
    _CLASSES,
    Cache(
        POOLS,
        Pools(_held),
        dict.fromkeys(("v6e", "v5e", "v5p", "v7x"), Device(4096, block_tokens=1)),
        padded=whole_lanes,
    ),
    no_class=_NO_CLASS,
    port=30000,
)
