"""Rotary embeddings: from a GGUF file's keys and factors to the keys of `config.json`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from swa_jax.base.errors import CheckpointError
from swa_jax.checkpoint.gguf.hyperparameters import DEFAULT_THETA, Metadata
from swa_jax.model.layer_types import FULL, WINDOW

LLAMA3_LENGTHS = [2**n for n in range(4, 21)]  # of first trainings; the released models have 8192
NEVER_ROTATES = 1e20  # a factor
BY_LAYER_TYPE = ("olmo3", "mellum")  # windowed layers of these are never scaled
FACTORS = {name: f"rope_{name}.weight" for name in ("freqs", "factors_long", "factors_short")}


def rope_keys(metadata: Metadata, hf: dict[str, Any], read: Callable[[str], np.ndarray]) -> dict[str, Any]:
    """The keys that describe the rotary embeddings of a model.

    Args:
      hf: what else `config.json` says.
      read: gives a tensor of factors [rotary channels / 2], f32.

    Raises `CheckpointError` for a type of scaling that is not known.
    """
    theta = metadata.number("rope.freq_base") or DEFAULT_THETA
    local = metadata.number("rope.freq_base_swa")
    if hf["model_type"] == "gemma4_text":
        return {"rope_parameters": _proportional(metadata, theta, local or DEFAULT_THETA, read)}
    scaling = _scaling(metadata, hf, theta, read)
    keys: dict[str, Any] = {"rope_theta": theta}
    rotated = metadata.whole("rope.dimension_count", hf["head_dim"])
    if rotated != hf["head_dim"] and metadata.architecture != "step35":  # whose full layers rotate half of it
        keys["partial_rotary_factor"] = rotated / hf["head_dim"]
    if original := metadata.whole("rope.scaling.original_context_length"):
        keys["original_max_position_embeddings"] = original
    if hf["model_type"] in BY_LAYER_TYPE:
        full = {"rope_type": "default"} | (scaling or {}) | {"rope_theta": theta}
        windowed = {"rope_type": "default", "rope_theta": theta if local is None else local}
        return keys | {"rope_parameters": {FULL: full, WINDOW: windowed}}
    if hf["model_type"] == "ministral3" and scaling is not None:
        scaling["llama_4_scaling_beta"] = metadata.number("attention.temperature_scale")
    if hf["model_type"] == "gemma3_text":
        keys["rope_local_base_freq"] = DEFAULT_THETA if local is None else local
    return keys | {"rope_scaling": scaling}


def _proportional(metadata: Metadata, theta: float, local: float, read: Callable[[str], np.ndarray]) -> dict[str, Any]:
    """Gemma 4's: the factors of the channels of full layers that are not rotated are so large that nothing rotates."""
    rotated = 1.0
    if FACTORS["freqs"] in metadata.tensors:
        rotated = float((read(FACTORS["freqs"]) < NEVER_ROTATES).mean())
    full = {"rope_type": "proportional", "partial_rotary_factor": rotated, "rope_theta": theta}
    return {FULL: full, WINDOW: {"rope_type": "default", "rope_theta": local}}


def _scaling(
    metadata: Metadata, hf: dict[str, Any], theta: float, read: Callable[[str], np.ndarray]
) -> dict[str, Any] | None:
    kind = metadata.text("rope.scaling.type") or "linear"
    factor = metadata.number("rope.scaling.factor") or metadata.number("rope.scale_linear") or 1.0
    if FACTORS["freqs"] in metadata.tensors:
        return _by_frequency(read(FACTORS["freqs"]), theta, hf)
    if FACTORS["factors_long"] in metadata.tensors and FACTORS["factors_short"] in metadata.tensors:
        return _longrope(metadata, hf, read)
    if kind == "none" or (kind == "linear" and factor == 1):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return _yarn(metadata, hf, factor)
    if kind == "longrope":
        if hf["model_type"] == "phi3" and not metadata.whole("rope.scaling.original_context_length"):
            return None
        raise CheckpointError(f"{metadata.file}: the factors of LongRoPE are missing ({FACTORS['factors_long']})")
    what = f"{kind[:40]!r} is not supported; supported: none, linear, yarn, longrope"
    raise metadata.wrong("rope.scaling.type", what)


def _yarn(metadata: Metadata, hf: dict[str, Any], factor: float) -> dict[str, Any]:
    scaling: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": metadata.whole("rope.scaling.original_context_length")
        or hf.get("max_position_embeddings"),
    }
    for key in ("beta_fast", "beta_slow"):
        if (value := metadata.number(f"rope.scaling.yarn_{key}")) is not None:
            scaling[key] = value
    if (value := metadata.number("rope.scaling.yarn_attn_factor")) is not None:
        scaling["attention_factor"] = value
    elif (value := metadata.number("rope.scaling.attn_factor")) not in (None, 1.0):
        scaling["attention_factor"] = value * (0.1 * math.log(max(factor, 1)) + 1)
    elif log_multiplier := metadata.number("rope.scaling.yarn_log_multiplier"):
        scaling |= {"mscale": 1.0, "mscale_all_dim": log_multiplier}
    if hf["model_type"] == "gpt_oss":  # trained without rounding, which llama.cpp does all the same
        scaling["truncate"] = False
    return scaling


def _longrope(metadata: Metadata, hf: dict[str, Any], read: Callable[[str], np.ndarray]) -> dict[str, Any]:
    scaling: dict[str, Any] = {"rope_type": "longrope"}
    for name in ("short", "long"):
        scaling[f"{name}_factor"] = _decimals(read(FACTORS[f"factors_{name}"]))
    if attention := metadata.number("rope.scaling.attn_factor"):
        context = hf.get("max_position_embeddings") or 0
        original = metadata.whole("rope.scaling.original_context_length") or context
        stretch = max(context / original, 1) if original else 1
        usual = math.sqrt(1 + math.log(stretch) / math.log(original)) if original > 1 else 1.0
        if abs(attention - usual) > 1e-6 * usual:
            scaling["attention_factor"] = attention
    return scaling


def _by_frequency(factors: np.ndarray, theta: float, hf: dict[str, Any]) -> dict[str, Any]:
    """Llama 3's rule where it gives these factors, which is how they were made; else they stand one by one."""
    if np.all(factors == 1):
        return {"rope_type": "linear", "factor": 1.0}
    most = float(factors.max())
    pairs = len(factors)
    wavelengths = 2 * np.pi * theta ** (np.arange(pairs) / pairs)
    for original in LLAMA3_LENGTHS:
        # Llama 3.1 (arXiv:2407.21783): low_freq_factor 1, high_freq_factor 4.
        smooth = np.clip((original / wavelengths - 1) / 3, 0, 1)
        if most > 1 and np.allclose(factors, 1 / ((1 - smooth) / most + smooth), rtol=1e-4, atol=0):
            return {
                "rope_type": "llama3",
                "factor": float(str(np.float32(most))),
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": original,
            }
    single = _decimals(factors)
    return {
        "rope_type": "longrope",
        "factor": 1.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": hf.get("max_position_embeddings"),
        "short_factor": single,
        "long_factor": single,
    }


def _decimals(factors: np.ndarray) -> list[float]:
    return [float(str(factor)) for factor in factors]
