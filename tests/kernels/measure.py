"""Prints, as JSON, the temporary bytes and the CPU seconds of one attention call. Run by test_cost.

CPU time, the least of several runs, is what other work on the machine disturbs least.
"""

import json
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import AttentionSpec, attention


def main(implementation, length, window, backward, kv_heads=1, full_heads=None):
    rng = np.random.default_rng(0)
    q, k, v, dout = (
        jnp.asarray(rng.normal(size=(1, length, heads, 16)), jnp.float32)
        for heads in (2 * kv_heads, kv_heads, kv_heads, 2 * kv_heads)
    )
    full = None if full_heads is None else jnp.arange(kv_heads) < full_heads

    def forward(q, k, v, full):
        return attention(q, k, v, AttentionSpec(window=window), full_heads=full, implementation=implementation)

    def both(q, k, v, full):
        return jax.vjp(lambda *qkv: forward(*qkv, full), q, k, v)[1](dout)

    compiled = jax.jit(both if backward else forward).lower(q, k, v, full).compile()
    jax.block_until_ready(compiled(q, k, v, full))
    seconds = []
    while len(seconds) < 3 or (len(seconds) < 20 and sum(seconds) < 5):
        start = time.process_time()
        jax.block_until_ready(compiled(q, k, v, full))
        seconds.append(time.process_time() - start)
    return {"temp_bytes": compiled.memory_analysis().temp_size_in_bytes, "seconds": min(seconds)}


print(json.dumps(main(**json.loads(sys.argv[1]))))
