"""Which architecture of llama.cpp computes a model with a pattern, and the metadata that its file has.

The tables that read a file write it, and what is written is read again: it stands only if it is the same model with the
same pattern. Facts: llama.cpp's src/models, where `GRAPHS` says what the reader cannot know.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf.constants import MODEL_TENSOR as T
from gguf.constants import GGMLQuantizationType

from swa_jax.base.errors import CheckpointError, ConfigError
from swa_jax.checkpoint.families import FAMILIES, hf_pattern, model_config
from swa_jax.checkpoint.families.common import HfKeys
from swa_jax.checkpoint.gguf import hyperparameters as known
from swa_jax.checkpoint.gguf.header import GgufTensor, Header
from swa_jax.checkpoint.gguf.rope import FACTORS, rope_keys
from swa_jax.checkpoint.gguf.weights import NAMES, TensorPlace, find_places, module_of, stored_name
from swa_jax.checkpoint.tensor_names import hf_parameters, tensors_of
from swa_jax.model.config import ModelConfig
from swa_jax.model.layer_types import WINDOW
from swa_jax.model.layers import rope_frequencies
from swa_jax.model.pattern import AttentionPattern

FILE = Path("model.gguf")


class Graph(NamedTuple):
    """An architecture of llama.cpp, and the family that its files are read as."""

    architecture: str
    model_type: str
    windowed: tuple[bool, ...]  # whether it runs models with windows in some layers, and in none
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
    *(Graph(name, name, _FULL) for name in ("llama", "qwen2", "qwen3", "granite", "smollm3", "seed_oss")),
    Graph("qwen3moe", "qwen3_moe", _FULL, only=_all_sparse),
    Graph("gemma2", "gemma2", _SOME),
    Graph("gemma3", "gemma3_text", _BOTH),
    Graph("cohere2", "cohere2", _SOME),
    Graph("olmo2", "olmo2", _FULL, _UNTIED),
    Graph("olmo2", "olmo3", _BOTH, _UNTIED, _one_theta),
    Graph("exaone4", "exaone4", _SOME, only=_many_layers),
    Graph("exaone4", "exaone4", _FULL, only=lambda config: not _many_layers(config)),
    Graph("gpt-oss", "gpt_oss", _SOME, _UNTIED),
    Graph("mellum", "mellum", _BOTH, _UNTIED, _all_sparse),
    # Llama and its kin, where some layers have windows; then Qwen 2, which has three biases of four.
    Graph("granite_swa", "granite_swa", _SOME, _SINKS),
    Graph("granite_swa", "granite_swa", _SOME, _SINKS | {"attention_out_bias": True}),
    Graph("step35", "qwen3", _SOME, _UNTIED, _one_rope),
)


class Described(NamedTuple):
    """A model as a file of llama.cpp's has it."""

    architecture: str
    config: ModelConfig  # with what the architecture has besides
    hf: HfKeys  # of that
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]  # by name, in the file's order, f32; where they begin is not known
    factors: dict[str, np.ndarray]  # those among them that are of RoPE, f32
    places: dict[str, TensorPlace]  # where the model's tensors are in them, by Hugging Face's name


def describe(config: ModelConfig, pattern: AttentionPattern) -> Described | None:
    """A model with a pattern as the first architecture has it that can; None if none can."""
    windowed = WINDOW in pattern.layer_types
    for graph in GRAPHS:
        if windowed in graph.windowed and graph.only(config) and (found := _described(graph, config, pattern)) is not None:
            return found
    return None


def _described(graph: Graph, config: ModelConfig, pattern: AttentionPattern) -> Described | None:
    config = dataclasses.replace(config, model_type=graph.model_type, **graph.has)
    family = FAMILIES[graph.model_type]
    hf = family.to_hf(config) | family.window_keys(config, pattern)
    if not _says(hf, config, pattern):
        return None
    factors = _factors(config)
    tensors = {name: _header(array.shape) for name, array in factors.items()} | _tensors(graph.architecture, config)
    metadata = _metadata(graph.architecture, config, hf, pattern)
    read = known.Metadata(Header(metadata, tensors), FILE)
    try:
        again = known.hf_config(read, tensors["token_embd.weight"])
        again |= rope_keys(read, again, factors.__getitem__)
    except (CheckpointError, ConfigError):
        return None
    if not _says(again, config, pattern):
        return None
    own = {name: tensor for name, tensor in tensors.items() if name not in factors}
    places = find_places(config, own, known.ARCHITECTURES[graph.architecture].permuted, FILE)
    return Described(graph.architecture, config, hf, metadata, tensors, factors, places)


def _says(hf: HfKeys, config: ModelConfig, pattern: AttentionPattern) -> bool:
    """Whether a `config.json` describes a model and a pattern; numbers are as exact as a file keeps them."""

    def numbers(config: ModelConfig) -> Any:
        scale = config.attention_scale or config.head_dim**-0.5
        alike = dataclasses.replace(config, model_type="", initializer_range=1.0, attention_scale=scale)
        return json.loads(json.dumps(dataclasses.asdict(alike)), parse_float=lambda number: f"{float(number):.5e}")

    try:
        windows = hf_pattern(hf)
        same = numbers(model_config(hf)) == numbers(config)
    except ConfigError:
        return False
    window = pattern.sliding_window if WINDOW in pattern.layer_types else None
    return same and (windows.layer_types, windows.sliding_window) == (pattern.layer_types, window)


def _header(shape: tuple[int, ...]) -> GgufTensor:
    return GgufTensor(FILE, GGMLQuantizationType.F32, shape, 0)


# ---- metadata ----


def _metadata(architecture: str, config: ModelConfig, hf: HfKeys, pattern: AttentionPattern) -> dict[str, Any]:
    values: dict[str, Any] = {"block_count": config.num_hidden_layers, "vocab_size": config.vocab_size}
    values |= {name: hf[ours] for name, ours in known.WHOLE.items() if hf.get(ours) is not None}
    values |= {name: float(hf[ours]) for name, ours in known.NUMBERS.items() if hf.get(ours) is not None}
    values |= dict.fromkeys(("attention.key_length", "attention.value_length"), config.head_dim)
    if config.num_experts:
        values |= {"expert_count": config.num_experts, "expert_feed_forward_length": config.moe_intermediate_size}
    if "logits_scaling" in hf:
        values["logit_scale"] = float(hf["logits_scaling"])
    if WINDOW in pattern.layer_types:
        values["attention.sliding_window"] = pattern.sliding_window
        values["attention.sliding_window_pattern"] = np.array([kind == WINDOW for kind in pattern.layer_types])
        values["rope.freq_base_swa"] = config.local_rope_theta if config.rope_layers else config.rope_theta
    if architecture == "granite_swa":
        values["attention.rope_pattern"] = np.array([kind != "none" for kind in config.rope_kinds_by_layer])
    values |= _rope(config)
    if architecture == "step35":  # whose full layers rotate half of what is said
        values |= {"rope.dimension_count_swa": config.head_dim, "rope.dimension_count": 2 * config.head_dim}
        values["expert_feed_forward_length"] = 0
    named = {f"{architecture}.{name}": value for name, value in values.items()}
    return {"general.architecture": architecture} | named


def _rope(config: ModelConfig) -> dict[str, Any]:
    values = {"rope.dimension_count": config.rotary_dim, "rope.freq_base": config.rope_theta}
    scaling = config.rope_scaling
    if scaling is not None and scaling.rope_type in ("linear", "yarn"):
        values |= {"rope.scaling.type": scaling.rope_type, "rope.scaling.factor": scaling.factor}
    if scaling is not None and scaling.rope_type == "yarn":
        original = scaling.original_max_position_embeddings or config.max_position_embeddings
        values["rope.scaling.original_context_length"] = original
        values |= {f"rope.scaling.yarn_{name}": getattr(scaling, name) for name in ("beta_fast", "beta_slow")}
    return values


def _factors(config: ModelConfig) -> dict[str, np.ndarray]:
    scaling = config.rope_scaling
    if scaling is None or scaling.rope_type != "llama3":
        return {}
    plain, scaled = (rope_frequencies(config.rope_theta, each, config, 1)[0] for each in (None, scaling))
    return {FACTORS["freqs"]: (plain / scaled).astype(np.float32)}


# ---- tensors ----


def _tensors(architecture: str, config: ModelConfig) -> dict[str, GgufTensor]:
    """The tensors of a model in f32; matrices may be narrower (`narrow`)."""
    found: dict[str, GgufTensor] = {}
    for row in hf_parameters(config):
        module = module_of(row)
        kinds = NAMES[module]
        if architecture == "gpt-oss" and module == "post_attention_norm":
            kinds = (T.ATTN_POST_NORM,)
        for ours in tensors_of(row):
            shape = ours.shape if len(ours.place) < 2 else (config.num_experts, *ours.shape)
            if config.fused_experts and module in ("experts.gate_up_proj", "experts.down_proj"):
                shape = (shape[0], *shape[:0:-1])  # the matrix of each expert is the other way round
            if module == "experts.gate_up_proj":
                kinds, shape = (T.FFN_GATE_EXP, T.FFN_UP_EXP), (shape[0], shape[1] // 2, *shape[2:])
            for kind in kinds if module == "experts.gate_up_proj" else kinds[:1]:
                found[stored_name(kind, row, ours)] = _header(shape)
    return found
