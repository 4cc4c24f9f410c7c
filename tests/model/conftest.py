import jax
import pytest


@pytest.fixture(scope="module")
def quick_compilation():
    """Most of the time is compilation; LLVM's optimisation changes no result that is tested."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
