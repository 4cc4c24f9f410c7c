"""Which architecture of llama.cpp computes a model with a pattern, and the metadata that its file has.

The tables that read a file write it, and what is written is read again: it stands only if it is the same model with the
same pattern.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf.constants import GGMLQuantizationType

from swa_jax.base.errors import CheckpointError, ConfigError
from swa_jax.checkpoint.families import FAMILIES, hf_pattern, model_config
from swa_jax.checkpoint.families.common import HfKeys
from swa_jax.checkpoint.gguf import hyperparameters as known
from swa_jax.checkpoint.gguf.architectures import GRAPHS, Graph
from swa_jax.checkpoint.gguf.header import GgufTensor, Header
from swa_jax.checkpoint.gguf.rope import FACTORS, rope_keys
from swa_jax.checkpoint.gguf.weights import NAMES, TensorPlace, find_places, module_of, stored_name
from swa_jax.checkpoint.tensor_names import hf_parameters, tensors_of
from swa_jax.model.config import ModelConfig
from swa_jax.model.layer_types import WINDOW
from swa_jax.model.layers import rope_frequencies
from swa_jax.model.pattern import AttentionPattern

FILE = Path("model.gguf")


class Described(NamedTuple):
    """A model as a file of llama.cpp's has it."""

    architecture: str
    config: ModelConfig  # with what the architecture has besides
    hf: HfKeys  # of that
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]  # by name, in the file's order, f32; where they begin is not known
    copies: bool  # the embedding, for an output matrix
    factors: dict[str, np.ndarray]  # those among them that are of RoPE, f32
    places: dict[str, TensorPlace]  # where the model's tensors are in them, by Hugging Face's name

    def notes(self) -> list[str]:
        """What a user should know of the file, in sentences."""
        return [
            "The weights keep their precision; llama.cpp's own llama-quantize makes the file smaller.",
            *(["Its output matrix is the embedding, stored a second time."] if self.copies else []),
        ]


def describe(config: ModelConfig, pattern: AttentionPattern) -> Described | None:
    """A model with a pattern as the first architecture has it that can; None if none can."""
    windowed = WINDOW in pattern.layer_types
    for graph in GRAPHS:
        if (
            windowed in graph.windowed
            and graph.only(config)
            and (found := _described(graph, config, pattern)) is not None
        ):
            return found
    return None


def _described(graph: Graph, config: ModelConfig, pattern: AttentionPattern) -> Described | None:
    tied = config.tie_word_embeddings
    config = dataclasses.replace(config, model_type=graph.model_type, **graph.has)
    family = FAMILIES[graph.model_type]
    hf = family.to_hf(config) | family.window_keys(config, pattern)
    if not _says(hf, config, pattern):
        return None
    factors = _factors(config)
    tensors = {name: _header(array.shape) for name, array in factors.items()} | _tensors(config)
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
    return Described(
        graph.architecture, config, hf, metadata, tensors, tied != config.tie_word_embeddings, factors, places
    )


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
    values: dict[str, Any] = {"rope.dimension_count": config.rotary_dim, "rope.freq_base": config.rope_theta}
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


def _tensors(config: ModelConfig) -> dict[str, GgufTensor]:
    """The tensors of a model in f32; matrices may be narrower. Experts of a layer are one."""
    found: dict[str, GgufTensor] = {}
    for row in hf_parameters(config):
        for ours in tensors_of(row):
            shape = ours.shape if len(ours.place) < 2 else (config.num_experts, *ours.shape)
            found[stored_name(NAMES[module_of(row)][0], row, ours)] = _header(shape)
    return found
