"""LoRA adapters as a folder in the format of Hugging Face's PEFT library."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from swa_jax.base.errors import ConfigError
from swa_jax.base.files import check_destination, new_folder, write_json
from swa_jax.checkpoint.families import family_of
from swa_jax.checkpoint.folder import PATTERN_FILE, fetch
from swa_jax.checkpoint.tensor_names import hf_parameters, joined_parts, tensors_of
from swa_jax.model.decoder import Decoder
from swa_jax.model.parameters import low_rank

LOG = logging.getLogger(__name__)
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # PEFT wraps the model twice; its names begin with both wrappers


def save_adapter(model: Decoder, destination: str | Path, *, base: str | None = None) -> Path:
    """Write a model's adapters as `adapter_config.json` and `adapter_model.safetensors`, as PEFT reads them.

    Tensors are f32, `lora_A` [r, in] and `lora_B` [out, r] of each layer. `pattern.json` beside them says under what
    attention they were trained. Where the family's checkpoints join projections (Phi-3's `qkv_proj`), their adapters
    become one, of the sum of their ranks. With several processes all call it; process 0 writes.

    Args:
      destination: a folder that does not exist yet, or is empty.
      base: the Hugging Face name of the model that they adapt, if it has one.

    Raises `ConfigError` if the model has no adapters, `CheckpointError` if the destination is in use.
    """
    if model.lora is None:
        raise ConfigError("the model has no LoRA adapters to save")
    destination = Path(destination)
    if jax.process_index() == 0:  # it may be there already when the others come here
        destination = check_destination(destination)
    tensors = adapter_tensors(model)
    if jax.process_index() != 0:
        return destination
    tensors, joined = _join_adapters(model, tensors)
    of_mlp = sorted(name for name in tensors if ".mlp." in name or ".gate_proj." in name)
    if of_mlp and not family_of(model.config).mlps_by_peft:
        LOG.warning(
            "PEFT 0.21 does not load some adapters of '%s' models, such as %s: serve the merged model instead",
            model.config.model_type,
            of_mlp[0],
        )
    rank, alpha = model.lora.rank, model.lora.alpha
    single = set(model.lora.targets) - {name for names in joined.values() for name in names}
    # A longer rank needs a greater alpha: the factor on A B stays alpha / rank, or alpha / sqrt(rank).
    growth = {name: math.sqrt(len(names)) if model.lora.rs_lora else len(names) for name, names in joined.items()}
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": model.lora.dropout,
        "target_modules": [_module_name(model, name) for name in model.lora.targets if name in single] + list(joined),
        "rank_pattern": {name: len(names) * rank for name, names in joined.items()},
        "alpha_pattern": {name: factor * alpha for name, factor in growth.items()},
        "use_rslora": model.lora.rs_lora,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    with new_folder(destination) as folder:
        save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        write_json(folder / ADAPTER_CONFIG, settings)
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
            array = stacked[factor.path][tensor.place]
            tensors[PREFIX + tensor.name] = np.ascontiguousarray(array.T if tensor.transposed else array)
    return tensors


def _join_adapters(
    model: Decoder, tensors: dict[str, np.ndarray]
) -> tuple[dict[str, np.ndarray], dict[str, list[str]]]:
    """The adapters as Hugging Face's modules have them, and {joined module: the projections that are adapted in it}.

    The adapter of a joined module has the A of its projections below each other, and their B as blocks on a diagonal.
    """
    assert model.lora is not None
    tensors, adapted, rank = dict(tensors), {}, model.lora.rank
    for name, parts in joined_parts(model.config).items():
        mine = [part for part in parts if "experts" not in part.path]  # which have no adapters
        chosen = [part.path[-2] for part in mine if part.path[-2] in model.lora.targets]
        if not chosen:
            continue
        adapted[name.split(".")[-2]] = chosen
        a: list[np.ndarray] = []
        b = np.zeros((sum(part.shape[0] for part in parts), len(chosen) * rank), np.float32)
        row = 0
        for part in parts:
            if part.path[-2] in chosen:
                first, second = (_factor_name(part.name, letter) for letter in "AB")
                b[row : row + part.shape[0], len(a) * rank : (len(a) + 1) * rank] = tensors.pop(second)
                a.append(tensors.pop(first))
            row += part.shape[0]
        tensors |= {_factor_name(name, "A"): np.concatenate(a), _factor_name(name, "B"): b}
    return tensors, adapted


def _module_name(model: Decoder, projection: str) -> str:
    """What PEFT calls a projection: with the module that it is in, where other modules have its name too. Those are a
    shared expert's, which have no adapters, and those of an MLP where the family has another name for a projection."""
    config = model.config
    row = next(row for row in hf_parameters(config) if row.projection == projection)
    *_, parent, name, _ = row.hf_name.split(".")
    shared = config.shared_expert_intermediate_size > 0 and parent == "mlp"
    alone = name == projection and (not shared or not family_of(config).mlps_by_peft)
    return name if alone else f"{parent}.{name}"


def _factor_name(name: str, letter: str) -> str:
    return f"{PREFIX}{name.removesuffix('.weight')}.lora_{letter}.weight"
