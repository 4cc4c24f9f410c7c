"""MLX-LM's own classes and caches on our exports, on a CPU: the same logits, in parts and token by token.

Every golden model that MLX-LM runs with windows by our table, under one such pattern.
"""

import dataclasses

import numpy as np
import pytest
from exported_patterns import patterns
from golden_models import GOLDEN, MODELS, hf_of, logits
from line_process import line_process

from swa_jax import load_model
from swa_jax.checkpoint.families import hf_pattern
from swa_jax.checkpoint.hf_export import export_model
from swa_jax.checkpoint.hf_import import import_model
from swa_jax.checkpoint.servers import find_served

CLOSE = 1e-4
TOKENS = np.random.default_rng(0).integers(3, 130, 40).tolist()
PARTS = [11, 9, *[1] * 20]  # of several windows


@pytest.fixture(scope="session")
def mlx_lm(tmp_path_factory):
    with line_process("mlx_engine.py", tmp_path_factory.mktemp("mlx") / "log") as run:
        yield run


def windowed(model: str):
    """A pattern with windows that MLX-LM runs; None if there is none."""
    hf = hf_of(model)
    tried = [patterns(hf["num_hidden_layers"])["odd"]]
    if (own := hf_pattern(hf)).sliding_window:
        tried.append(dataclasses.replace(own, sliding_window=5))
    return next((pattern for pattern in tried if find_served("mlx-lm", hf, pattern) is not None), None)


def difference_of(folder, model, mlx_lm) -> float:
    theirs = mlx_lm(folder=str(folder), tokens=TOKENS, parts=PARTS)["logits"]
    return float(np.abs(np.array(theirs) - np.asarray(logits(model, np.array([TOKENS]))[0])).max())


@pytest.mark.parametrize("model", [model for model in MODELS if windowed(model) is not None])
def test_mlx_lm_computes_what_we_do(model, mlx_lm, tmp_path):
    pattern = windowed(model)
    checkpoint = import_model(GOLDEN / model, tmp_path / "ours")
    folder = export_model(checkpoint, tmp_path / "hf", pattern=pattern, server="mlx-lm", canary=False)
    assert difference_of(folder, load_model(checkpoint, pattern=pattern), mlx_lm) <= CLOSE
    if model == "llama-plain":
        other = dataclasses.replace(pattern, sliding_window=pattern.sliding_window + 1)
        assert difference_of(folder, load_model(checkpoint, pattern=other), mlx_lm) > 10 * CLOSE
