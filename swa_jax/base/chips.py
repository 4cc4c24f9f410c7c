"""What is known of each kind of chip: one table for operations counted, plans, simulated cycles and launchers.

`pallas_kernels` keeps its own tile sizes, which depend on a chip but are not facts about it.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from pathlib import Path

from swa_jax.base.errors import ConfigError

GIB = 2**30
# libtpu only compiles here: it must not look for chips, nor fill the disk and the terminal with logs.
COMPILE_ONLY = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_LOG_DIR": "disabled",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
}


@dataclasses.dataclass(frozen=True)
class Cloud:
    """What Google Cloud calls a TPU generation, and how its slices are cut into machines."""

    generation: str  # what a topology begins with, before its colon
    dimensions: int  # of the chips' network
    gke: str  # the node label cloud.google.com/gke-tpu-accelerator
    type: str | None  # of --accelerator-type and xpk's --tpu-type
    cores: int  # that the number in `type` counts for a chip
    runtime: str | None  # the TPU VM image; None: not offered as TPU VM
    machine: int = 4  # chips of a machine in a slice of several machines
    single: int = 4  # chips of the largest machine that is a slice by itself


@dataclasses.dataclass(frozen=True)
class Target:
    """A TPU that libtpu compiles for without one; the figures are one JAX device's."""

    topology: str  # the smallest, that one kernel is compiled for
    num_cores: int  # that work as one device
    gigahertz: float
    hbm_gib: float  # that a program may use, as the compiler says when one does not fit
    link_bytes: float  # a second, over one link in one direction: the vendor's figure for a chip by its links
    dcn_bytes: float  # a second, over the network between slices: the vendor's figure for a chip
    hbm_bytes: float  # a second, to and from the chip's memory: the vendor's figure for a chip by its devices
    torus: int  # dimensions of the chips' network, with two links each
    kernel_share: tuple[float, float]  # of the peak, reached by our kernels forward, backward: docs/kernels.md
    matmul_share: float  # of the peak, reached by XLA's matrix products: those of the plans in docs/plans
    # Whether collectives run on SparseCores, beside the rest. Otherwise a sum over all devices of a slice is never
    # scattered: the compiler sums it on each of them, which sends twice as much.
    sparse_cores: bool
    # Of the time in which weights are exchanged, where every layer is compiled by itself: what is not hidden behind
    # other work (the plans in docs/plans). Without SparseCores nothing is hidden of an exchange over the whole slice.
    shown_share: float
    vmem_kib: int = 65536  # for one operation of XLA: the fastest of what was compiled (docs/planning.md)


@dataclasses.dataclass(frozen=True)
class Chip:
    """A kind of chip; what has no meaning for it, or is not known, is None."""

    kinds: tuple[str, ...]  # what JAX calls one: `device.device_kind`
    peak_flops: float  # dense bfloat16 operations a second of one JAX device
    target: Target | None = None
    cloud: Cloud | None = None


CHIPS = {
    "v4": Chip(("TPU v4",), 275e12, cloud=Cloud("v4", 3, "tpu-v4-podslice", "v4", 2, "tpu-ubuntu2204-base")),
    "v5e": Chip(
        ("TPU v5 lite", "TPU v5e"),
        197e12,
        Target("v5e:2x2", 1, 1.5, 15.75, 50e9, 3.125e9, 819e9, 2, (0.77, 0.85), 0.85, False, 0.4),
        Cloud("v5e", 2, "tpu-v5-lite-podslice", "v5litepod", 1, "v2-alpha-tpuv5-lite", single=8),
    ),
    "v5p": Chip(
        ("TPU v5", "TPU v5p"),
        459e12,
        Target("v5p:2x2x1", 2, 1.75, 95.73, 100e9, 6.25e9, 2765e9, 3, (0.77, 0.85), 0.97, True, 0.2),
        Cloud("v5p", 3, "tpu-v5p-slice", "v5p", 2, "v2-alpha-tpuv5"),
    ),
    "v6e": Chip(
        ("TPU v6 lite", "TPU v6e"),
        918e12,
        Target("v6e:2x2", 1, 1.75, 31.24, 100e9, 12.5e9, 1640e9, 2, (0.32, 0.5), 0.77, True, 0.2, vmem_kib=114688),
        Cloud("v6e", 2, "tpu-v6e-slice", "v6e", 1, "v2-alpha-tpuv6e", single=8),
    ),
    # A JAX device is one of the chip's two cores. Not the nominal clock: the one at which published timings are met.
    "v7x": Chip(
        ("TPU7x",),
        1153.5e12,
        Target("tpu7x:2x2x1", 1, 1.88, 94.74, 100e9, 6.25e9, 3690e9, 3, (0.32, 0.5), 0.77, True, 0.2),
        Cloud("tpu7x", 3, "tpu7x", None, 2, None),
    ),
    "a100": Chip(("NVIDIA A100",), 312e12),
    "h100": Chip(("NVIDIA H100",), 989e12),
    "h200": Chip(("NVIDIA H200",), 989e12),
}
TARGETS = {name: chip.target for name, chip in CHIPS.items() if chip.target is not None}
CLOUD = {chip.cloud.generation: chip.cloud for chip in CHIPS.values() if chip.cloud is not None}


def check_libtpu() -> None:
    """Raises `ConfigError` where libtpu is not installed."""
    if importlib.util.find_spec("libtpu") is None:
        raise ConfigError(
            "libtpu is not installed, which compiles for TPUs on any Linux host; "
            f"install it with: {Path(sys.executable).name} -m pip install 'jax[tpu]'"
        )


def chip_name(device_kind: str) -> str | None:
    """The name in `CHIPS` of a JAX device's `device_kind`; NVIDIA's go on after the model's ("NVIDIA H100 80GB")."""
    for name, chip in CHIPS.items():
        for kind in chip.kinds:
            if device_kind == kind or (kind.startswith("NVIDIA") and device_kind.startswith(kind)):
                return name
    return None


def find_chip(device_kind: str) -> Chip | None:
    """The chip of a JAX device, by its `device_kind`."""
    name = chip_name(device_kind)
    return None if name is None else CHIPS[name]


def peak_flops(device_kind: str) -> float | None:
    """Dense bfloat16 operations a second of one device, None where its kind is not in the table."""
    chip = find_chip(device_kind)
    return None if chip is None else chip.peak_flops
