"""A model to import, and a place to import it into."""

import shutil
from pathlib import Path

import pytest
from golden_models import GOLDEN


@pytest.fixture
def source(tmp_path) -> Path:
    """A copy of a golden model (Qwen2, tied) that a test may damage."""
    ignore = shutil.ignore_patterns("golden.safetensors", "legacy_config.json")
    return shutil.copytree(GOLDEN / "qwen2-full", tmp_path / "source", ignore=ignore)


@pytest.fixture
def destination(tmp_path) -> Path:
    return tmp_path / "out" / "checkpoint"
