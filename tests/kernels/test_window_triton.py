"""The prototype in Triton itself: right by its interpreter, and compiled for three generations of GPUs without one."""

import importlib.util
import json

import pytest
from python_process import python

pytest.importorskip("triton", reason="needs the extra `triton`")
pytest.importorskip("jax_triton", reason="needs the extra `triton`")
HAS_PLUGIN = importlib.util.find_spec("jax_cuda13_plugin") is not None

INTERPRETED = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from pallas_kernels.gpu.window_triton import window_forward_kernel
from pallas_kernels.math.parts import LOG2E
from pallas_kernels.math.reference import attention
from pallas_kernels.math.spec import AttentionSpec, PerHead, coordinates


class Host:  # what the interpreter asks of an array
    def __init__(self, array):
        self.array, self.dtype = array, f"torch.{array.dtype}"
        self.untyped_storage = self.cpu = lambda: self
        self.new_empty = lambda *_, **__: Host(self.array)
        self.data_ptr, self.storage_offset = lambda: self.array.ctypes.data, lambda: 0
        self.size, self.stride = lambda: self.array.shape, lambda: ()
        self.set_ = lambda storage, *_: setattr(self, "array", storage.array)
        self.copy_ = lambda other: None


T, window, block_q, block_k = json.loads(sys.argv[1])
H, K, D = 4, 2, 16
keys = jax.random.split(jax.random.key(0), 3)
q, k, v = (np.asarray(jax.random.normal(key, (2, T, n, D))) for key, n in zip(keys, (H, K, K)))
out, lse = np.zeros_like(q), np.zeros((2, H, T), np.float32)
sizes = {"H": H, "K": K, "D": D, "WINDOW": window, "BLOCK_Q": block_q, "BLOCK_K": block_k}
arrays = *map(Host, (q, k, v)), T, D**-0.5 * LOG2E, Host(out), Host(lse)
window_forward_kernel[-(-T // block_q), H, 2](*arrays, **sizes)
expected, expected_lse = attention(q, k, v, AttentionSpec(window), coordinates(T, T), PerHead())
errors = [np.abs(out - expected).max(), np.abs(lse.swapaxes(1, 2) / LOG2E - expected_lse).max()]
print(json.dumps([float(error) for error in errors]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(100, 40, 32, 16), (96, 16, 32, 32), (70, 70, 64, 16), (64, 33, 16, 32)])
def test_the_interpreted_kernel_agrees_with_the_oracle(shape):
    """Ragged ends, windows that are no multiple of a block, and one as long as the row."""
    said = python("-c", INTERPRETED, json.dumps(shape), TRITON_INTERPRET="1", JAX_PLATFORMS="cpu")
    assert max(json.loads(said.splitlines()[-1])) < 2e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "instruction"), [(80, "mma.sync"), (90, "wgmma.mma_async"), (100, "tcgen05.mma")]
)
def test_it_compiles_for_each_generation_s_own_matrix_instructions(capability, instruction):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from pallas_kernels.gpu.window_triton import window_forward_kernel

    arrays = dict.fromkeys(("q", "k", "v", "out"), "*bf16") | {"lse": "*fp32", "T": "i32", "scale": "fp32"}
    sizes = {"H": 8, "K": 2, "D": 128, "WINDOW": 1024, "BLOCK_Q": 128, "BLOCK_K": 64}
    source = ASTSource(window_forward_kernel, arrays | dict.fromkeys(sizes, "constexpr"), sizes)
    options = {"num_warps": 8, "num_stages": 3, "enable_fp_fusion": True}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert instruction in compiled.asm["ptx"]
    assert compiled.asm["cubin"]


@pytest.mark.slow
@pytest.mark.skipif(not HAS_PLUGIN, reason="needs JAX's plugin for CUDA (the extra `cuda`), but no GPU")
def test_it_lowers_inside_jit_for_an_h200(monkeypatch):
    import inspect

    import jax
    import jax.numpy as jnp
    from jax._src.interpreters import partial_eval
    from jax.sharding import AbstractDevice, AbstractMesh
    from jax_triton import triton_lib

    from pallas_kernels.gpu.window_triton import window_forward

    rule = triton_lib._triton_kernel_call_dce_rule
    if len(inspect.signature(rule).parameters) == 2:  # jax-triton 0.4.1; JAX 0.12 gives it the live inputs too
        fitting = lambda used, live, eqn: rule(used, eqn)  # noqa: E731
        monkeypatch.setitem(partial_eval.dce_rules, triton_lib.triton_kernel_call_p, fitting)
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="cuda")
    q, k = (jax.ShapeDtypeStruct((1, 512, heads, 64), jnp.bfloat16) for heads in (4, 2))
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        traced = jax.jit(lambda q, k, v: window_forward(q, k, v, 128)).trace(q, k, k)
        assert "triton_kernel_call" in traced.lower(lowering_platforms=("cuda",)).as_text()
