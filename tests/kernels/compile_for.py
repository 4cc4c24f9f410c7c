"""Compiles every TPU kernel for a chip that is not there. Run by test_compile: `compile_for.py TOPOLOGY [NAME ...]`.

Prints a JSON line for each call of `CALLS`: its name, how many kernels its lowered text holds, its temporary memory in
units of its first two arguments, and the seconds that compiling took. Each kernel's plain form is compiled with the
blocks of a long sequence, 1500 tokens being no multiple of them; variants mostly with one block of 512, which compiles
in a third of the time.
"""

import functools
import json
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.experimental.layout import Format, Layout
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import AttentionSpec, attention, decode_attention, routed_attention
from pallas_kernels.math.ring import Ring, RowOrder
from pallas_kernels.math.rotary import Rotation
from pallas_kernels.math.spec import Packing, PerHead, coordinates
from pallas_kernels.tpu.decode.cache_write import write_pool
from pallas_kernels.tpu.decode.decode import decode_pool

CORES = {"v5p": 2}  # of a device, where not one: a v5p's two work as one
B, H, K = 1, 4, 2
SHORT, LONG = 500, 1500
SIGMOID = {"activation": "sigmoid"}


class Compiled(NamedTuple):
    function: Callable
    arguments: tuple  # ShapeDtypeStructs
    kernels: int  # custom calls in the lowered text
    sharding: tuple = ()  # of the arguments over the axis "x" of a mesh of the topology's devices; () for one device
    out_sharding: tuple = ()
    in_place: Layout | None = None  # of the first two arguments, pools that the call writes to and gives back


def shape(*sizes, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype))


def options(names, length=0, heads=H, kv_heads=K) -> dict:
    known = {
        "q_segment_ids": shape(B, length, dtype=jnp.int32),
        "q_positions": shape(B, length, dtype=jnp.int32),
        "alibi_slopes": shape(heads, dtype=jnp.float32),
        "sigmoid_bias": shape(heads, dtype=jnp.float32),
        "sink_logits": shape(heads, dtype=jnp.float32),
        "full_heads": shape(kv_heads, dtype=bool),
        "full_from": shape(B, 1, dtype=jnp.int32),
    }
    return {name: known[name] for name in names}


def forward_and_backward(function):
    """Its values and the gradients of all its floating-point arguments."""

    def both(*arguments):
        out, pullback = jax.vjp(function, *arguments)
        return out, pullback(out)

    return both


def train(spec, *names, kernels, head_dim=128, dtype="bfloat16", heads=H, kv_heads=K, length=SHORT) -> Compiled:
    """Attention with lse and its gradients, with the named options."""
    q, kv = shape(B, length, heads, head_dim, dtype=dtype), shape(B, length, kv_heads, head_dim, dtype=dtype)

    def both(q, k, v, options):
        function = functools.partial(
            attention, spec=spec, **options, return_lse=spec.activation == "softmax", implementation="tpu"
        )
        return forward_and_backward(function)(q, k, v)

    return Compiled(both, (q, kv, kv, options(names, length, heads, kv_heads)), kernels)


def routed(spec, *names, kernels, head_dim=128, length=SHORT) -> Compiled:
    q, kv = shape(B, length, H, head_dim), shape(B, length, K, head_dim)
    gate = shape(B, length, dtype=jnp.float32)

    def both(q, k, v, gate, options):
        function = functools.partial(routed_attention, spec=spec, **options, implementation="tpu")
        return forward_and_backward(function)(q, k, v, gate)

    return Compiled(both, (q, kv, kv, gate, options(names, length)), kernels)


def rotated(spec, *, kernels, head_dim=128, length=SHORT, routed=False) -> Compiled:
    """Packed attention of queries that the kernels rotate, and its gradients."""
    q, kv = shape(B, length, H, head_dim), shape(B, length, K, head_dim)
    table, ids = shape(B, length, head_dim, dtype=jnp.float32), shape(B, length, dtype=jnp.int32)

    def both(q, k, v, cos, sin, ids):
        given = {"rotation": Rotation(cos, sin, head_dim // 2), "implementation": "tpu", "q_segment_ids": ids}

        def function(q, k, v):
            if routed:
                gate = jnp.ones(q.shape[:2])
                return routed_attention(q, k, v, gate, spec, **given)[0]
            return attention(q, k, v, spec, **given)

        return forward_and_backward(function)(q, k, v)

    return Compiled(both, (q, kv, kv, table, table, ids), kernels)


def decode(spec, *names, kernels, tokens, entries, ring=False, head_dim=128, dtype="bfloat16") -> Compiled:
    batch = 2
    q = shape(batch, tokens, H, head_dim, dtype=dtype)
    cache = shape(batch, entries, K, head_dim, dtype=dtype)
    numbers = shape(batch, dtype=jnp.int32)
    given = options(names)
    if ring:
        given["kv_positions"] = shape(batch, entries, dtype=jnp.int32)

    def function(q, k, v, lengths, starts, options):
        return decode_attention(q, k, v, spec, lengths=lengths, starts=starts, **options, implementation="tpu")

    return Compiled(function, (q, cache, cache, numbers, numbers, given), kernels)


def layers(spec, kernels) -> Compiled:
    """A scan over layers with other full heads each."""
    q, kv = shape(B, SHORT, H, 128), shape(3, B, SHORT, K, 128)

    def deep(q, k, v, full_heads):
        def layer(x, parameters):
            k, v, full = parameters
            return x + attention(x, k, v, spec, full_heads=full, implementation="tpu"), None

        return jax.lax.scan(layer, q, (k, v, full_heads))[0]

    def both(q, k, v, full_heads):
        return forward_and_backward(functools.partial(deep, full_heads=full_heads))(q, k, v)

    return Compiled(both, (q, kv, kv, shape(3, K, dtype=bool)), kernels)


def sharded(spec, by_heads: bool, kernels) -> Compiled:
    """Inside shard_map: the batch, or the heads, over four devices."""
    along = P(None, None, "x") if by_heads else P("x")
    q, kv = shape(4, SHORT, 8, 128), shape(4, SHORT, 4, 128)
    ids, full = shape(4, SHORT, dtype=jnp.int32), shape(4, dtype=bool)
    placed = (along, along, along, P() if by_heads else P("x"), P("x") if by_heads else P())

    def both(q, k, v, ids, full_heads):
        options = {"full_heads": full_heads} if by_heads else {"q_segment_ids": ids}
        function = functools.partial(attention, spec=spec, **options, implementation="tpu")
        return forward_and_backward(function)(q, k, v)

    return Compiled(both, (q, kv, kv, ids, full), kernels, placed, (placed[0], placed[:3]))


def shared(spec, length: int, kernels) -> Compiled:
    """Inside shard_map: the tokens of a row over four devices, in zig-zag order."""
    along, ring = P(None, "x"), Ring("x", RowOrder(4, zigzag=True), by_index=True)
    q, kv, tokens = shape(1, length, 2, 128), shape(1, length, 1, 128), shape(1, length, dtype=jnp.int32)

    def both(q, k, v, ids, positions):
        packing = Packing(ids, ring.gather(ids), positions, ring.gather(positions))

        def function(q, k, v):
            return attention(q, k, v, spec, packing=packing, implementation="tpu", ring=ring)

        return forward_and_backward(function)(q, k, v)

    return Compiled(both, (q, kv, kv, tokens, tokens), kernels, (along,) * 5, (along, (along,) * 3))


def pools(spec, entries, *names, head_dim=128, dtype="bfloat16", tokens=1, heads=32, kv_heads=8, **static) -> Compiled:
    """Decoding steps that write to the pools of eight layers and read one: no copy of the pools is made."""
    batch = 8
    pool, ints = shape(8 * kv_heads, batch, entries, head_dim, dtype=dtype), shape(batch, dtype=jnp.int32)
    given = options([name for name in names if name not in ("ring", "full_from")], 0, heads, kv_heads)

    def run(k_pool, v_pool, q, slots, lengths, ring, full_from, values, given):
        packing = {"kv_positions": ring} if "ring" in names else {}
        packing |= {"full_from": full_from} if "full_from" in names else {}
        q_positions = lengths[:, None] - tokens + jnp.arange(tokens)

        def step(i, carry):
            out, *pools = carry
            pools = [write_pool(pool, slots, values, lengths - 1) for pool in pools]
            where = coordinates(tokens, entries, q_positions=q_positions, **packing)
            return out + decode_pool(q, *pools, slots, spec, where, PerHead(**given), **static), *pools

        return jax.lax.fori_loop(0, 3, step, (q, k_pool, v_pool))

    q, values = shape(batch, tokens, heads, head_dim, dtype=dtype), shape(batch, kv_heads, head_dim, dtype=dtype)
    slots, ring = shape(kv_heads, dtype=jnp.int32), shape(batch, entries, dtype=jnp.int32)
    layout = Layout((0, 1, 3, 2) if head_dim % 128 else (0, 1, 2, 3))
    return Compiled(run, (pool, pool, q, slots, ints, ring, ints, values, given), 3, in_place=layout)


def sharded_pools(spec) -> Compiled:
    """A decoding step inside shard_map: KV heads over four devices, each with pools of its own heads."""
    batch, entries, layers, kv_heads = 2, 1028, 3, 8
    pool, new = shape(layers, kv_heads, batch, entries, 128), shape(batch, kv_heads, 128)
    by_head, by_row = P(None, "x"), P(None, None, "x")

    def step(q, k_pool, v_pool, new, lengths):
        here = k_pool.shape[1]
        slots = here + jnp.arange(here, dtype=jnp.int32)  # of layer 1
        pools = [
            write_pool(x.reshape(-1, *x.shape[2:]), slots, new, lengths - 1).reshape(x.shape) for x in (k_pool, v_pool)
        ]
        where = coordinates(1, entries, q_positions=lengths[:, None] - 1)
        rows = (x.reshape(-1, *x.shape[2:]) for x in pools)
        return decode_pool(q, *rows, slots, spec, where, PerHead()), tuple(pools)

    arguments = shape(batch, 1, 4 * kv_heads, 128), pool, pool, new, shape(batch, dtype=jnp.int32)
    return Compiled(step, arguments, 3, (by_row, by_head, by_head, by_head, P()), (by_row, (by_head, by_head)))


# One kernel forward and one backward. Full heads have launches of their own. Routed attention has one forward, or two
# where one cannot do both branches, and two backward, for the window and outside. Keys that VMEM cannot
# hold go backward in chunks.
WINDOW, SMALL = AttentionSpec(1024), AttentionSpec(300)
CALLS = {
    "window": train(WINDOW, kernels=2, length=LONG),
    "window-head-dim-64": train(WINDOW, kernels=2, head_dim=64, length=LONG),
    "window-head-dim-64-sigmoid": train(
        AttentionSpec(256, **SIGMOID),
        *("q_segment_ids", "alibi_slopes", "sigmoid_bias"),
        kernels=2,
        head_dim=64,
        kv_heads=H,
        length=LONG,
    ),
    "window-head-dim-80": train(SMALL, kernels=2, head_dim=80),
    "window-head-dim-256": train(SMALL, kernels=2, head_dim=256, length=LONG),
    "window-float32": train(SMALL, kernels=2, dtype="float32"),
    "window-packed-long": train(AttentionSpec(1024), "q_segment_ids", kernels=2, length=LONG),
    "window-packed-alibi": train(SMALL, "q_segment_ids", "alibi_slopes", kernels=2, length=LONG),
    "window-sigmoid": train(AttentionSpec(300, **SIGMOID), "alibi_slopes", "sigmoid_bias", kernels=2, head_dim=96),
    "window-softcap-sink-logits": train(
        AttentionSpec(300, logit_softcap=30.0), "sink_logits", kernels=2, heads=6, kv_heads=1
    ),
    "window-of-one": train(AttentionSpec(1), kernels=2, heads=2, length=100),
    "short-window": train(AttentionSpec(128), "q_segment_ids", kernels=2, length=8200, heads=2),
    "sink-tokens": train(AttentionSpec(1024, 128), kernels=2, length=LONG),
    "sink-tokens-packed": train(AttentionSpec(300, 4), "q_segment_ids", kernels=3, head_dim=64),
    "sink-tokens-packed-long": train(AttentionSpec(1024, 128), "q_segment_ids", kernels=3, length=LONG),
    "chunked": train(AttentionSpec(300, 4, chunked=True), "q_segment_ids", "full_from", kernels=2),
    "decode-chunked": decode(AttentionSpec(1024, chunked=True), kernels=1, tokens=1, entries=1024, ring=True),
    "window-bidirectional": train(AttentionSpec(300, causal=False), kernels=2),
    "long-window": train(AttentionSpec(4096), kernels=2, length=6000, heads=2),
    "longer-window": train(AttentionSpec(4097), kernels=2, length=6000, heads=2),
    "longer-window-head-dim-256": train(
        AttentionSpec(2049), kernels=2, length=4000, heads=2, head_dim=256, dtype="float32"
    ),
    "full": train(AttentionSpec(), kernels=2, length=LONG),
    "full-packed": train(AttentionSpec(), "q_segment_ids", kernels=2, length=LONG),
    "full-packed-beyond-vmem": train(AttentionSpec(), "q_segment_ids", kernels=3, length=40960, heads=1, kv_heads=1),
    "full-beyond-vmem": train(AttentionSpec(), kernels=3, length=40960, heads=1, kv_heads=1),
    "window-head-dim-256-float32": train(WINDOW, kernels=2, head_dim=256, dtype="float32", length=4096),
    "full-bidirectional": train(AttentionSpec(causal=False), kernels=2, head_dim=80),
    "full-head-dim-256-float32": train(AttentionSpec(), kernels=2, head_dim=256, dtype="float32"),
    "full-sigmoid": train(AttentionSpec(**SIGMOID), "alibi_slopes", "sigmoid_bias", "q_segment_ids", kernels=2),
    "full-from": train(AttentionSpec(300, 4), "full_from", "alibi_slopes", kernels=4),
    "full-from-packed-long": train(WINDOW, "q_segment_ids", "full_from", kernels=4, length=LONG),
    "full-from-beyond-vmem": train(WINDOW, "full_from", kernels=5, length=40960, heads=1, kv_heads=1),
    "full-heads": train(WINDOW, "full_heads", kernels=4, length=LONG),
    "everything": train(
        AttentionSpec(300, 4, logit_softcap=30.0),
        *("q_segment_ids", "alibi_slopes", "sink_logits", "full_from", "full_heads"),
        kernels=7,
        head_dim=96,
    ),
    "sigmoid-everything": train(
        AttentionSpec(300, 4, logit_softcap=30.0, **SIGMOID),
        *("q_segment_ids", "alibi_slopes", "sigmoid_bias", "full_from", "full_heads"),
        kernels=7,
        head_dim=64,
    ),
    "positions": train(SMALL, "q_positions", kernels=2),
    "routed": routed(WINDOW, kernels=5, length=LONG),
    "routed-packed": routed(WINDOW, "q_segment_ids", kernels=5, length=LONG),
    "routed-in-part": routed(AttentionSpec(1024), kernels=5, length=6000),  # the last block is not whole
    "routed-everything": routed(
        AttentionSpec(300, 4), "q_segment_ids", "alibi_slopes", "sink_logits", "full_heads", kernels=11
    ),
    "routed-sigmoid": routed(AttentionSpec(300, **SIGMOID), "sigmoid_bias", kernels=5, head_dim=64),
    "rotated-window": rotated(WINDOW, kernels=2, length=LONG),
    "rotated-full": rotated(AttentionSpec(), kernels=2, length=LONG),
    "rotated-routed": rotated(WINDOW, kernels=5, length=LONG, routed=True),
    "rotated-64": rotated(WINDOW, kernels=2, length=LONG, head_dim=64),
    "rotated-256": rotated(WINDOW, kernels=2, length=LONG, head_dim=256),
    "decode-full": decode(AttentionSpec(), "sink_logits", kernels=1, tokens=1, entries=2048),
    "decode-full-8": decode(AttentionSpec(), kernels=1, tokens=8, entries=2048, head_dim=256, dtype="float32"),
    "decode-ring": decode(AttentionSpec(1024, 4), kernels=1, tokens=1, entries=1028, ring=True, head_dim=64),
    "decode-ring-8": decode(
        AttentionSpec(1024), "alibi_slopes", "full_heads", kernels=1, tokens=8, entries=1032, ring=True
    ),
    "decode-sigmoid": decode(
        AttentionSpec(512, **SIGMOID), "sigmoid_bias", kernels=1, tokens=1, entries=2048, head_dim=80
    ),
    "layers": layers(SMALL, kernels=4),
    "sharded-batch": sharded(AttentionSpec(300, 4), by_heads=False, kernels=3),
    "sharded-heads": sharded(SMALL, by_heads=True, kernels=4),
    "sharded-pools": sharded_pools(AttentionSpec(1024, 4)),
    "pools-full": pools(AttentionSpec(), 32768),
    "pools-ring": pools(AttentionSpec(1024, 4), 1028, "ring", "sink_logits"),
    "pools-ring-2": pools(AttentionSpec(4096, 4), 4100, "ring", tokens=2),
    "pools-8": pools(AttentionSpec(1024, 4), 32768, "full_from", "full_heads", tokens=8),
    "pools-head-dim-64": pools(AttentionSpec(1024), 8192, "alibi_slopes", head_dim=64, tokens=4, heads=16),
    "pools-head-dim-80": pools(
        AttentionSpec(99, logit_softcap=30.0, **SIGMOID),
        *(5000, "alibi_slopes", "sigmoid_bias"),
        head_dim=80,
        heads=12,
        kv_heads=12,
    ),
    "pools-head-dim-96": pools(AttentionSpec(1024), 5001, head_dim=96, heads=12, kv_heads=4),
    "pools-float32": pools(AttentionSpec(), 8192, head_dim=256, dtype="float32", heads=8, kv_heads=4),
    "pools-scattered": pools(AttentionSpec(1024), 4099, "ring", head_dim=256, heads=8, kv_heads=2, scattered=True),
    "shared-row": shared(AttentionSpec(), 4096, kernels=2),
    # A kernel for the keys of each device, and one back.
    "shared-row-in-ring": shared(AttentionSpec(), 36864, kernels=8),
    "routed-beside-many-keys": routed(WINDOW, "q_segment_ids", kernels=5, length=32768),
    "rotated-routed-beside-many-keys": rotated(WINDOW, kernels=5, length=32768, routed=True),
}


def abstract_mesh(topology: str, device) -> AbstractMesh:
    """What makes JAX trace for the device although it is not there."""
    cores = next((n for name, n in CORES.items() if topology.startswith(name)), 1)
    abstract = AbstractDevice(device_kind=device.device_kind, num_cores=cores, platform="tpu")
    return AbstractMesh((1,), ("x",), abstract_device=abstract)


def compile_one(call: Compiled, topology: str, devices) -> tuple[int, float]:
    """Compiles the call for the first device, or for four.

    Returns the number of kernels in its lowered text, and its temporary memory in units of its first two arguments.
    """
    function, mesh = call.function, abstract_mesh(topology, devices[0])
    if call.sharding:
        real = Mesh(np.array(devices[:4]), ("x",), axis_types=(AxisType.Auto,))
        function = jax.shard_map(function, mesh=real, in_specs=call.sharding, out_specs=call.out_sharding)
        places = jax.tree.map(functools.partial(NamedSharding, real), call.sharding)
    else:
        places = jax.tree.map(lambda _: SingleDeviceSharding(devices[0]), call.arguments)
    arguments = jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), call.arguments, places
    )
    jitted = jax.jit(function)
    if call.in_place is not None:
        kept = (Format(call.in_place, SingleDeviceSharding(devices[0])),) * 2
        formats = {"in_shardings": kept + (None,) * (len(arguments) - 2), "out_shardings": (None, *kept)}
        jitted = jax.jit(function, donate_argnums=(0, 1), **formats)
    with jax.set_mesh(real) if call.sharding else jax.sharding.use_abstract_mesh(mesh):
        lowered = jitted.lower(*arguments)
    temporary = lowered.compile().memory_analysis().temp_size_in_bytes
    first = sum(x.size * x.dtype.itemsize for x in arguments[:2])
    return lowered.as_text().count("@tpu_custom_call"), temporary / first


def main(topology: str, names: list[str]) -> None:
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    for name in names or CALLS:
        start = time.process_time()
        kernels, temporary = compile_one(CALLS[name], topology, devices)
        seconds = round(time.process_time() - start, 1)
        report = {"name": name, "kernels": kernels, "temporary": temporary, "seconds": seconds}
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
