"""The options with which a TPU's compiler takes a training step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from swa_jax.base.chips import find_chip
from swa_jax.base.errors import ConfigError
from swa_jax.model.sharding import Partition

XlaOptions = Mapping[str, str | bool | int | float]

TPU_OPTIONS: XlaOptions = {
    # A weight that `fsdp` splits is gathered when its layer runs. Left to itself, the compiler may multiply by one
    # piece after the other instead: contractions of a few dozen rows each, added up in bf16.
    "xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000",
    # VMEM for one operation. With the compiler's own 16 MiB, matrix products read their operands many times over.
    "xla_tpu_scoped_vmem_limit_kib": 65536,
}
# Collectives on the SparseCores, beside the step. Without these the TensorCores send, and the step waits.
SPARSE_CORE_OPTIONS: XlaOptions = {
    "xla_tpu_enable_sparse_core_collective_offload_all_gather": True,
    "xla_tpu_enable_sparse_core_collective_offload_2d_all_gather": True,
    "xla_tpu_enable_sparse_core_collective_offload_3d_all_gather": True,
    "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": True,
    "xla_tpu_enable_sparse_core_collective_offload_nd_reduce_scatter": True,
    "xla_tpu_enable_sparse_core_collective_offload_all_reduce": True,
    "xla_tpu_prefer_async_allgather_to_allreduce": True,  # else v5p sums zeros over the slice in place of a gather
    "xla_tpu_use_tc_device_shape_on_sc": True,
    "xla_sc_disable_megacore_partitioning": True,
    # What is gathered ahead otherwise fills the chip: Qwen3-8B took 31.0 of a v6e's 31.2 GiB, and 26.0 so.
    "xla_tpu_scheduler_percent_shared_memory_limit": 70,
}


def compiler_options(partition: Partition | None, given: XlaOptions) -> dict[str, Any] | None:
    """Those of the mesh's devices, with what a run's configuration gives on top; None where there are none."""
    device = jax.devices()[0] if partition is None else partition.mesh.devices.flat[0]
    own = TPU_OPTIONS if device.platform == "tpu" else {}
    chip = find_chip(device.device_kind)
    if chip is not None and chip.target is not None:
        own = {**own, "xla_tpu_scoped_vmem_limit_kib": chip.target.vmem_kib}
        if chip.target.sparse_cores:
            own = {**own, **SPARSE_CORE_OPTIONS}
    return {**own, **given} or None


def check_options(given: XlaOptions, device: Any) -> None:
    """Have the compiler of `device`, which need not be here, read the options.

    Raises `ConfigError`: it does not know one, or cannot use its value.
    """
    together = _refusal(given, device)
    if together is None:
        return
    what, refusal = "'xla_options' together", together
    for name, value in given.items():
        if (alone := _refusal({name: value}, device)) is not None:
            what, refusal = f"'xla_options.{name}' = {value}", alone
            break
    raise ConfigError(
        f'{what} cannot be used: the compiler for {device.device_kind} says "{refusal}"; correct the name or value, '
        "or take it out"
    )


def _refusal(options: XlaOptions, device: Any) -> str | None:
    """What the compiler says of a program that any options suit."""
    number = jax.ShapeDtypeStruct((), jnp.float32, sharding=SingleDeviceSharding(device))
    try:
        jax.jit(jnp.negative, compiler_options=dict(options)).lower(number).compile()
    except jax.errors.JaxRuntimeError as error:
        return str(error).splitlines()[0].removeprefix("INVALID_ARGUMENT: ").rstrip(": ")
    return None
