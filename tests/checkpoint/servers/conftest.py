"""vLLM's engine in a process of its own, and a checkpoint folder of each family."""

from pathlib import Path

import pytest
from asking import asked, goldens
from sized_models import write_model

from swa_jax.checkpoint.hf_import import import_model


@pytest.fixture(scope="session")
def engine(tmp_path_factory):
    """vLLM as it is: a function from an export's folder to what `engine.run` returns."""
    with asked(tmp_path_factory.mktemp("engine") / "log") as ask:
        yield ask


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """A checkpoint folder of each family, made when it is asked for."""
    made: dict[str, Path] = {}

    def of(family):
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            made[family] = import_model(write_model(goldens()[family], folder / "hf"), folder / "ours")
        return made[family]

    return of
