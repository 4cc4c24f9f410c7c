"""Of each architecture of llama.cpp, which models it computes, and whether its windows go by layer.

Where a model's own architecture knows no windows, another may compute the same: Granite-SWA is Llama with sink logits,
and Step 3.5 without gates and experts is Qwen3. Both read one flag a layer (src/models of llama.cpp).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from swa_jax.model.config import ModelConfig


class Graph(NamedTuple):
    """An architecture of llama.cpp, and the family that its files are read as."""

    architecture: str
    model_type: str
    windowed: tuple[bool, ...]  # whether it runs models with windows in some layers (True), and in none (False)
    # What it has, whatever the model has. An output matrix of its own is then the embedding once more, biases are 0,
    # and sink logits so low that they count for nothing.
    has: Mapping[str, Any] = {}
    only: Callable[[ModelConfig], bool] = lambda config: True


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
