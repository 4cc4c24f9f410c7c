"""The adapters that PEFT is asked to load, and what identifies one on the disk."""

import json
from pathlib import Path

import numpy as np
from flax import nnx
from safetensors.numpy import load_file

from swa_jax.files import sum_of, sum_of_json
from swa_jax.model.decoder import Decoder
from swa_jax.model.lora import LoraConfig, with_lora

ATTENTION = ("q_proj", "k_proj", "v_proj")
ALL = (*ATTENTION, "o_proj", "gate_proj", "up_proj", "down_proj")
CASES = {
    "SWAA": (LoraConfig(rank=4, alpha=32.0), ATTENTION),
    "all, rsLoRA": (LoraConfig(rank=3, alpha=6.0, rs_lora=True), ALL),
    "some": (LoraConfig(rank=2, alpha=8.0), ("v_proj", "up_proj")),
}


def adapted(model: Decoder, case: str) -> Decoder:
    """The model with an adapter of a case, of those projections that it has; NumPy's numbers, the same everywhere."""
    config, targets = CASES[case]
    has = LoraConfig(targets=ALL).factors(model.config)
    settings = LoraConfig(
        config.rank, config.alpha, 0.1, tuple(t for t in targets if t in has), config.rs_lora
    )
    tuned = with_lora(model, settings, nnx.Rngs(0))
    rng = np.random.default_rng(len(case))
    state = nnx.state(tuned, nnx.LoRAParam)
    for _, variable in sorted(nnx.to_flat_state(state), key=lambda one: [str(part) for part in one[0]]):
        shape = variable[...].shape
        variable[...] = (rng.integers(-8, 9, shape) / (16 * np.sqrt(shape[1]))).astype(np.float32)
    nnx.update(tuned, state)
    return tuned


def written(folder: Path) -> str:
    """A sum of what PEFT reads: the settings, and every tensor's name, shape and numbers."""
    settings = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    sums = {
        name: [list(x.shape), sum_of(np.ascontiguousarray(x, "<f4").tobytes())] for name, x in tensors.items()
    }
    return sum_of_json([settings, sums])[:16]
