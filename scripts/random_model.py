"""Models of random weights, for what depends on sizes alone."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from swa_jax.checkpoint.families import model_config
from swa_jax.checkpoint.tensor_names import expected_tensors

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}


def write_random_model(folder: Path, config: dict[str, Any], shards: int = 1) -> Path:
    """A Hugging Face folder of the configuration, whose `dtype` the weights have."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    shapes, rng, places = expected_tensors(model_config(config)), np.random.default_rng(0), {}

    def drawn(shape: tuple[int, ...]) -> np.ndarray:
        values = np.ones(shape) if len(shape) == 1 else 0.05 * rng.standard_normal(shape, np.float32)
        return values.astype(DTYPES[config["dtype"]])

    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        tensors = {name: drawn(shapes[name]) for name in list(shapes)[number::shards]}
        save_file(tensors, folder / file, {"format": "pt"})
        places |= dict.fromkeys(tensors, file)
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
