"""The options with which a TPU's compiler takes a training step."""

from __future__ import annotations

from collections.abc import Mapping

import jax

from swa_jax.model.sharding import Partition

# A weight that `fsdp` splits is gathered when its layer runs. Left to itself, the compiler may multiply by one piece
# after the other instead: contractions of a few dozen rows each, added up in bf16.
TPU_OPTIONS = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}


def compiler_options(partition: Partition | None, given: Mapping[str, str]) -> dict[str, str] | None:
    """Those of the mesh's devices, with what a run's configuration gives on top; None where there are none."""
    platform = jax.default_backend() if partition is None else partition.mesh.devices.flat[0].platform
    return {**(TPU_OPTIONS if platform == "tpu" else {}), **given} or None
