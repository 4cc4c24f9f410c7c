"""tpu-inference: vLLM on TPUs, which plans caches with vLLM's code.

Its own classes in JAX know no window; those of vLLM do, and run where a variable says so.
"""

from swa_jax.checkpoint.servers.allocation import grouped_entries
from swa_jax.checkpoint.servers.common import Cache, Device, Server, whole_lanes
from swa_jax.checkpoint.servers.vllm import BY_TRANSFORMERS, EXPERTS, GROUPS, NATIVE, NO_CLASS, SIZES

_SEQUENCES = 256  # `--max-num-seqs`, unless it is told otherwise


def _page(length: int) -> int:
    """The page tables lie in scalar memory, so that pages grow (`PallasAttentionBackend`)."""
    page = 16 if length > 8192 else min(max(_power_of_two(length) // 16, 16), 256)
    return max(page, _power_of_two(-(-length // (2**17 // _SEQUENCES))))


def _power_of_two(number: int) -> int:
    """The least that is not below it."""
    return 1 << (number - 1).bit_length()


SERVER = Server(
    "tpu-inference",
    "tpu-inference",
    "0.32.0",
    "2026-10-22",
    "vllm serve {folder}",
    SIZES,
    NATIVE,
    Cache(
        GROUPS,
        grouped_entries,
        # vLLM has numbers for "V6E", "V5E" and "V5P", but this platform calls them "TPU V6E" and so on.
        dict.fromkeys(("v6e", "v5e", "v5p", "v7x"), Device(2048)),
        pages=_page,
        padded=whole_lanes,
    ),
    no_class={
        **NO_CLASS,
        **dict.fromkeys(BY_TRANSFORMERS, "it runs no models of transformers"),
        **dict.fromkeys(EXPERTS, "whether it runs what this class of vLLM has was not found out"),
    },
    port=8000,
    environment="MODEL_IMPL_TYPE=vllm",
)
