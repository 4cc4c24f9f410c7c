"""The real models of `make models`, for tests marked `models`."""

from pathlib import Path

import pytest

MODELS = Path(__file__).parents[1] / "models"
FILES = {"smollm2": "SmolLM2-135M-Instruct.Q4_1.gguf", "gemma3-270m": "gemma-3-270m-q4_k_m.gguf"}


def real_model(name: str) -> Path:
    """The GGUF file of a model; a test skips without it."""
    file = MODELS / FILES[name]
    if not file.is_file():
        pytest.skip(f"models/{file.name} is not there: run make models")
    return file
