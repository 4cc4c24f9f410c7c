"""The adapters that PEFT is asked to load, and what identifies one on the disk."""

import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import load_file

from swa_jax.base.files import sum_of, sum_of_json
from swa_jax.model.config import ModelConfig
from swa_jax.model.decoder import Decoder
from swa_jax.model.lora import LoraConfig, with_lora
from swa_jax.model.pattern import AttentionPattern

ATTENTION = ("q_proj", "k_proj", "v_proj")
ALL = (*ATTENTION, "o_proj", "g_proj", "gate_proj", "up_proj", "down_proj")
CASES = {
    "SWAA": (LoraConfig(rank=4, alpha=32.0, dropout=0.1), ATTENTION),
    "all, rsLoRA": (LoraConfig(rank=3, alpha=6.0, rs_lora=True), ALL),
    "some": (LoraConfig(rank=2, alpha=8.0), ("v_proj", "up_proj")),
}


def adapted(model: Decoder, case: str) -> Decoder:
    """The model with an adapter of a case, of those projections that it has."""
    return filled(with_lora(model, _settings(model.config, case), nnx.Rngs(0)), case)


def adapters_alone(config: ModelConfig) -> dict[str, Decoder]:
    """The same of every case, without weights: what writing an adapter needs of a model."""

    def draw() -> dict[str, Decoder]:
        model = Decoder(config, AttentionPattern.from_recipe("full", config), rngs=nnx.Rngs(0))
        return {case: with_lora(model, _settings(config, case), nnx.Rngs(0)) for case in CASES}

    return {case: filled(model, case) for case, model in nnx.eval_shape(draw).items()}


def _settings(config: ModelConfig, case: str) -> LoraConfig:
    settings, targets = CASES[case]
    has = {name for *_, name in LoraConfig(targets=ALL).factors(config)}
    return dataclasses.replace(settings, targets=tuple(name for name in targets if name in has))


def filled(model: Decoder, case: str) -> Decoder:
    """The same with NumPy's random numbers in its adapters, which are the same everywhere."""
    rng = np.random.default_rng(len(case))
    state = nnx.state(model, nnx.LoRAParam)
    for _, variable in sorted(nnx.to_flat_state(state), key=lambda one: [str(part) for part in one[0]]):
        shape = variable.get_value().shape
        numbers = rng.integers(-8, 9, shape) / (16 * np.sqrt(shape[1]))
        variable.set_value(jnp.asarray(numbers.astype(np.float32)))
    nnx.update(model, state)
    return model


def written(folder: Path) -> str:
    """A sum of what PEFT reads: the settings, and every tensor's name, shape and numbers."""
    settings = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    sums = {name: [list(x.shape), sum_of(np.ascontiguousarray(x, "<f4").tobytes())] for name, x in tensors.items()}
    return sum_of_json([settings, sums])[:16]
