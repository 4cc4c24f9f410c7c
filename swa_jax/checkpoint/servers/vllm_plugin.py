"""vLLM with `plugins/vllm`, which runs the pattern itself; what it plans, vLLM's code plans."""

from swa_jax.checkpoint.families import FAMILIES, inexpressible
from swa_jax.checkpoint.families.vllm_plugin import architecture_of
from swa_jax.checkpoint.servers.allocation import grouped_entries
from swa_jax.checkpoint.servers.common import Cache, Reads, Server, native
from swa_jax.checkpoint.servers.vllm import CPU, GROUPS, SIZES
from swa_jax.model.layer_types import HYBRID, WINDOW
from swa_jax.model.pattern import AttentionPattern


def _lacks(pattern: AttentionPattern) -> str | None:
    if pattern.num_last_tokens:
        return f"num_last_tokens = {pattern.num_last_tokens}"
    types = tuple(WINDOW if kind == HYBRID else kind for kind in pattern.layer_types)
    return inexpressible(AttentionPattern(types, pattern.sliding_window, nope_full_layers=pattern.nope_full_layers))


_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)


def _padded(head_dim: int) -> int:
    """To what vLLM's kernels on CPUs take."""
    return min((taken for taken in _HEADS if taken >= head_dim), default=head_dim)


_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text")
_OTHERS = "the plug-in has classes for Llama, Mistral, Qwen2, Qwen3 and Gemma 3 alone"
SERVER = Server(
    "vLLM with swa-jax-vllm",
    "vllm",
    "0.32.0",
    "2026-10-18",
    "vllm serve {folder}",
    SIZES,
    {model_type: native(architecture_of(model_type), Reads.PATTERN) for model_type in _FAMILIES},
    Cache(GROUPS, grouped_entries, {"cpu": CPU}, padded=_padded),
    no_class={model_type: _OTHERS for model_type in FAMILIES if model_type not in _FAMILIES},
    port=8000,
    lacks=_lacks,
)
