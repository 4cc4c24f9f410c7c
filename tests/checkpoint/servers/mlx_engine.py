"""Runs exports in MLX-LM's own classes, on a CPU, with the caches that they make.

The interpreter of `make test-servers` runs this file, as `line_process` says.
"""

import importlib
import itertools
import json
from pathlib import Path

import mlx.core as mx
import numpy as np
from line_answers import answer_lines
from mlx_lm.models.cache import make_prompt_cache


def run(folder: str, tokens: list[int], parts: list[int]) -> dict:
    """Loads a model as `mlx_lm.utils.load_model` does: the logits of tokens that are read in parts of so many."""
    config = json.loads(Path(folder, "config.json").read_text())
    name = {"mistral": "llama"}.get(config["model_type"], config["model_type"])  # `MODEL_REMAPPING`
    module = importlib.import_module(f"mlx_lm.models.{name}")
    model = module.Model(module.ModelArgs.from_dict(config))
    weights = {}
    for file in Path(folder).glob("model*.safetensors"):
        weights |= mx.load(str(file))
    if hasattr(model, "sanitize"):
        weights = model.sanitize(weights)
    model.load_weights(list(weights.items()))
    model.eval()
    cache, bounds = make_prompt_cache(model), itertools.pairwise(np.cumsum([0, *parts]))
    read = [model(mx.array([tokens[a:b]]), cache=cache) for a, b in bounds]
    return {"logits": np.array(mx.concatenate(read, axis=1)[0]).tolist()}


if __name__ == "__main__":
    answer_lines(run)
