"""LoRA adapters as a folder in the format of Hugging Face's PEFT library."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from swa_jax.checkpoint.folder import PATTERN_FILE, fetch
from swa_jax.checkpoint.tensor_names import hf_parameters, tensors_of
from swa_jax.errors import ConfigError
from swa_jax.files import check_destination, new_folder, write_json
from swa_jax.model.decoder import Decoder
from swa_jax.model.parameters import low_rank

PREFIX = "base_model.model."  # PEFT wraps the model twice; its names begin with both wrappers


def save_adapter(model: Decoder, destination: str | Path, *, base: str | None = None) -> Path:
    """Write a model's adapters as `adapter_config.json` and `adapter_model.safetensors`, as PEFT reads them.

    Tensors are f32, `lora_A` [r, in] and `lora_B` [out, r] of each layer. `pattern.json` beside them says under what
    attention they were trained. With several processes all call it; process 0 writes.

    Args:
      destination: a folder that does not exist yet, or is empty.
      base: the Hugging Face name of the model that they adapt, if it has one.

    Raises `ConfigError` if the model has no adapters, `CheckpointError` if the destination is in use.
    """
    if model.lora is None:
        raise ConfigError("the model has no LoRA adapters to save")
    destination = check_destination(destination)
    tensors = adapter_tensors(model)
    if jax.process_index() != 0:
        return destination
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": model.lora.rank,
        "lora_alpha": model.lora.alpha,
        "lora_dropout": model.lora.dropout,
        "target_modules": list(model.lora.targets),
        "use_rslora": model.lora.rs_lora,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    with new_folder(destination) as folder:
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        write_json(folder / "adapter_config.json", settings)
        model.pattern.to_json(folder / PATTERN_FILE)
    return destination


def adapter_tensors(model: Decoder) -> dict[str, np.ndarray]:
    """The adapters by PEFT's names, such as `base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight`."""
    stacked = {
        tuple(map(str, path)): fetch(variable[...])
        for path, variable in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam))
    }
    tensors: dict[str, np.ndarray] = {}
    if model.lora is None:
        return tensors
    adapted = [row for row in hf_parameters(model.config) if row.projection in model.lora.targets]
    for factor in (factor for row in adapted for factor in low_rank(row, model.lora.rank)):
        for tensor in tensors_of(factor):
            tensors[PREFIX + tensor.name] = np.ascontiguousarray(stacked[factor.path][tensor.place].T)
    return tensors
