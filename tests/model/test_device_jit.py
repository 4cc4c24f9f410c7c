"""Generation is compiled with what a GPU's compiler has to be told."""

import jax
import jax.numpy as jnp
import pytest

from swa_jax.model import device_jit as module
from swa_jax.model.device_jit import device_jit


@pytest.mark.parametrize("platform", ["gpu", "cpu"])
def test_the_options_of_a_gpu_reach_the_compiler_on_a_gpu_alone(platform, monkeypatch):
    """Every compiler of JAX reads the options of all platforms, so that a CPU's knows a wrong name too."""
    monkeypatch.setattr(jax, "default_backend", lambda: platform)

    def power(x: jax.Array, n: int) -> jax.Array:
        return x**n

    assert device_jit(static_argnames="n")(power)(jnp.float32(2), n=3) == 8
    monkeypatch.setitem(module.GPU_OPTIONS, "xla_gpu_no_such_option", True)
    compiled = device_jit(static_argnames="n")(power)
    if platform == "cpu":
        assert compiled(jnp.float32(2), n=3) == 8
        return
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_gpu_no_such_option"):
        compiled(jnp.float32(2), n=3)
