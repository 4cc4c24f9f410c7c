import functools

import jax
import pytest

import swa_jax
from swa_jax.checkpoint.hf_import import import_model


@pytest.fixture(scope="module")
def quick_compilation():
    """Most of the time is compilation; LLVM's optimisation changes no result that is tested."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def load(request, tmp_path_factory):
    """`load(case)`: a golden model of the folder that the test's file calls GOLDEN, imported once."""
    folder = tmp_path_factory.mktemp("goldens")

    @functools.cache
    def imported(case):
        return swa_jax.load_model(import_model(request.module.GOLDEN / case, folder / case))

    return imported
