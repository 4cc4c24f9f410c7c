"""Compiles the GPU's kernels for a GPU that is not there: `python -m tests.kernels.compile_for_gpu DEVICE [NAME ...]`.

It takes the compiler in JAX's plugin for CUDA (`pip install 'jax[cuda13]'`), and no driver. Lowering, which other tests
do everywhere, stops before the tiles get their registers and shared memory. Prints a JSON line for each call, with the
seconds that compiling took; a kernel that does not fit shared memory ends it.
"""

import json
import os
import sys
import time

os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # of a driver, which need not be there
os.environ["JAX_PLATFORMS"] = ""  # whatever there is: the plugin is registered, and the CPU computes

import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from .suite import Call
from .test_gpu import CALLS, abstract_gpu, program

KILOBYTE = 1024
# What XLA wants to know of a device, from NVIDIA's data sheets.
TARGETS = {
    "h100": ("NVIDIA H100 80GB HBM3", (9, 0), 132, {"shared": 228, "optin": 227, "l2": 50 * KILOBYTE}, 3352, 1.755),
    "h200": ("NVIDIA H200", (9, 0), 132, {"shared": 228, "optin": 227, "l2": 50 * KILOBYTE}, 4800, 1.98),
    "a100": ("NVIDIA A100-SXM4-80GB", (8, 0), 108, {"shared": 164, "optin": 163, "l2": 40 * KILOBYTE}, 2039, 1.41),
    "rtx4090": ("NVIDIA GeForce RTX 4090", (8, 9), 128, {"shared": 100, "optin": 99, "l2": 72 * KILOBYTE}, 1008, 2.52),
}


def target_config(name: str) -> str:
    """XLA's description of a device, as text."""
    kind, (major, minor), cores, kilobytes, gigabytes_per_second, gigahertz = TARGETS[name]
    return f"""
        gpu_device_info {{
          threads_per_block_limit: 1024  threads_per_warp: 32  threads_per_core_limit: 2048
          shared_memory_per_block: {48 * KILOBYTE}
          shared_memory_per_core: {kilobytes["shared"] * KILOBYTE}
          shared_memory_per_block_optin: {kilobytes["optin"] * KILOBYTE}
          core_count: {cores}  fpus_per_core: {64 if (major, minor) == (8, 0) else 128}
          block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
          memory_bandwidth: {gigabytes_per_second * 10**9}
          l2_cache_size: {kilobytes["l2"] * KILOBYTE}
          clock_rate_ghz: {gigahertz}
          device_memory_size: {80 * 2**30}
          registers_per_core_limit: 65536  registers_per_block_limit: 65536
          cuda_compute_capability {{ major: {major}  minor: {minor} }}
        }}
        platform_name: "CUDA"
        dnn_version_info {{ major: 9  minor: 10 }}
        device_description_str: "{kind}"
    """


def kinds_of(call: Call):
    """The ways to make a call, of `KERNELS`."""
    yield "attention"
    if call.spec.causal and "ring" not in call.options:
        yield from ["routed"] * (call.spec.window is not None)
        yield from ["decode 1", "pools 1"] * (call.segments is None)


def main(device: str, names: list[str]) -> None:
    target = target_config(device)
    topology = topologies.get_topology_desc(device, "cuda", target_config=target, topology="1x1x1")
    place = SingleDeviceSharding(topology.devices[0])
    for name, kind in [(one, kind) for one in names or CALLS for kind in kinds_of(CALLS[one])]:
        function, arguments = program(name, kind)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), arguments)
        start = time.process_time()
        with jax.sharding.use_abstract_mesh(abstract_gpu(TARGETS[device][0])):
            lowered = jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",))
        lowered.compile()
        print(json.dumps({"name": f"{name}, {kind}", "seconds": round(time.process_time() - start, 1)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
