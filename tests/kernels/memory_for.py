"""Prints, as JSON, the temporary bytes of the window's backward pass on a chip that is not there. Run by test_compile.

`memory_for.py TOPOLOGY`: T = 32768, 32 heads, window 1024, head_dim 128, bf16. Of the kernel alone, and of the gradient
of `attention` with the layouts of its arguments and results left to the compiler, as inside a model, or fixed to the
default ones: then the heads, which the kernels want before the tokens, are moved by copies.
"""

import functools
import json
import sys

import jax
import jax.numpy as jnp
from compile_for import abstract_mesh
from jax.experimental import topologies
from jax.experimental.layout import Format, Layout

from pallas_kernels import AttentionSpec, attention
from swa_jax.bench import tpu_kernels

T, H, D = 32768, 32, 128


def main(topology: str) -> dict[str, int]:
    device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
    place = jax.sharding.SingleDeviceSharding(device)
    x = jax.ShapeDtypeStruct((1, T, H, D), jnp.bfloat16)

    def temporary_bytes(function, *arguments, layout=None) -> int:
        format = Format(layout, place)
        compiled = jax.jit(function, in_shardings=format, out_shardings=format).lower(*arguments).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    with jax.sharding.use_abstract_mesh(abstract_mesh(topology, device)):
        function = functools.partial(attention, spec=AttentionSpec(1024), implementation="tpu")
        out, pullback = jax.eval_shape(functools.partial(jax.vjp, function), x, x, x)

        def backward(pullback, dout):
            return pullback(dout)

        kernel, arguments = tpu_kernels.window_backward(H=H, K=H, T=T, D=D)
        return {
            "gradients": 3 * x.size * x.dtype.itemsize,
            "kernel": temporary_bytes(kernel, *arguments),
            "attention": temporary_bytes(backward, pullback, out, layout=Layout.AUTO),
            "attention in default layouts": temporary_bytes(backward, pullback, out),
        }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
