"""Device meshes and where every array lies on them: the axes, the rules, and the checks that name what does not fit.

Four mesh axes. `data` repeats the parameters and splits the batch; `fsdp` splits both; `context` splits the sequence
(and, like fsdp, the parameters); `tensor` splits heads, the MLP's width and the vocabulary. Several slices
(pods joined by a slower network) extend `data`, the axis that communicates least.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from swa_jax.errors import ConfigError
from swa_jax.model.config import ModelConfig

AXES = ("data", "fsdp", "context", "tensor")


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices along each axis; -1, for one axis at most, takes those that remain. `data` counts one slice's."""

    data: int = 1
    fsdp: int = -1
    context: int = 1
    tensor: int = 1
    slices: int = 1

    def __post_init__(self) -> None:
        for name, size in dataclasses.asdict(self).items():
            if size < 1 and not (size == -1 and name in AXES):
                raise ConfigError(f"'mesh.{name}' must be at least 1 (or -1: what remains), got {size}")
        if [getattr(self, name) for name in AXES].count(-1) > 1:
            raise ConfigError("'mesh' has -1 for more than one axis: only one can take what remains")


@dataclasses.dataclass(frozen=True)
class ShardingRules:
    """Which mesh axes split which dimension. A dimension's name stands for it in every tensor that has it."""

    batch: tuple[str, ...] = ("data", "fsdp")
    sequence: tuple[str, ...] = ("context",)
    embed: tuple[str, ...] = ("fsdp", "context")  # of parameters; activations keep theirs whole
    heads: tuple[str, ...] = ("tensor",)
    kv_heads: tuple[str, ...] = ("tensor",)
    mlp: tuple[str, ...] = ("tensor",)
    vocab: tuple[str, ...] = ("tensor",)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            for axis in getattr(self, field.name):
                if axis not in AXES:
                    raise ConfigError(
                        f"'sharding.{field.name}' names mesh axis '{axis}'; known: {', '.join(AXES)}"
                    )
        if self.heads != self.kv_heads:
            raise ConfigError(
                "'sharding.heads' and 'sharding.kv_heads' must be split alike, so that a query finds its keys"
            )
        if len(self.sequence) > 1 or len(self.heads) > 1 or len(self.vocab) > 1:
            raise ConfigError("'sharding.sequence', 'heads' and 'vocab' take one mesh axis each")

    def axes(self, dimension: str | None) -> tuple[str, ...]:
        return () if dimension is None else getattr(self, dimension)

    def spec(self, tensor: str, dimensions: Sequence[str | None]) -> P:
        """The PartitionSpec of a tensor whose dimensions are named; an axis that would split two of them raises."""
        owner: dict[str, str] = {}
        for dimension in dimensions:
            for axis in self.axes(dimension):
                if axis in owner:
                    raise ConfigError(
                        f"{tensor}: mesh axis '{axis}' would split both '{owner[axis]}' and '{dimension}'; take it out "
                        f"of 'sharding.{owner[axis]}' or 'sharding.{dimension}'"
                    )
                owner[axis] = str(dimension)
        return P(*(self.axes(dimension) or None for dimension in dimensions))


@dataclasses.dataclass(frozen=True)
class Partition:
    """A mesh and the rules by which arrays lie on it. Hashable: a static argument of what is compiled."""

    mesh: Mesh
    rules: ShardingRules = ShardingRules()

    def size(self, dimension: str) -> int:
        """Pieces that a dimension is split into."""
        return math.prod(self.mesh.shape[axis] for axis in self.rules.axes(dimension))

    def spec(self, *dimensions: str | None, tensor: str = "activation") -> P:
        return self.rules.spec(tensor, dimensions)

    def sharding(self, *dimensions: str | None, tensor: str = "activation") -> NamedSharding:
        return NamedSharding(self.mesh, self.spec(*dimensions, tensor=tensor))

    @property
    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, P())


def constrain(x: jax.Array, partition: Partition | None, *dimensions: str | None) -> jax.Array:
    """Asks the compiler to lay `x` out by the rules; nothing to ask without a mesh."""
    if partition is None:
        return x
    return jax.lax.with_sharding_constraint(x, partition.sharding(*dimensions))


# ---- meshes ----


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh over `devices` (default: all), neighbours on the chips' network being neighbours on the mesh.

    Raises `ConfigError` where the sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    shape = mesh_shape(config, len(devices))
    if config.slices == 1:
        grid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    elif all(getattr(device, "slice_index", None) is not None for device in devices):
        inside = (shape[0] // config.slices, *shape[1:])
        grid = mesh_utils.create_hybrid_device_mesh(
            inside, (config.slices, 1, 1, 1), devices, allow_split_physical_axes=True
        )
    else:  # devices without slices, such as CPUs: a block of them in order stands for a slice
        grid = np.asarray(devices).reshape(shape)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def mesh_shape(config: MeshConfig, num_devices: int) -> tuple[int, int, int, int]:
    """Sizes along `AXES`; `data` counts the slices too."""
    sizes = {name: getattr(config, name) for name in AXES}
    known = config.slices * math.prod(size for size in sizes.values() if size != -1)
    free = [name for name, size in sizes.items() if size == -1]
    text = f"slices {config.slices}, " + ", ".join(f"{name} {size}" for name, size in sizes.items())
    if (num_devices % known if free else num_devices != known) != 0:
        raise ConfigError(
            f"'mesh' ({text}) asks for {'a multiple of ' if free else ''}{known} devices, but there are {num_devices}: "
            "change its sizes, or set one of them to -1"
        )
    if free:
        sizes[free[0]] = num_devices // known
    return config.slices * sizes["data"], sizes["fsdp"], sizes["context"], sizes["tensor"]


# ---- parameters ----

# The dimensions of each parameter of the decoder by the tail of its path; layers are stacked in front.
_DIMENSIONS: dict[tuple[str, ...], tuple[str | None, ...]] = {
    ("embedding",): ("vocab", "embed"),
    ("lm_head", "kernel"): ("embed", "vocab"),
    ("q_proj", "kernel"): (None, "embed", "heads"),
    ("k_proj", "kernel"): (None, "embed", "kv_heads"),
    ("v_proj", "kernel"): (None, "embed", "kv_heads"),
    ("o_proj", "kernel"): (None, "heads", "embed"),
    ("q_proj", "bias"): (None, "heads"),
    ("k_proj", "bias"): (None, "kv_heads"),
    ("v_proj", "bias"): (None, "kv_heads"),
    ("gate_proj", "kernel"): (None, "embed", "mlp"),
    ("up_proj", "kernel"): (None, "embed", "mlp"),
    ("down_proj", "kernel"): (None, "mlp", "embed"),
    ("gate_proj", "bias"): (None, "mlp"),
    ("up_proj", "bias"): (None, "mlp"),
}
# LoRA's factors lie as the kernel's ends do; the rank is whole.
_DIMENSIONS |= {
    (tail[0], factor): dimensions
    for tail, kernel in _DIMENSIONS.items()
    if tail[1:] == ("kernel",) and len(kernel) == 3
    for factor, dimensions in (("lora_a", (None, kernel[1], None)), ("lora_b", (None, None, kernel[2])))
}


def state_shardings(state: Any, partition: Partition) -> Any:
    """A sharding for every leaf of `state`: parameters, and whatever carries a parameter's name and shape, such as an
    optimiser's moments. Norms, routers, output biases and counters are small and whole."""

    def one(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        names = tuple(str(getattr(key, "key", getattr(key, "name", key))) for key in path)
        names = tuple(name for name in names if name not in ("value", "raw_value"))
        dimensions = next((d for tail, d in _DIMENSIONS.items() if names[-len(tail) :] == tail), ())
        if len(dimensions) != leaf.ndim:
            return partition.replicated
        tensor = ".".join(names)
        for i, dimension in enumerate(dimensions):
            pieces = 1 if dimension is None else partition.size(dimension)
            if dimension is not None and leaf.shape[i] % pieces:
                axes = _sizes(partition, dimension)
                raise ConfigError(
                    f"parameter {tensor}, axis {i} ({dimension}), is {leaf.shape[i]} long and cannot be split in "
                    f"{pieces} ({axes}): change 'mesh' so that it can, or set 'sharding.{dimension}' to []"
                )
        return NamedSharding(partition.mesh, partition.rules.spec(tensor, dimensions))

    return jax.tree_util.tree_map_with_path(one, state)


def _sizes(partition: Partition, dimension: str) -> str:
    return " x ".join(f"{axis} {partition.mesh.shape[axis]}" for axis in partition.rules.axes(dimension))


def check_model(config: ModelConfig, partition: Partition) -> None:
    """Heads must be split whole; `ConfigError` names the count and the axis."""
    for dimension, count, name in (
        ("heads", config.num_attention_heads, "num_attention_heads"),
        ("kv_heads", config.num_key_value_heads, "num_key_value_heads"),
    ):
        if count % partition.size(dimension):
            raise ConfigError(
                f"{name} is {count}, which 'mesh.tensor' = {partition.size(dimension)} does not divide: heads are "
                "split whole, so make it a divisor"
            )


def check_batch(partition: Partition, batch: int, length: int, where: str) -> None:
    """Rows and tokens of one step's batch [batch, length] must divide among the devices; `where` names the setting."""
    for dimension, size, name in (
        ("batch", batch, "batch_size / accumulate"),
        ("sequence", length, "sequence_length"),
    ):
        pieces = partition.size(dimension)
        if size % pieces:
            raise ConfigError(
                f"'{where}': {name} = {size} cannot be split in {pieces} ({_sizes(partition, dimension)}): make it a "
                f"multiple of {pieces}, or change 'mesh'"
            )
