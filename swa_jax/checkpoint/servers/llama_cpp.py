"""llama.cpp, which reads one GGUF file: of each architecture, which models it computes and whether windows go by layer.

Where a model's own architecture knows no windows, another may compute the same: Granite-SWA is Llama with sink logits,
and Step 3.5 without gates and experts is Qwen3. Both read one flag a layer (src/models of llama.cpp).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from swa_jax.checkpoint.servers.allocation import cell_entries
from swa_jax.checkpoint.servers.common import Cache, Device, Server, any_model, native
from swa_jax.model.config import ModelConfig
from swa_jax.model.pattern import AttentionPattern

if TYPE_CHECKING:
    from swa_jax.checkpoint.gguf.graphs import Described


class Graph(NamedTuple):
    """An architecture of llama.cpp, and the family that its files are read as."""

    architecture: str
    model_type: str
    windowed: tuple[bool, ...]  # whether it runs models with windows in some layers (True), and in none (False)
    # What it has, whatever the model has. An output matrix of its own is then the embedding once more, biases are 0,
    # and sink logits so low that they count for nothing.
    has: Mapping[str, Any] = {}
    only: Callable[[ModelConfig], bool] = any_model


def _one_rope(config: ModelConfig) -> bool:
    return not config.rope_layers and config.rope_scaling is None


def _one_theta(config: ModelConfig) -> bool:
    return not config.rope_layers or config.local_rope_theta == config.rope_theta


def _all_sparse(config: ModelConfig) -> bool:
    return {*config.mlp_kinds} == {"sparse"} and _one_theta(config)


def _many_layers(config: ModelConfig) -> bool:
    return config.num_hidden_layers == 64  # by which llama.cpp knows the EXAONE 4 that has windows


_SINKS, _UNTIED = {"sink_logits": True}, {"tie_word_embeddings": False}
_FULL, _SOME, _BOTH = (False,), (True,), (False, True)
GRAPHS = (
    *(Graph(name, name, _FULL) for name in ("llama", "qwen2", "qwen3", "granite", "smollm3")),
    Graph("qwen3moe", "qwen3_moe", _FULL, only=_all_sparse),
    Graph("gemma2", "gemma2", _SOME),
    Graph("gemma3", "gemma3_text", _BOTH),
    Graph("command-r", "cohere", _FULL),
    Graph("cohere2", "cohere2", _SOME),
    Graph("olmo2", "olmo2", _FULL, _UNTIED),
    Graph("olmo2", "olmo3", _BOTH, _UNTIED, _one_theta),
    Graph("exaone4", "exaone4", _SOME, only=_many_layers),
    Graph("exaone4", "exaone4", _FULL, only=lambda config: not _many_layers(config)),
    Graph("mellum", "mellum", _BOTH, _UNTIED, _all_sparse),
    # Llama and its kin; then Qwen2, which has three biases of the four.
    Graph("granite_swa", "granite_swa", _SOME, _SINKS),
    Graph("granite_swa", "granite_swa", _SOME, _SINKS | {"attention_out_bias": True}),
    Graph("step35", "qwen3", _SOME, _UNTIED, _one_rope),
)
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
