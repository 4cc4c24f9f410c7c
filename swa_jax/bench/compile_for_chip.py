"""Compiles one function of `swa_jax.bench.tpu_kernels`, or of `peer_calls`, for a TPU that is not here.

`cycles` runs this in a process of its own, since libtpu reads its flags when it is loaded, and its simulator ends the
process when it meets what it cannot do.

    python -m swa_jax.bench.compile_for_chip FUNCTION TOPOLOGY CORES SETTINGS_AS_JSON

Prints a line of JSON before it compiles (what the program consists of) and one after (`temp_bytes`).
"""

import json
import math
import resource
import sys
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental import topologies
from jax.experimental.layout import Format, Layout
from jax.extend import core

from swa_jax.bench import peer_calls, tpu_kernels

LARGEST_FILE = 400_000_000  # bytes; libtpu's logs and dumps can grow to many times that


def pallas_calls(jaxpr: core.Jaxpr) -> Iterator[core.JaxprEqn]:
    """The kernel launches of a program, those in inner ones included."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "pallas_call":
            yield eqn
            continue
        for parameter in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda x: isinstance(x, core.Jaxpr | core.ClosedJaxpr)
        ):
            if isinstance(parameter, core.ClosedJaxpr):
                parameter = parameter.jaxpr
            if isinstance(parameter, core.Jaxpr):
                yield from pallas_calls(parameter)


def kernel_name(eqn: core.JaxprEqn) -> str:
    return eqn.params["name"]


def static_steps(eqn: core.JaxprEqn) -> tuple[int, int]:
    """The steps of the grid along the dimensions that are known, and the number of those that are data."""
    grid = eqn.params["grid_mapping"].grid
    if not grid:  # the kernel loops by itself
        return 1, 1
    static = [size for size in grid if isinstance(size, int)]
    return math.prod(static), len(grid) - len(static)


def reads_scalar_memory(eqn: core.JaxprEqn) -> bool:
    """Whether the kernel's schedule or grid is data, which a simulator does not know: it reads zeros.

    The window kernels alone go by zeros as they should: `bench` says for which documents. To `window_sink_gradients`
    zeros are a row of one document. Of a kernel that loops by itself, without a grid, the simulator does not follow the
    conditions.
    """
    grid = eqn.params["grid_mapping"]
    if grid.num_dynamic_grid_bounds > 0 or not grid.grid:
        return True
    return grid.num_index_operands > 0 and not kernel_name(eqn).startswith("window_")


def main(name: str, topology: str, num_cores: int, settings: dict[str, Any]) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_FILE, LARGEST_FILE))
    device: Any = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
    abstract = jax.sharding.AbstractDevice(device_kind=device.device_kind, num_cores=num_cores, platform="tpu")
    mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=abstract)
    here = jax.sharding.SingleDeviceSharding(device)
    peer = name in peer_calls.FUNCTIONS
    function, arguments = (peer_calls if peer else tpu_kernels).FUNCTIONS[name](**settings)
    arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), arguments)
    # As between a model's projections, the compiler decides how arrays lie.
    any_layout = Format(Layout.AUTO, here)
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(function, in_shardings=any_layout, out_shardings=any_layout).trace(*arguments)
        lowered = traced.lower()
    launches = {kernel_name(eqn): eqn for eqn in pallas_calls(traced.jaxpr.jaxpr)}
    unknown = peer or not tpu_kernels.scalars_are_zero(name, **settings)
    if peer:
        counts = dict.fromkeys(launches, peer_calls.executions(name, **settings))
    else:
        counts = tpu_kernels.executions(name, device.device_kind, **settings)
    program = {
        "queries": arguments[0].shape,
        "kernels": {name: unknown and reads_scalar_memory(eqn) for name, eqn in launches.items()},
        "steps": {name: static_steps(eqn) for name, eqn in launches.items()},
        "executions": {kernel: count._asdict() for kernel, count in counts.items()},
    }
    print(json.dumps(program), flush=True)
    memory = lowered.compile().memory_analysis()
    print(json.dumps({"temp_bytes": memory.temp_size_in_bytes}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4]))
