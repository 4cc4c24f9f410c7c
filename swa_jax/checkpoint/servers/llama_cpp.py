"""llama.cpp, which reads one GGUF file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swa_jax.checkpoint.gguf.architectures import GRAPHS
from swa_jax.checkpoint.servers.allocation import cell_entries
from swa_jax.checkpoint.servers.common import Cache, Device, Server, native
from swa_jax.model.config import ModelConfig
from swa_jax.model.pattern import AttentionPattern

if TYPE_CHECKING:
    from swa_jax.checkpoint.gguf.graphs import Described

_UNWRITTEN = (
    "no GGUF file of it is written here; llama.cpp's convert_hf_to_gguf.py converts the model it was imported from"
)
_NO_WINDOWS = "its architecture there knows no windows by layer, and no other computes the same"


def _described(config: ModelConfig, pattern: AttentionPattern) -> Described | None:
    from swa_jax.checkpoint.gguf.graphs import describe

    return describe(config, pattern)


SERVER = Server(
    "llama.cpp",
    "xllamacpp",
    "2026.10.11549",  # the last number is llama.cpp's build
    "2026-10-10",
    "llama-server --model {folder}/model.gguf --parallel 1",
    "--ctx-size {length} --ubatch-size {batched}",
    {graph.model_type: native(graph.architecture) for graph in GRAPHS},
    # `llama_kv_cache_iswa`
    Cache(
        "cells for full layers and cells for windowed ones",
        cell_entries,
        {"gpu": Device(512, batches=1, block_tokens=256), "cpu": Device(512, batches=1, block_tokens=256)},
        least_batch=32,
    ),
    no_class={
        **dict.fromkeys(("phi3", "starcoder2", "mixtral", "ministral3", "apertus"), _NO_WINDOWS),
        **dict.fromkeys(("gemma4_text", "afmoe", "exaone_moe", "cohere2_moe", "granitemoe_swa"), _UNWRITTEN),
        **dict.fromkeys(("laguna", "mimo_v2_flash"), _UNWRITTEN),
        "gpt_oss": "a file that was written did not compute the same there",
        "vaultgemma": "llama.cpp has no architecture for it",
    },
    port=8080,
    describes=_described,
)
